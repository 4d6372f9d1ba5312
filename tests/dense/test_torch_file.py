import contextlib
import io
import pickle
import random
import struct
import subprocess
import sys
import warnings
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recckpt.dense.torch_file import TorchFile
from recckpt.errors import CorruptCheckpointError
from recckpt.format.dtypes import NUMPY_DTYPES

TORCH_DTYPES = [name for name in NUMPY_DTYPES if hasattr(torch, name)]
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
FLOATS = b"ctorch\nFloatStorage\n"
ODICT = b"ccollections\nOrderedDict\n)R"


def saved(state, **options):
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(state, file, **options)
    return file


def opened(state):
    return TorchFile(saved(state), "model.pt")


def zipped(data, *, storages=None, byteorder=b"little", compression=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("archive/data.pkl", data)
        if byteorder is not None:
            archive.writestr("archive/byteorder", byteorder)
        for key, value in ({"0": bytes(16)} if storages is None else storages).items():
            archive.writestr(f"archive/data/{key}", value)
    return file


def text(value):
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def num(value):
    data = pickle.dumps(value, 2)
    return data[2:-1]


def tensor(*, key="0", n_items=4, offset=0, shape=(4,), strides=(1,), tail=b""):
    storage = b"(" + text("storage") + FLOATS + text(key) + text("cpu") + num(n_items) + b"tQ"
    sizes = b"(" + b"".join(map(num, shape)) + b"t" + b"(" + b"".join(map(num, strides)) + b"t"
    return REBUILD + b"(" + storage + num(offset) + sizes + b"\x89" + ODICT + tail + b"tR"


def named(value):
    return b"\x80\x02}" + text("w") + value + b"s."


def refused(file, match="."):
    with pytest.raises(CorruptCheckpointError, match=match) as caught:
        everything(file)
    assert caught.value.path == "model.pt"
    return caught.value


def everything(file):
    reader = TorchFile(file, "model.pt")
    return {name: reader.read(name) for name in reader.names()}, reader.values()


def bits(value):
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def check_equal(state):
    file = saved(state)
    file.seek(0)
    expected = torch.load(file, weights_only=False)  # its allow-list lacks bytes()
    reader = TorchFile(file, "model.pt")
    assert reader.names() == [name for name, value in expected.items() if isinstance(value, torch.Tensor)]
    for name in reader.names():
        found = reader.read(name)
        assert f"torch.{reader.dtype(name)}" == str(expected[name].dtype)
        assert found.shape == reader.shape(name) == tuple(expected[name].shape)
        assert found.nbytes == reader.nbytes(name)
        assert found.tobytes() == bits(expected[name])
        assert found.flags.c_contiguous
        assert found.flags.writeable
    return reader


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_every_dtype_equals_torch_load_bit_for_bit(dtype):
    patterns = torch.arange(256, dtype=torch.uint8)
    if dtype == "bool":
        patterns = patterns % 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = check_equal({"w": patterns.view(getattr(torch, dtype))})
    assert reader.dtype("w") == dtype


def test_a_hand_written_file_is_read_as_torch_reads_it():
    file = zipped(named(tensor()), storages={"0": np.arange(4, dtype="<f4").tobytes()})
    assert everything(file)[0]["w"].tolist() == [0, 1, 2, 3]


def test_bfloat16_comes_as_bit_patterns():
    found = opened({"w": torch.tensor([1.0, -2.0], dtype=torch.bfloat16)}).read("w")
    assert found.dtype == np.uint16
    assert found.tolist() == [0x3F80, 0xC000]


def test_nan_payloads_and_infinities_survive():
    patterns = np.array([0x7FC00001, 0xFFC12345, 0x7F800000, 0xFF800000, 0x80000000], np.uint32)
    found = opened({"w": torch.from_numpy(patterns.view(np.float32))}).read("w")
    assert found.view(np.uint32).tolist() == patterns.tolist()


def test_views_of_one_storage_are_read_apart():
    base = torch.randn(6, 10)
    check_equal({"base": base, "row": base[2], "column": base[:, 3], "turned": base.t(), "steps": base[1::2, ::3]})
    reader = opened({"a": base, "b": base[1]})
    a, b = reader.read("a"), reader.read("b")
    a[:] = 0
    assert b.any()


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(0, 3),
        torch.empty(3, 0, 2),
        torch.zeros(2, 5)[2:],
        torch.zeros(1).expand(4, 5),
        torch.arange(4).expand(1, -1),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.nn.Parameter(torch.linspace(-1, 1, 3)),
    ],
    ids=str,
)
def test_odd_shapes_and_parameters_equal_torch_load(value):
    check_equal({"w": value})


