"""Dense state from ``.pt`` files: what comes back, and what is refused as damage."""

import io
import os
import pickle
import random
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch
import xxhash
from support.chunked import chunk_of, save_chunked

from recckpt.dense.loader import check_indexed, load_state
from recckpt.dense.saver import save_state
from recckpt.dense.tensors import DenseTensors
from recckpt.errors import CorruptCheckpointError
from recckpt.format.manifest import FileEntry
from recckpt.output_dir.listing import locate
from recckpt.storage import Storage, open_storage


@pytest.fixture
def local(local):
    local.make_dir("d")
    return local


STATE = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16), "n": 3, "nested": {"a": [None]}}


def put(storage: Storage, data: bytes, name: str = "model.pt") -> FileEntry:
    """Write bytes and an entry of the manifest that agrees with them."""
    with storage.create(f"d/{name}") as sink:
        sink.write(data)
    return FileEntry(name, len(data), xxhash.xxh3_64_intdigest(data))


def test_a_state_comes_back_as_it_was(storage):
    entry = save_state(STATE, storage, "d", "model.pt")
    data = storage.read("d/model.pt", 10**7)
    assert (entry.n_bytes, entry.xxh3) == (len(data), xxhash.xxh3_64_intdigest(data))
    for found in (load_state(storage, "d", entry), torch.load(io.BytesIO(data), weights_only=True)):
        assert torch.equal(found["w"], STATE["w"])
        assert torch.equal(found["b"], STATE["b"])
        assert (found["n"], found["nested"]) == (3, {"a": [None]})


def test_an_error_while_a_state_is_written_leaves_no_file(storage):
    with pytest.raises((pickle.PicklingError, AttributeError)):
        save_state({"f": lambda: 1}, storage, "d", "model.pt")
    assert storage.list_files("d") == []


