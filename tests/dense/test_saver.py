"""What the index says of the tensors in ``model.pt``, against what torch loads; equal states are equal bytes."""

import copy
import io
import pickle
import subprocess
import sys
import warnings
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chunked import save_chunked
from support.sweeps import mostly_slow

from recckpt import CheckpointReader
from recckpt.dense.saver import pickled
from recckpt.dense.state_copy import portable
from recckpt.dense.tensors import DenseTensors
from recckpt.format.tensor_index import NUMPY_DTYPES
from recckpt.inspect.verify import verify
from recckpt.output_dir.listing import locate
from recckpt.storage import open_storage

TORCH_DTYPES = [name for name in NUMPY_DTYPES if hasattr(torch, name)]


def bits(value):
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def check_equal(root, state):
    """Save a state as ``model.pt``, and read it by the index and with torch."""
    state = {name: portable(name, value) for name, value in state.items()}
    path = save_chunked(root, [], model=state).path("model.pt")
    by_torch = torch.load(path, weights_only=True)
    assert list(by_torch) == list(state)
    tensors = {name: value for name, value in by_torch.items() if isinstance(value, torch.Tensor)}
    with CheckpointReader(str(root)) as reader:
        assert reader.tensor_names() == list(tensors)
        for name, value in tensors.items():
            found = reader.read_tensor(name)
            assert reader.tensor_dtype(name) == str(value.dtype).removeprefix("torch.")
            assert found.dtype == NUMPY_DTYPES[reader.tensor_dtype(name)]
            assert found.shape == reader.tensor_shape(name) == tuple(value.shape)
            assert found.tobytes() == bits(value) == bits(state[name])
            assert found.flags.c_contiguous
            assert found.flags.writeable
    assert verify(str(root)) == []
    return by_torch


@mostly_slow()
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_every_dtype_equals_torch_load_bit_for_bit(tmp_path, dtype):
    patterns = torch.arange(256, dtype=torch.uint8)
    if dtype == "bool":
        patterns = patterns % 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_equal(tmp_path, {"w": patterns.view(getattr(torch, dtype))})


def test_views_of_one_storage_are_read_apart(tmp_path):
    base = torch.randn(6, 10)
    views = {"base": base, "row": base[2], "column": base[:, 3], "turned": base.t(), "steps": base[1::2, ::3]}
    check_equal(tmp_path, views)


def test_tied_tensors_share_bytes_in_the_file_and_are_one_when_torch_loads_them(tmp_path):
    base = torch.randn(500, 100)
    found = check_equal(tmp_path, {"in": base, "other": torch.ones(3), "out": base, "flat": base.view(-1)})
    assert found["in"].data_ptr() == found["out"].data_ptr() == found["flat"].data_ptr()
    assert (tmp_path / "ckpt_1" / "model.pt").stat().st_size < 1.5 * base.nbytes


def test_one_memory_as_two_dtypes_is_two_tensors(tmp_path):
    base = torch.randn(4, 4)
    check_equal(tmp_path, {"floats": base, "bits": base.view(torch.int32), "bytes": base.view(torch.uint8)})


@mostly_slow()
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
        torch.complex(torch.ones(3), torch.ones(3)).conj(),
    ],
    ids=str,
)
def test_odd_shapes_and_parameters_equal_torch_load(tmp_path, value):
    check_equal(tmp_path, {"a": torch.ones(2), "w": value, "z": torch.ones(1)})


def test_a_state_dict_is_read(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    check_equal(tmp_path, model.state_dict())


def test_names_may_be_any_unicode(tmp_path):
    names = ["", "重み", "a/../../b", "line\nbreak", "🔥" * 100, "\0", "/etc/passwd", "x" * 20_000]
    check_equal(tmp_path, {name: torch.zeros(1) for name in names})


def test_a_name_that_is_half_a_surrogate_pair_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"tensor 'a\\ud800': expected a name encodable as UTF-8"):
        check_equal(tmp_path, {"a\ud800": torch.zeros(1)})


def test_plain_values_stand_beside_the_tensors(tmp_path):
    plain = {
        "step": 7,
        "big": 2**200,
        "lr": 1e-3,
        "none": None,
        "z": 1j,
        "raw": b"\x00\xff",
        "no bytes": b"",
        "nested": OrderedDict(groups=[{"betas": (0.9, 0.999), 3: "x", "t": torch.ones(2)}]),
        "dtype": torch.bfloat16,
        "set": {(1, "x")},
    }
    found = check_equal(tmp_path, {**plain, "w": torch.zeros(2)})
    found["nested"]["groups"][0].pop("t")
    plain["nested"]["groups"][0].pop("t")
    assert {name: found[name] for name in plain} == plain