def test_a_parameter_with_attributes_is_read():
    value = torch.nn.Parameter(torch.randn(3))
    value.kind = "bias"
    assert opened({"w": value}).read("w").tolist() == value.tolist()


def test_a_state_dict_with_its_metadata_is_read():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    reader = check_equal(model.state_dict())
    assert "1.num_batches_tracked" in reader.names()
    assert reader.values() == {}


def test_names_may_be_any_unicode():
    names = ["", "重み", "a/../../b", "line\nbreak", "🔥" * 100, "\0", "/etc/passwd"]
    assert opened({name: torch.zeros(1) for name in names}).names() == names


def test_plain_values_stand_beside_the_tensors():
    plain = {
        "step": 7,
        "big": 2**200,
        "lr": 1e-3,
        "on": True,
        "none": None,
        "z": 1j,
        "raw": b"\x00\xff",
        "no bytes": b"",
        "nested": OrderedDict(groups=[{"betas": (0.9, 0.999), 3: "x"}]),
        "size": torch.Size([2, 3]),
        "keys": {b"raw": 1, (): 2, (1, ("a", b"")): 3, 1j: 4},
    }
    others = {"dtype": torch.bfloat16, "device": torch.device("cuda:1"), "set": {(1, "x")}, "none in it": set()}
    reader = opened({**plain, **others, "w": torch.zeros(2)})
    assert reader.names() == ["w"]
    described = {"dtype": "torch.bfloat16", "device": "cuda:1", "set": [(1, "x")], "none in it": []}
    assert reader.values() == {**plain, **described}


def test_a_tensor_inside_a_plain_value_is_described():
    (inner,) = opened({"state": [torch.zeros(2, 3)]}).values()["state"]
    assert (inner.dtype, inner.shape, inner.nbytes) == ("float32", (2, 3), 24)


def test_an_unknown_name_is_a_key_error_with_the_nearest_name():
    reader = opened({"layer.weight": torch.zeros(1), "step": 1})
    for ask in (reader.read, reader.dtype, reader.shape, reader.nbytes):
        with pytest.raises(KeyError, match=r"layer\.weight"):
            ask("layer.wieght")
    with pytest.raises(KeyError, match="plain value"):
        reader.read("step")


def test_torch_is_not_imported(tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"w": torch.arange(3.0)}, path)
    code = (
        "import sys; from recckpt.dense.torch_file import TorchFile\n"
        f"print(TorchFile(open({str(path)!r}, 'rb'), 'model.pt').read('w').tolist(), 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[0.0, 1.0, 2.0] False"


def test_only_the_bytes_of_the_tensor_are_read():
    class Counting(io.BytesIO):
        n_bytes = 0

        def read(self, size=-1):
            data = super().read(size)
            self.n_bytes += len(data)
            return data

    base = torch.zeros(1_000_000)
    file = Counting(saved({"all": base, "part": base[5:15], "other": torch.zeros(500_000)}).getvalue())
    reader = TorchFile(file, "model.pt")
    assert file.n_bytes < 10_000
    before = file.n_bytes
    reader.read("part")
    assert file.n_bytes - before < 200


def test_a_file_whose_reads_are_short_is_read():
    class Short(io.BytesIO):
        def read(self, size=-1):
            return super().read(min(size, 700) if size > 2000 else size)

    value = torch.randn(2000)
    assert TorchFile(Short(saved({"w": value}).getvalue()), "model.pt").read("w").tolist() == value.tolist()


def test_a_file_saved_without_checksums_is_read():
    torch.serialization.set_crc32_options(False)
    try:
        file = saved({"w": torch.arange(3.0)})
    finally:
        torch.serialization.set_crc32_options(True)
    assert everything(file)[0]["w"].tolist() == [0, 1, 2]


# Hostile pickles.


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "eval"),
        ("__builtin__", "getattr"),
        ("subprocess", "Popen"),
        ("torch", "load"),
        ("torch.hub", "load"),
        ("torch._utils", "__import__"),
        ("numpy", "load"),
        ("torch._utils _rebuild_tensor_v2", ""),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_global_that_tensors_do_not_need_is_refused_by_name(module, name, nested, tmp_path):
    call = f"c{module}\n{name}\n".encode() + text(f"touch {tmp_path}/ran") + b"\x85R"
    value = b"]" + REBUILD + b"(" + call + b"tRa" if nested else call
    refused(zipped(named(value)), f"global '{module.split(' ')[0]}.*weights_only=False")
    assert not list(tmp_path.iterdir())


