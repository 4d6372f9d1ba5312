import io
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from recckpt.dense.file_check import check_loadable
from recckpt.dense.state_copy import portable


def round_trip(value):
    file = io.BytesIO()
    torch.save({"value": portable("value", value)}, file)
    check_loadable(file, "extra.pt")  # as verify does
    file.seek(0)
    return torch.load(file, weights_only=True)["value"]


KEYS = st.text(max_size=5) | st.integers() | st.booleans() | st.none() | st.binary(max_size=5)
LEAVES = KEYS | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=200)
@given(NESTED)
def test_plain_data_comes_back_as_it_was(value):
    assert round_trip(value) == value


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        set(),
        torch.Size([1, 2]),
        torch.float32,
        torch.device("cuda:1"),
        OrderedDict(b=1, a=2),
        {(1, "a"): 2},
        2**2038,
        -(2**2000),
        float("inf"),
    ],
    ids=repr,
)
def test_other_plain_values_come_back_too(value):
    found = round_trip(value)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex64, torch.float8_e5m2]
)
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3)])
def test_tensors_come_back_bit_for_bit(dtype, shape):
    value = torch.arange(6).to(dtype)[: int(np.prod(shape, dtype=int))].reshape(shape)
    found = round_trip(value)
    assert (found.dtype, found.shape, found.device.type) == (dtype, value.shape, "cpu")
    assert found.tolist() == value.tolist() if dtype != torch.float8_e5m2 else True
    assert found.reshape(-1).view(torch.uint8).tolist() == value.reshape(-1).view(torch.uint8).tolist()


def test_a_view_comes_without_the_rest_of_its_storage():
    whole = torch.arange(1_000_000)
    for view in (whole[10:13], whole.view(1000, 1000)[:, 5], whole[::500_000], whole[:1].expand(3)):
        found = portable("view", view)
        assert found.untyped_storage().nbytes() == found.numel() * 8
        assert found.tolist() == view.tolist()


def test_a_whole_tensor_is_not_copied():
    tensor = torch.ones(5)
    assert portable("t", tensor).data_ptr() == tensor.data_ptr()
    assert portable("t", tensor.view(1, 5).T).tolist() == [[1]] * 5


def test_parameters_come_detached_and_lazy_views_resolved():
    assert not portable("p", nn.Parameter(torch.ones(2))).requires_grad
    conjugate = torch.tensor([1 + 2j]).conj()
    assert round_trip(conjugate).tolist() == [1 - 2j]
    assert round_trip(conjugate.imag).tolist() == [-2]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(1.5), 1.5),
        (np.int64(-3), -3),
        (np.uint8(3), 3),
        (np.bool_(True), True),
        (np.complex64(1 + 2j), 1 + 2j),
        (np.float64("inf"), float("inf")),
    ],
)
def test_numpy_scalars_become_numbers(value, expected):
    found = round_trip([value])[0]
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    "dtype", ["f2", "f4", "f8", "i1", "i8", "u1", "u2", "u4", "u8", "?", "c8", "c16", ">f4", ">i8"]
)
@pytest.mark.parametrize("shape", [(), (4,), (2, 2), (0,)])
def test_numpy_arrays_become_tensors_of_their_values(dtype, shape):
    value = np.arange(4).astype(dtype)[: int(np.prod(shape, dtype=int))].reshape(shape)
    found = round_trip(value)
    assert found.dtype == torch.from_numpy(np.empty(0, value.dtype.newbyteorder("="))).dtype
    assert found.shape == value.shape
    assert found.tolist() == value.tolist()


def test_a_numpy_array_is_copied_whatever_its_strides():
    value = np.arange(12).reshape(3, 4)
    found = portable("a", value.T[::-1])
    value[:] = 0
    assert found.tolist() == [[3, 7, 11], [2, 6, 10], [1, 5, 9], [0, 4, 8]]


class Own:
    pass


class OwnList(list):
    pass


class OwnInt(int):
    pass


@pytest.mark.parametrize(
    "value",
    [
        Own(),
        Own,
        OwnList([1]),
        OwnInt(1),
        defaultdict(int),
        Counter(),
        frozenset([1]),
        bytearray(b"x"),
        range(3),
        len,
        lambda: 1,
        np.array([Own()], object),
        np.array(["a"]),
        np.array([(1, 2)], "i4,i4"),
        np.datetime64("2026-01-01"),
        np.str_("a"),
        np.longdouble(1),
        np.zeros(2, np.longdouble),
        np.zeros(2, np.clongdouble),
        np.ma.masked_array([1, 2], [0, 1]),
        2**2040,
        torch.ones(2).to_sparse(),
        torch.ones(2, device="meta"),
        nn.Linear(1, 1),
        nn.UninitializedParameter(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_could_not_be_loaded_back_is_refused_with_its_place(value):
    with pytest.raises(ValueError, match=r"sampler\['a'\]\[1\]|uninitialized"):
        portable("sampler", {"a": [0, value]})


@pytest.mark.parametrize(
    "key", [Own(), OwnInt(1), frozenset(), torch.float32, (1, Own())], ids=lambda key: type(key).__name__
)
def test_a_key_that_could_not_be_loaded_back_is_refused(key):
    with pytest.raises(ValueError, match="sampler: a key of type"):
        portable("sampler", {key: 1})


def test_numpy_keys_become_numbers():
    assert round_trip({np.int64(3): 1, (np.int32(1), "a"): 2}) == {3: 1, (1, "a"): 2}


def test_a_list_that_holds_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(ValueError, match=r"sampler.*holds itself"):
        portable("sampler", value)


@pytest.mark.parametrize(
    "make", [torch.optim.Adam, torch.optim.SGD, torch.optim.LBFGS, torch.optim.Adagrad, torch.optim.RMSprop]
)
def test_the_states_of_torch_optimizers_and_schedulers_are_portable(make):
    model = nn.Linear(2, 1)
    optimizer = make(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 100) if make is torch.optim.SGD else None
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    optimizer.step(lambda: loss if make is torch.optim.LBFGS else None)
    assert set(round_trip(optimizer.state_dict())) == {"state", "param_groups"}
    if scheduler:
        state = scheduler.state_dict()
        assert round_trip({k: v for k, v in state.items() if not callable(v)})
