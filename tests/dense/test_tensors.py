"""Tensors in chunks, cut in any way, are put together again, and no more is read than what is asked for."""

import json
import random

import numpy as np
import pytest
import torch
from support.chunked import chunk_of, edit_index, save_chunked
from support.forge import Forge
from support.forked import outcomes
from support.mutations import mutated, mutated_json
from support.sweeps import SWEEP_STRIDE, mostly_slow

from recckpt import CheckpointReader
from recckpt.dense import tensors
from recckpt.dense.loader import fitted, has_stand_ins, planned_reads
from recckpt.dense.tensors import DenseTensors
from recckpt.errors import CorruptCheckpointError, FormatVersionError, RecckptError
from recckpt.format import tensor_index
from recckpt.inspect.verify import verify
from recckpt.output_dir.listing import locate
from recckpt.storage import open_storage

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.float8_e4m3fn, torch.uint16, torch.int8]


def values(shape, dtype=torch.float32, seed=0):
    """Return a tensor of random bits, which may be NaN."""
    n_bytes = torch.empty(shape, dtype=dtype).nbytes
    high = 2 if dtype == torch.bool else 256
    data = torch.randint(0, high, (n_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return data.view(dtype).reshape(shape)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def cut(rng, offsets, sizes, depth):
    """Return boxes that tile a box."""
    dims = [dim for dim, size in enumerate(sizes) if size > 1]
    if not depth or not dims:
        return [(tuple(offsets), tuple(sizes))]
    dim = rng.choice(dims)
    at = rng.randrange(1, sizes[dim])
    low, high, further = list(sizes), list(sizes), list(offsets)
    low[dim], high[dim], further[dim] = at, sizes[dim] - at, offsets[dim] + at
    return cut(rng, offsets, low, depth - 1) + cut(rng, further, high, depth - 1)


def reader_of(root):
    storage = open_storage(str(root))
    return DenseTensors(storage, "ckpt_1", locate(storage, "ckpt_1").manifest)


@pytest.fixture
def small(monkeypatch):
    """Blocks and slabs so small that tensors have many."""
    monkeypatch.setattr(tensor_index, "BLOCK_BYTES", 128)
    monkeypatch.setattr(tensors, "_SLAB_BYTES", 300)


@mostly_slow()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_come_back_of_every_dtype(tmp_path, small, dtype):
    shapes = [(), (1,), (7,), (5, 3), (3, 50, 2), (0,), (4, 0, 2), (1, 1, 300)]
    tensors = {f"t{number}": values(shape, dtype, number) for number, shape in enumerate(shapes)}
    rng = random.Random(0)
    shards = [[], []]
    for name, tensor in tensors.items():
        for box in cut(rng, [0] * tensor.dim(), tensor.shape, 2):
            shards[rng.randrange(2)].append(chunk_of(name, tensor, box))
    save_chunked(tmp_path, *shards)
    with CheckpointReader(str(tmp_path)) as reader:
        for name, tensor in tensors.items():
            found = reader.read_tensor(name)
            assert found.shape == tuple(tensor.shape)
            assert found.tobytes() == bits(tensor)
            assert found.flags.c_contiguous
            assert found.flags.writeable
    assert verify(str(tmp_path)) == []


@pytest.mark.parametrize("seed", range(8))
def test_any_box_of_any_tiling_is_read_and_little_else(tmp_path, small, seed):
    rng = random.Random(seed)
    shape = [rng.randint(1, 12) for _ in range(rng.randint(1, 4))]
    whole = values(shape, torch.int16, seed)
    boxes = cut(rng, [0] * len(shape), shape, rng.randint(0, 4))
    save_chunked(
        tmp_path, [chunk_of("w", whole, box) for box in boxes[::2]], [chunk_of("w", whole, b) for b in boxes[1::2]]
    )
    reader = reader_of(tmp_path)
    [stored] = reader.tensors.values()
    for _ in range(30):
        offsets = [rng.randrange(size) for size in shape]
        sizes = [rng.randint(0, size - begin) for begin, size in zip(offsets, shape, strict=True)]
        before = reader.bytes_read
        found = reader.read_box(stored, sizes, planned_reads(stored, offsets, sizes))
        place = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
        assert np.array_equal(found, whole[place].numpy())
        assert reader.bytes_read - before <= 2 * whole.nbytes + 128 * len(boxes)
    reader.close()


def test_only_the_blocks_that_a_box_lies_in_are_read_and_damage_of_others_is_not_seen(tmp_path, small):
    whole = values((100, 16), torch.float64)  # a row is a block
    forge = save_chunked(tmp_path, [chunk_of("w", whole)])
    reader = reader_of(tmp_path)
    [stored] = reader.tensors.values()
    for begin, n_rows in [(0, 1), (7, 2), (98, 2), (20, 40)]:
        before = reader.bytes_read
        found = reader.read_box(stored, (n_rows, 16), planned_reads(stored, (begin, 0), (n_rows, 16)))
        assert found.tobytes() == bits(whole[begin : begin + n_rows])
        assert reader.bytes_read - before == n_rows * 128
    path = forge.path("dense/00000-of-00001.bin")
    data = bytearray(path.read_bytes())
    data[50 * 128 + 5] ^= 4
    path.write_bytes(data)
    reader = reader_of(tmp_path)
    [stored] = reader.tensors.values()
    assert reader.read_box(stored, (50, 16), planned_reads(stored, (0, 0), (50, 16))).tobytes() == bits(whole[:50])
    with pytest.raises(CorruptCheckpointError) as caught:
        reader.read_box(stored, (50, 16), planned_reads(stored, (50, 0), (50, 16)))
    assert (caught.value.path, caught.value.where) == ("ckpt_1/dense/00000-of-00001.bin", "tensor 'w', bytes 6400 on")
    [problem] = verify(str(tmp_path))
    assert (problem.file, problem.where) == (caught.value.path, caught.value.where)


def test_chunks_begin_where_the_specification_says_and_bytes_between_them_are_checked_too(tmp_path):
    forge = save_chunked(tmp_path, [chunk_of(f"t{n}", values((n,), torch.uint8)) for n in (1, 63, 64, 65, 3)])
    index = json.loads(forge.path("dense/00000-of-00001.json").read_text())
    assert [chunk["at"] for chunk in index["chunks"]] == [0, 64, 128, 192, 320]
    path = forge.path("dense/00000-of-00001.bin")
    data = bytearray(path.read_bytes())
    assert len(data) == 323
    for chunk in index["chunks"]:
        begin, n = chunk["at"], chunk["shape"][0]
        assert data[begin : begin + n] == bits(values((n,), torch.uint8))
    data[20] = 1
    path.write_bytes(data)
    [problem] = verify(str(tmp_path))
    assert (problem.file, problem.where) == ("ckpt_1/dense/00000-of-00001.bin", "its checksum")


def first(values):
    return values["chunks"][0]


HUGE = 2**62
BAD = {
    "another format": lambda v: v.update(format="recckpt-catalog"),
    "another save": lambda v: v.update(save_id="0" * 32),
    "another shard": lambda v: v.update(shard=1),
    "more shards": lambda v: v.update(shards=3),
    "no chunks": lambda v: v.pop("chunks"),
    "chunks that are none": lambda v: v.update(chunks=[1]),
    "a file out of the checkpoint": lambda v: first(v).update(file="../../etc/passwd"),
    "a model.pt that is not there": lambda v: first(v).update(file="model.pt"),
    "a file without tensors": lambda v: first(v).update(file="sparse/00000-of-00002.json"),
    "the file of another shard": lambda v: first(v).update(file="dense/00001-of-00002.bin"),
    "blocks of nothing": lambda v: v.update(block_bytes=0),
    "blocks of 3 bytes": lambda v: v.update(block_bytes=3),
    "blocks of another size": lambda v: v.update(block_bytes=64),
    "somebody else's tensor": lambda v: first(v).update(of="rng"),
    "a name that is none": lambda v: first(v).update(name=None),
    "a dtype of objects": lambda v: first(v).update(dtype="object"),
    "a dtype of another size": lambda v: first(v).update(dtype="float64"),
    "a dtype that another chunk has not": lambda v: first(v).update(dtype="int32"),
    "a negative size": lambda v: first(v).update(sizes=[-4, 6]),
    "a shape of floats": lambda v: first(v).update(shape=[8.0, 6]),
    "a shape beyond memory": lambda v: first(v).update(shape=[HUGE, HUGE]),
    "a shape beyond memory, empty": lambda v: first(v).update(shape=[0, HUGE], offsets=[0, 0], sizes=[0, 0], xxh3=[]),
    "a shape of 99 dimensions": lambda v: first(v).update(shape=[1] * 99, offsets=[0] * 99, sizes=[1] * 99),
    "another shape": lambda v: first(v).update(shape=[9, 6]),
    "sizes of fewer dimensions": lambda v: first(v).update(sizes=[24]),
    "a box beyond the shape": lambda v: first(v).update(offsets=[5, 0]),
    "a box that another has": lambda v: first(v).update(offsets=[4, 0]),
    "a smaller box": lambda v: first(v).update(sizes=[3, 6]),
    "a place between": lambda v: first(v).update(at=1),
    "a place beyond the end": lambda v: first(v).update(at=6400),
    "a place far beyond": lambda v: first(v).update(at=2**63 - 64),
    "two chunks at one place": lambda v: v["chunks"][1].update(at=0),
    "no checksums": lambda v: first(v).update(xxh3=[]),
    "a checksum too many": lambda v: first(v).update(xxh3=first(v)["xxh3"] * 2),
    "checksums that are none": lambda v: first(v).update(xxh3=["x" * 16]),
    "a chunk too few": lambda v: v["chunks"].pop(0),
    "a chunk twice": lambda v: v["chunks"].append(dict(first(v), at=v["chunks"][-1]["at"])),
    "a chunk under another name": lambda v: first(v).update(name="other"),
}


@pytest.fixture(scope="module")
def two_shards(tmp_path_factory):
    root = tmp_path_factory.mktemp("two")
    whole, other = values((8, 6)), values((6,), seed=1)
    halves = [[chunk_of("w", whole, ((begin, 0), (4, 6)))] for begin in (0, 4)]
    save_chunked(root, [*halves[0], chunk_of("b", other)], halves[1])
    return root


@pytest.fixture
def forge(two_shards):
    """The checkpoint, which is as it was when the test is over."""
    forge = Forge(two_shards / "ckpt_1")
    whole = {path: path.read_bytes() for path in forge.directory.rglob("*") if path.is_file()}
    yield forge
    for path, data in whole.items():
        path.unlink(missing_ok=True)
        path.write_bytes(data)


@mostly_slow()
@pytest.mark.parametrize("edit", BAD.values(), ids=BAD.keys())
def test_an_index_that_makes_no_sense_is_corrupt(two_shards, forge, edit):
    edit_index(forge, edit)
    with pytest.raises(CorruptCheckpointError) as caught:
        reader_of(two_shards)
    assert caught.value.path.startswith("ckpt_1/dense/0000")
    assert caught.value.found
    assert caught.value.expected
    problems = verify(str(two_shards))
    assert {problem.file for problem in problems} & {caught.value.path, "ckpt_1/dense/00000-of-00002.json"}


def test_an_index_that_is_no_json_of_a_newer_version_or_left_out_is_refused(two_shards, forge):
    name = "dense/00001-of-00002.json"
    whole = forge.path(name).read_bytes()
    for data in (b"", b"{", b"[]", b'{"format": NaN}', b"\xff", b"[" * 100_000):
        forge.write(name, data)
        with pytest.raises(CorruptCheckpointError):
            reader_of(two_shards)
        assert [problem.file for problem in verify(str(two_shards))] == [f"ckpt_1/{name}"]
    forge.write(name, whole)
    files = forge.manifest["files"]
    forge.edit_manifest(lambda values: values.update(files=[file for file in files if file["name"] != name]))
    with pytest.raises(CorruptCheckpointError, match="chunks of 24 values"):
        reader_of(two_shards)
    assert verify(str(two_shards))
    forge.edit_manifest(lambda values: values.update(files=files))
    edit_index(forge, lambda values: values.update(version=99))
    with pytest.raises(FormatVersionError):
        reader_of(two_shards)
    [problem] = verify(str(two_shards))
    assert (problem.where, problem.found) == ("version", "99, which needs recckpt 1.0")


def test_bytes_that_are_as_the_manifest_says_and_not_as_the_index_says_are_damage(two_shards, forge):
    data = bytearray(forge.path("dense/00001-of-00002.bin").read_bytes())
    data[3] ^= 1
    forge.write("dense/00001-of-00002.bin", bytes(data))
    [problem] = verify(str(two_shards))
    assert problem.where == "tensor 'w', bytes 0 on"


STAND_IN = {"recckpt.sharded": "obj['moment']"}


def test_a_state_has_its_sharded_tensors_where_their_names_stand_and_no_others(tmp_path, two_shards):
    moment = values((5, 3))
    save_chunked(tmp_path, [chunk_of("obj['moment']", moment, of="extra"), chunk_of("obj['moment']", values((2,)))])
    saved = {"a": [1, (STAND_IN, "x")], "b": torch.ones(2)}
    assert has_stand_ins(saved)
    found = fitted(saved, None, reader_of(tmp_path))
    assert bits(found["a"][1][0]) == bits(moment)
    assert (found["a"][0], found["a"][1][1]) == (1, "x")
    assert found["b"] is saved["b"]
    with pytest.raises(CorruptCheckpointError) as caught:
        fitted({"a": STAND_IN}, None, reader_of(two_shards))
    assert (caught.value.path, caught.value.where) == ("ckpt_1/extra.pt", repr("obj['moment']"))
    with CheckpointReader(str(two_shards)) as reader, pytest.raises(KeyError, match="'w'"):
        reader.read_tensor("ww")
    twice = tmp_path / "twice"
    save_chunked(twice, [chunk_of("w", torch.zeros(8, 6))], model={"w": torch.zeros(8, 6)})
    with CheckpointReader(str(twice)) as reader, pytest.raises(CorruptCheckpointError, match="each value once"):
        reader.tensor_names()


class Fuzz:
    """A checkpoint with one of its files replaced, and one word for what reading makes of it."""

    def __init__(self, root):
        self.root, self.forge = root, Forge(root / "ckpt_1")
        self.whole = {path: path.read_bytes() for path in self.forge.directory.rglob("*") if path.is_file()}
        self.content = self.read()

    def read(self):
        with CheckpointReader(str(self.root)) as reader:
            return {name: reader.read_tensor(name).tobytes() for name in reader.tensor_names()}

    def attempt(self, case):
        name, data, is_sealed = case
        path = self.forge.path(name)
        if data == self.whole[path]:
            return "no fault"
        path.unlink()
        path.write_bytes(data)
        if is_sealed:
            self.forge.write(name, data)
        problems = verify(str(self.root))
        try:
            found = self.read()
        except RecckptError:
            return "refused" if is_sealed or problems else "UNSEEN"
        finally:
            for path, data in self.whole.items():
                path.unlink()
                path.write_bytes(data)
        if not is_sealed:
            return "UNSEEN" if not problems or found != self.content else "seen"  # between chunks, it may be
        return "accepted"  # another name, or a field that nobody looks at


def cases(forge, n, seed):
    rng = random.Random(seed)
    names = ["dense/00000-of-00002.json", "dense/00001-of-00002.json"]
    for _ in range(n):
        name = rng.choice(names)
        values = json.loads(forge.path(name).read_text())
        yield rng.choice(
            [(name, mutated_json(values, rng), True), (name, mutated(forge.path(name).read_bytes(), rng), False)]
        )
        name = rng.choice(names).replace("json", "bin")
        yield name, mutated(forge.path(name).read_bytes(), rng), False


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_files_that_are_almost_right_are_refused_or_read_as_they_were(two_shards, forge, seed):
    n = 40 if seed == 0 else 2000 // SWEEP_STRIDE
    fuzz, some = Fuzz(two_shards), list(cases(forge, n, seed))
    found = outcomes(fuzz.attempt, some)
    good = {"no fault", "refused", "seen", "accepted"}
    assert not [(case, word) for case, word in zip(some, found, strict=True) if word not in good]
    assert found.count("refused") > n / 2