def test_what_pickle_writes_for_os_system_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (__import__("os").system, (f"touch {tmp_path}/ran",))

    for protocol in range(6):
        refused(zipped(pickle.dumps({"w": Evil()}, protocol)))
    assert "posix.system" in str(refused(saved({"w": Evil()})))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "code",
    [
        REBUILD + b")R",
        REBUILD + b"K\x01\x85R",
        REBUILD + b"}R",
        REBUILD + b"(" + b"N" * 6 + b"tR",
        REBUILD + b"(" + b"N" * 5000 + b"tR",
        FLOATS + b")R",
        text("torch._utils._rebuild_tensor_v2") + b")R",
        b"ctorch._utils\n_rebuild_tensor_v3\n(" + b"N" * 7 + b"tR",
        b"ctorch._utils\n_rebuild_parameter\n)R",
        b"ctorch\nSize\nK\x01\x85R",
        b"ctorch\ndevice\n]\x85R",
        b"c_codecs\nencode\n" + text("a") + text("rot13") + b"\x86R",
        b"c__builtin__\ncomplex\n]]\x86R",
        b"ccollections\nOrderedDict\n]\x85R",
        REBUILD,
        REBUILD + b"}" + text("__code__") + b"Nsb",
        FLOATS + b"N}" + text("call") + b"Ns\x86b",
        b"]N}b",
        b"(" + text("storage") + FLOATS + text("0") + text("cpu") + b"K\x04tQ",
        b"(" + text("storage") + REBUILD + text("0") + text("cpu") + b"K\x04tQ",
        b"(" + text("module") + FLOATS + text("0") + text("cpu") + b"K\x04tQ",
        b"(" + text("storage") + FLOATS + b"K\x00" + text("cpu") + b"K\x04tQ",
        b"NQ",
        b"P0\n",
        b"(ios\nsystem\n",
        b"ios\nsystem\n",
        b"\x82\x01",
        b"ccollections\nOrderedDict\n)\x81",
        b"0" * 5,
        b"a",
        b"Na",
        b"t",
        b"h\x07",
        b"j\xff\xff\xff\xff",
        b"}]Ns",
        b"}(Nu",
        b"L" + b"9" * 10_000 + b"L\n",
        b"I" + b"9" * 10_000 + b"\n",
        b"X\xff\xff\xff\xffabc",
        b"X\x02\x00\x00\x00\xff\xff",
        b"\x8b\xff\xff\xff\x7f1",
    ],
)
def test_broken_or_foreign_pickle_code_is_refused(code):
    refused(zipped(named(code)))


@pytest.mark.parametrize("code", [b"", b".", b"\x80\x02.", b"\x80\x02]", b"hello", b"\x80\x02K\x01.", b"\x80\x02}.."])
def test_a_pickle_that_is_no_dict_is_refused(code):
    refused(zipped(code))


def test_a_key_that_is_no_string_is_refused():
    refused(saved({0: torch.zeros(1)}), "expected a string")


@pytest.mark.parametrize("depth", [100, 100_000])
@pytest.mark.parametrize("code", [b"\x85", b"]", b"]a"])
def test_depth_is_refused_and_breaks_no_stack(depth, code):
    value = {b"\x85": b")" + b"\x85" * depth, b"]": b"]" * depth + b"a" * (depth - 1)}.get(code)
    value = value or b"}" + text("k") + (b"}" + text("k")) * depth + b"N" + b"s" * (depth + 1)
    refused(zipped(named(value)), "deep")
    refused(zipped(named(b"}" + value + b"Ns")), "as a key")