def test_a_missing_file_one_of_another_size_and_a_flipped_bit_are_found(local):
    entry = save_state(STATE, local, "d", "model.pt")
    path = Path(local.url, "d", "model.pt")
    data = path.read_bytes()
    for bad in (b"", data[:-1], data[: len(data) // 2], data + b"x"):
        path.write_bytes(bad)
        with pytest.raises(CorruptCheckpointError, match="its size"):
            load_state(local, "d", entry)
    data = bytearray(data)
    for position in random.Random(0).sample(range(len(data) * 8), 100):
        data[position // 8] ^= 1 << position % 8
        path.write_bytes(data)
        with pytest.raises(CorruptCheckpointError, match="its checksum"):
            load_state(local, "d", entry)
        data[position // 8] ^= 1 << position % 8
    path.unlink()
    with pytest.raises(CorruptCheckpointError, match="no such file"):
        load_state(local, "d", entry)


class Evil:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_a_pickle_that_calls_a_function_is_refused_and_nothing_runs(local, tmp_path):
    for n, state in enumerate(({"w": Evil(tmp_path / "ran")}, Evil(tmp_path / "ran"))):
        torch.save(state, tmp_path / "evil.pt")
        for k, data in enumerate(((tmp_path / "evil.pt").read_bytes(), pickle.dumps(state, 2))):
            entry = put(local, data, f"{n}{k}.pt")
            with pytest.raises(
                CorruptCheckpointError, match=r"the global 'posix.system'|a zip file of torch.save"
            ) as caught:
                load_state(local, "d", entry)
            assert caught.value.path == f"d/{n}{k}.pt"
    assert not (tmp_path / "ran").exists()


def test_a_file_that_is_no_torch_file_is_corrupt_whatever_it_is(local):
    draw = random.Random(0)
    files = [
        b"",
        b"hello",
        b"{}",
        b"PK\x03\x04",
        b"PK\x05\x06" + bytes(18),
        b"\x80\x02.",
        b"\x80\x02K\x01.",
        b".",
        b"(",
    ]
    files += [b"\x80\x02" + draw.randbytes(draw.randrange(60)) for _ in range(200)]
    for n, data in enumerate(files):
        with pytest.raises(CorruptCheckpointError):
            load_state(local, "d", put(local, data, f"{n}.pt"))


def test_a_state_that_is_no_dict_and_a_tensor_that_was_saved_conjugate_are_refused(local):
    refused = [(state, "expected a dict") for state in ([1, 2], torch.ones(2), None, 5)]
    refused.append(({"w": torch.tensor([1 + 2j]).conj()}, r"a tensor with \{'conj': True\}"))
    for number, (state, match) in enumerate(refused):
        file = io.BytesIO()
        torch.save(state, file)
        with pytest.raises(CorruptCheckpointError, match=match):
            load_state(local, "d", put(local, file.getvalue(), f"{number}.pt"))


def test_a_model_pt_that_is_not_as_the_index_and_the_manifest_say_is_corrupt(tmp_path):
    state = {"w": torch.ones(2, 3), "plain": 5}
    forge = save_chunked(tmp_path, [chunk_of("sharded", torch.ones(2))], model=state)
    storage = open_storage(str(tmp_path))
    manifest = locate(storage, "ckpt_1").manifest
    indexed = DenseTensors(storage, "ckpt_1", manifest).model
    found = load_state(storage, "ckpt_1", manifest.file("model.pt"))
    check_indexed(found, indexed, manifest.names.dense, "model.pt")
    for change, where in [
        ({"w": torch.ones(3, 2)}, "'w'"),
        ({"w": torch.ones(2, 3, dtype=torch.int32)}, "'w'"),
        ({"w": 3}, "'w'"),
        ({"w": None}, "'w'"),
        ({"plain": torch.ones(1)}, "'plain'"),
        ({"plain": None}, "'plain'"),
        ({"other": torch.ones(1)}, "'other'"),
        ({"other": 1}, "'other'"),
        ({"sharded": torch.ones(2)}, "'sharded'"),
    ]:
        changed = {name: value for name, value in {**found, **change}.items() if value is not None}
        with pytest.raises(CorruptCheckpointError) as caught:
            check_indexed(changed, indexed, manifest.names.dense, "model.pt")
        assert (caught.value.path, caught.value.where) == ("model.pt", where)
    assert forge.manifest["names"]["dense"] == ["w", "plain", "sharded"]


@pytest.mark.slow
def test_a_state_is_read_without_a_second_copy_of_it(local):
    n_bytes = 64 << 20
    entry = save_state({"w": torch.ones(n_bytes, dtype=torch.uint8)}, local, "d", "model.pt")
    load_state(local, "d", save_state(STATE, local, "d", "extra.pt"))  # imports
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = status_kib("VmRSS")
    found = load_state(local, "d", entry)
    assert status_kib("VmHWM") - before < 1.05 * n_bytes / 1024 + 4096
    assert bool((found["w"] == 1).all())


def status_kib(field: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0])


def hostile(state, old: bytes, new: bytes) -> bytes:
    """Return a file whose pickle has other bytes at one place."""
    source, changed = io.BytesIO(), io.BytesIO()
    torch.save(state, source)
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(changed, "w") as copy:
        for name in archive.namelist():
            data = archive.read(name)
            assert not name.endswith("data.pkl") or old in data
            copy.writestr(name, data.replace(old, new) if name.endswith("data.pkl") else data)
    return changed.getvalue()


HOSTILE = {
    "a number in the memo that asks for all memory": (b"q\x01", b"r\xff\xff\xff\x0f"),
    "a tensor that goes on behind its values": (b"K\x06\x85", b"M\x00\xff\x85"),
    "more values than the file has": (b"cpuq\x06K\x06", b"cpuq\x06J\xff\xff\xff\x7f"),
    "a class made another one": (
        b"Rq\rs.",
        b"Rq\rsX\x01\x00\x00\x00cccollections\nCounter\nN}X\x06\x00\x00\x00updateK\x01s\x86bs.",
    ),
    "no such record": (b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x009"),
}


@pytest.mark.parametrize(("old", "new"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_pickle_that_was_crafted_is_refused(local, old, new):
    data = hostile({"w": torch.arange(6.0)}, old, new)
    with pytest.raises(CorruptCheckpointError, match=r"expected (a dict of )?tensors and plain data"):
        load_state(local, "d", put(local, data))
    assert callable(Counter.update)