@pytest.mark.slow
def test_a_model_pt_whose_pickle_is_large_is_saved_and_loaded(tmp_path):
    plain = {"plain": "x" * (40 << 20), "w": torch.ones(3)}
    assert check_equal(tmp_path, plain)["plain"] == plain["plain"]


@pytest.mark.slow
def test_a_model_of_very_many_tensors_is_saved_and_loaded(tmp_path):
    shared = torch.arange(3.0)
    names = [f"a.rather.long.name.of.a.layer.{number}.weight" for number in range(200_000)]
    path = save_chunked(tmp_path, [], model=dict.fromkeys(names, shared + 1)).path("model.pt")
    assert len(torch.load(path, weights_only=True)) == len(names)
    with CheckpointReader(str(tmp_path)) as reader:
        assert reader.tensor_names() == names
        assert reader.read_tensor(names[-1]).tolist() == [1, 2, 3]


def test_only_the_blocks_of_a_tensor_are_read(tmp_path):
    save_chunked(tmp_path, [], model={"large": torch.zeros(4 << 20), "small": torch.ones(10)})
    storage = open_storage(str(tmp_path))
    dense = DenseTensors(storage, "ckpt_1", locate(storage, "ckpt_1").manifest)
    before = dense.bytes_read
    assert dense.read(dense.named("small")).tolist() == [1] * 10
    assert dense.bytes_read - before == 40


def test_torch_is_not_imported_to_read_a_tensor(tmp_path):
    save_chunked(tmp_path, [], model={"w": torch.arange(3.0)})
    code = (
        "import sys; from recckpt import CheckpointReader\n"
        f"print(CheckpointReader({str(tmp_path)!r}).read_tensor('w').tolist(), 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[0.0, 1.0, 2.0] False"


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = getattr(torch, draw(st.sampled_from(TORCH_DTYPES)))
    n_bytes = int(np.prod(shape, dtype=int)) * torch.empty(0, dtype=dtype).element_size()
    seed = draw(st.integers(0, 2**32 - 1))
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, n_bytes, np.uint8)
    value = torch.from_numpy(raw).view(dtype).reshape(shape) if n_bytes else torch.empty(shape, dtype=dtype)
    return value.permute(draw(st.permutations(range(len(shape)))))


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(), tensors(), max_size=5))
def test_what_torch_loads_is_what_the_index_says(tmp_path_factory, state):
    check_equal(tmp_path_factory.mktemp("state"), state)


def bytes_of(state):
    return pickled(portable("state", state), lambda obj: None)


def apart(value):
    """Return an equal value in which no two objects are one, as of a state that was loaded from several files."""
    if isinstance(value, dict):
        return {apart(key): apart(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)([apart(item) for item in value])
    if isinstance(value, str):
        return "".join([value[:1], value[1:]]) if len(value) > 1 else value
    return pickle.loads(pickle.dumps(value))


WORD, PAIR, PLACE = "max_" + "momentum", (0.9, 0.999), torch.device("cpu")


@pytest.mark.parametrize(
    "state",
    [
        [WORD, WORD, {WORD: WORD}],
        ["cpu", "storage", "latin1", "state", "10"],  # as torch and recckpt call something in each file
        [PAIR, PAIR, (1, 2), (1, 2)],
        [b"position", b"position", b"", b""],
        [torch.Size([2, 3]), torch.Size([2, 3]), PLACE, PLACE, torch.float32, torch.float32],
        [1j, 1j, 10**30, 10**30, 1.5, None, True],
    ],
)
def test_bytes_follow_from_values(state):
    one, other = bytes_of(state), bytes_of(apart(state))
    assert one == other == bytes_of(copy.deepcopy(state))
    assert pickle.loads(one) == state


def test_values_that_are_equal_and_not_the_same_stay_apart():
    state = [0.0, -0.0, 0j, -0j, complex(0.0, -0.0), 1, 1.0, True, "1", b"1"]
    assert repr(pickle.loads(bytes_of(state))) == repr(state)


def test_a_set_is_written_in_one_order():
    one, other = {0, 8, 16, "a"}, set()
    for member in ("a", 16, 8, 0):
        other.add(member)
    assert [*one] != [*other]
    assert bytes_of([one]) == bytes_of([other])
    assert torch.load(io.BytesIO(saved([one])), weights_only=True) == [one]


def saved(state):
    file = io.BytesIO()
    torch.save(pickle.loads(bytes_of(state)), file)
    return file.getvalue()