def test_values_that_refer_to_themselves_are_refused():
    refused(zipped(named(b"]q\x00h\x00a")), "endless")


def test_a_small_pickle_that_unfolds_to_gigabytes_is_refused(monkeypatch):
    monkeypatch.setattr("recckpt.dense.torch_pickle.MAX_PLAIN_ITEMS", 1 << 16)
    doubled = b"]" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(50))
    refused(zipped(named(doubled)), "large")
    repeated = b"]q\x00(" + text("x" * 100_000) + b"q\x01" + b"h\x01" * 1000 + b"e"
    refused(zipped(named(repeated)), "large")


def test_keys_that_unfold_to_more_than_is_needed_are_refused():
    doubled = b"Nq\x00" + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(40))
    refused(zipped(named(doubled + b"}h\x28Ns")), "keys that are too large")
    wide = b"(" + b"N" * 1000 + b"tq\x00"
    refused(zipped(named(wide + b"}(" + b"h\x00N" * 1000 + b"u")), "keys that are too large")


def test_a_high_memo_slot_takes_no_memory():
    reader = TorchFile(zipped(named(b"Nr\xff\xff\xff\xff")), "model.pt")
    assert reader.values() == {"w": None}


def test_a_pickle_above_the_cap_is_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr("recckpt.dense.torch_file.MAX_PICKLE_BYTES", 100)
    refused(zipped(named(tensor() * 2)), "expected at most 100")


@pytest.mark.parametrize(
    "change",
    [
        {"n_items": 5},
        {"n_items": 3},
        {"n_items": -1},
        {"n_items": 2**62},
        {"offset": 1},
        {"offset": -1},
        {"offset": 2**63},
        {"offset": 1.5},
        {"shape": (5,)},
        {"shape": (-1,)},
        {"shape": (True,)},
        {"shape": (2**63,)},
        {"shape": (2**62,), "strides": (0,)},
        {"shape": (2**30,), "strides": (0,)},
        {"shape": (0, 2**62), "strides": (0, 0)},
        {"shape": (2**40, 0, 2**40), "strides": (0, 0, 0)},
        {"strides": (2,)},
        {"strides": (-1,)},
        {"strides": (2**62,)},
        {"strides": ()},
        {"strides": (1, 1)},
        {"shape": (1,) * 65, "strides": (1,) * 65},
        {"key": "1"},
        {"key": "../data.pkl"},
        {"key": "../../etc/passwd"},
        {"key": "/etc/passwd"},
        {"key": ""},
        {"key": "\u0660"},
        {"tail": b"}" + text("conj") + b"\x88s"},
        {"tail": b"N" * 9},
    ],
    ids=str,
)
def test_a_tensor_outside_its_storage_is_refused_before_memory_is_taken(change):
    refused(zipped(named(tensor(**change))))


def test_a_dimension_of_one_may_have_any_stride():
    file = zipped(named(tensor(shape=(1, 4), strides=(2**62, 1))))
    assert everything(file)[0]["w"].shape == (1, 4)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (lambda: torch.eye(2).to_sparse(), "sparse"),
        (lambda: torch.eye(2).to_sparse_csr(), "sparse"),
        (lambda: torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.zeros(2, device="meta"), "meta"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2)]), "nested"),
        (lambda: torch.zeros(2, dtype=torch.complex64).conj(), "conjugate"),
        (lambda: torch.nn.Buffer(torch.zeros(2)), "attributes"),
        (lambda: torch.zeros(2).untyped_storage(), "Storage"),
        (lambda: np.float32(1), "global 'numpy"),
    ],
)
def test_other_kinds_of_tensors_are_refused_as_what_they_are(value, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused(saved({"w": value()}), kind)


# Hostile and damaged files.


@pytest.mark.parametrize("data", [b"", b"P", b"PK\x03\x04", b"hello, I am a text file\n" * 9, bytes(100)])
def test_a_file_that_is_no_zip_is_refused(data):
    refused(io.BytesIO(data))


def test_a_legacy_file_is_to_be_saved_again():
    refused(saved({"w": torch.zeros(2)}, _use_new_zipfile_serialization=False), r"save it again with torch 1\.6")


def test_a_zip_of_something_else_is_refused():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", "hello")
    refused(file, "no zip entry 'data.pkl'")
    file = io.BytesIO()
    zipfile.ZipFile(file, "w").close()
    refused(file)


def test_compressed_entries_are_refused():
    refused(zipped(named(tensor()), compression=zipfile.ZIP_DEFLATED), "compressed")


def test_big_endian_files_are_refused_and_files_without_byteorder_are_little():
    refused(zipped(named(tensor()), byteorder=b"big"), "little-endian")
    assert everything(zipped(named(tensor()), byteorder=None))[0]["w"].shape == (4,)


def test_an_entry_that_is_there_twice_is_refused():
    file = zipped(named(tensor()))
    with warnings.catch_warnings(), zipfile.ZipFile(file, "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr("archive/data.pkl", named(b"N"))
    refused(file, "twice")


def test_trailing_garbage_is_refused():
    refused(io.BytesIO(saved({"w": torch.zeros(2)}).getvalue() + b"x"), "end")


def sample():
    state = {f"layer.{i}.weight": torch.randn(3, 5) for i in range(4)}
    return saved({**state, "u": torch.zeros(2, dtype=torch.uint16), "step": 3, "cfg": [1, {"a": "b"}]}).getvalue()


def test_a_cut_file_is_corrupt_wherever_it_is_cut():
    data = sample()
    for size in sorted({*range(0, len(data), max(1, len(data) // 200)), len(data) - 1}):
        refused(io.BytesIO(data[:size]))


def test_a_flipped_bit_in_a_tensor_or_the_pickle_is_found():
    data = sample()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
    for name in ("archive/data.pkl", "archive/data/0", "archive/byteorder"):
        start = entries[name].header_offset
        start += 30 + sum(struct.unpack("<HH", data[start + 26 : start + 30]))
        for at in range(start, start + entries[name].file_size):
            refused(io.BytesIO(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]))


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_raises_nothing_but_corrupt_checkpoint_error(seed):
    rng, data = random.Random(seed), sample()
    directory = data.index(b"PK\x01\x02")
    for round_ in range(750):
        damaged = bytearray(data)
        first = directory if round_ % 2 else 0  # half of the damage goes to the directory at the end
        for _ in range(rng.choice([1, 1, 1, 2, 8, 40])):
            damaged[rng.randrange(first, len(data))] = rng.choice([0, 0xFF, rng.randrange(256)])
        survives_or_is_refused(io.BytesIO(damaged))


@pytest.mark.parametrize("seed", range(4))
def test_random_pickles_raise_nothing_but_corrupt_checkpoint_error(seed):
    rng = random.Random(seed)
    code = zipfile.ZipFile(io.BytesIO(sample())).read("archive/data.pkl")
    opcodes = b"()]}.0NRQbcqrhj\x85\x86\x87\x88\x89KMJXGasetu"
    for _ in range(750):
        damaged = bytearray(code)
        for _ in range(rng.choice([1, 1, 2, 5])):
            at = rng.randrange(len(code))
            damaged[at : at + rng.randrange(3)] = bytes(rng.choices(opcodes, k=rng.randrange(3)))
        survives_or_is_refused(zipped(bytes(damaged)))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_refused_or_read(data):
    survives_or_is_refused(io.BytesIO(data))
    survives_or_is_refused(zipped(data))
    survives_or_is_refused(zipped(named(data)))


def survives_or_is_refused(file):
    with contextlib.suppress(CorruptCheckpointError):
        everything(file)


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = getattr(torch, draw(st.sampled_from(TORCH_DTYPES)))
    n_bytes = int(np.prod(shape, dtype=int)) * torch.empty(0, dtype=dtype).element_size()
    seed = draw(st.integers(0, 2**32 - 1))
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, n_bytes, np.uint8)
    value = torch.from_numpy(raw).view(dtype).reshape(shape) if n_bytes else torch.empty(shape, dtype=dtype)
    return value.permute(draw(st.permutations(range(len(shape)))))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=20)
KEYS = SCALARS | st.tuples(SCALARS, st.tuples(SCALARS))
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.tuples(inner, inner),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(), tensors(), max_size=4), st.dictionaries(st.text(), PLAIN, max_size=4))
def test_what_torch_saves_is_read_back(state, plain):
    plain = {name: value for name, value in plain.items() if name not in state}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = check_equal({**plain, **state})
    assert reader.values() == plain
