"""State made portable comes back without running code; its copies are whole; ranks say once what differs of it."""

import io
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from support.drawn import drawn
from torch import nn

from recckpt.dense.state_copy import DenseBuffers, RankDigests, as_it_is, digest, portable
from recckpt.dense.torch_archive import check_loadable


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


@drawn(NESTED, few=15, many=2000)
def test_plain_data_comes_back_as_it_was(value):
    assert round_trip(value) == value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *(
            (value, value)
            for value in (
                *({1, 2}, set(), torch.Size([1, 2]), torch.float32, torch.device("cuda:1"), OrderedDict(b=1, a=2)),
                Counter({3: 1, 7: 2}),  # the milestones of MultiStepLR
                *({(1, "a"): 2}, 2**2038, -(2**2000), float("inf")),
            )
        ),
        (np.float32(1.5), 1.5),
        (np.int64(-3), -3),
        (np.uint8(3), 3),
        (np.bool_(True), True),
        (np.complex64(1 + 2j), 1 + 2j),
        (np.float64("inf"), float("inf")),
        ({np.int64(3): 1, (np.int32(1), "a"): 2}, {3: 1, (1, "a"): 2}),
    ],
    ids=repr,
)
def test_other_plain_values_come_back_too_and_numpy_scalars_become_numbers(value, expected):
    found = round_trip([value])[0]
    assert found == expected
    assert type(found) is type(expected)


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


def test_a_view_comes_without_the_rest_of_its_storage_and_a_whole_tensor_is_not_copied():
    whole = torch.arange(1_000_000)
    for view in (whole[10:13], whole.view(1000, 1000)[:, 5], whole[::500_000], whole[:1].expand(3)):
        found = portable("view", view)
        assert found.untyped_storage().nbytes() == found.numel() * 8
        assert found.tolist() == view.tolist()
    tensor = torch.ones(5)
    assert portable("t", tensor).data_ptr() == tensor.data_ptr()
    assert portable("t", tensor.view(1, 5).T).tolist() == [[1]] * 5
    assert not portable("p", nn.Parameter(tensor)).requires_grad
    conjugate = torch.tensor([1 + 2j]).conj()
    assert (round_trip(conjugate).tolist(), round_trip(conjugate.imag).tolist()) == ([1 - 2j], [-2])
    value = np.arange(12).reshape(3, 4)
    found = portable("a", value.T[::-1])
    value[:] = 0  # an array is copied whatever its strides
    assert found.tolist() == [[3, 7, 11], [2, 6, 10], [1, 5, 9], [0, 4, 8]]


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


class Own:
    pass


class OwnList(list):
    pass


class OwnInt(int):
    pass


REFUSED = [
    *(Own(), Own, OwnList([1]), OwnInt(1), defaultdict(int), frozenset([1]), bytearray(b"x"), range(3), len),
    *(lambda: 1, np.array([Own()], object), np.array(["a"]), np.array([(1, 2)], "i4,i4"), np.datetime64("2026-01-01")),
    *(np.str_("a"), np.longdouble(1), np.zeros(2, np.longdouble), np.zeros(2, np.clongdouble)),
    *(np.ma.masked_array([1, 2], [0, 1]), 2**2040, torch.ones(2).to_sparse(), torch.ones(2, device="meta")),
    *(nn.Linear(1, 1), nn.UninitializedParameter()),
]


def test_what_could_not_be_loaded_back_is_refused_with_its_place():
    for value in REFUSED:
        with pytest.raises(ValueError, match=r"sampler\['a'\]\[1\]|uninitialized"):
            portable("sampler", {"a": [0, value]})
    for key in (Own(), OwnInt(1), frozenset(), torch.float32, (1, Own())):
        with pytest.raises(ValueError, match="sampler: a key of type"):
            portable("sampler", {key: 1})
    endless = []
    endless.append(endless)
    for value in (endless, copied(DenseBuffers(), endless)):
        with pytest.raises(ValueError, match=r"sampler.*: the value contains itself"):
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


# copies


def copied(buffers, state):
    with buffers.copying() as copy:
        return copy(("x",), state)


def test_a_copy_is_equal_and_does_not_follow_the_original():
    shared = torch.ones(2)
    state = OrderedDict(a=torch.arange(3.0), b=[torch.ones(2), (torch.zeros(1), "text")], c={"n": 5, None: 2.5})
    copy, [of_set] = copied(DenseBuffers(), state), copied(DenseBuffers(), {shared})
    assert as_it_is(("x",), state) is state
    for tensor in (state["a"], state["b"][0], state["b"][1][0], shared):
        tensor.fill_(9)
    assert type(copy) is OrderedDict
    assert copy["a"].tolist() == [0, 1, 2]
    assert copy["b"][0].tolist() == of_set.tolist() == [1, 1]
    assert (copy["b"][1][0].tolist(), copy["b"][1][1]) == ([0], "text")
    assert copy["c"] == {"n": 5, None: 2.5}
    for odd in (torch.ones(3).to_sparse(), torch.empty(2, device="meta"), nn.parameter.UninitializedParameter()):
        assert copied(DenseBuffers(), [odd])[0] is odd  # left to those who refuse it


def test_the_memory_serves_again_from_save_to_save_for_what_has_its_shape_and_dtype():
    buffers, weight, bias = DenseBuffers(), torch.ones(1000), torch.ones(10)
    with torch.inference_mode():  # and serves outside of it
        first = copied(buffers, {"weight": weight, "bias": bias})
    second = copied(buffers, {"weight": weight + 1, "bias": bias})
    assert {name: tensor.data_ptr() for name, tensor in first.items()} == {
        name: tensor.data_ptr() for name, tensor in second.items()
    }
    assert (second["weight"] == 2).all()
    with pytest.raises(KeyError), buffers.copying():
        raise KeyError  # a staging that fails changes none of it
    third = copied(buffers, {"bias": torch.zeros(10)})["bias"]
    assert third.data_ptr() == first["bias"].data_ptr()
    assert list(buffers._buffers) == [("x", "bias")]  # what is no longer there is let go
    for changed in (torch.ones(11), torch.ones(10, dtype=torch.float64), torch.ones(2, 5)):
        buffers = DenseBuffers()
        first, copy = copied(buffers, torch.zeros(10)), copied(buffers, changed)
        assert torch.equal(copy, changed)
        assert (copy.dtype, first.tolist()) == (changed.dtype, [0.0] * 10)


def test_tensors_that_are_one_are_one_in_the_copy_and_a_number_and_its_conjugate_are_not():
    weight = nn.Parameter(torch.ones(4, 4))
    copy = copied(DenseBuffers(), {"embed": weight, "out": weight.detach(), "rows": weight[:2], "turned": weight.t()})
    assert copy["embed"] is copy["out"]
    assert len({tensor.data_ptr() for tensor in copy.values()}) == 3
    assert not any(tensor.requires_grad for tensor in copy.values())
    number = torch.tensor([1 + 2j])
    copy = copied(DenseBuffers(), [number, number.conj(), number.imag, number.conj().imag])
    assert [tensor.tolist() for tensor in copy] == [[1 + 2j], [1 - 2j], [2.0], [-2.0]]


@pytest.mark.parametrize("n", [4, 1000, 100_000])
def test_tensors_that_live_at_one_address_one_after_the_other_are_not_one(n):
    buffers = DenseBuffers()
    for _ in range(2):  # the second time no memory is taken in between
        with buffers.copying() as copy:
            copies = [copy((number,), torch.full((n,), number)) for number in range(4)]
        assert [tensor.tolist() for tensor in copies] == [[number] * n for number in range(4)]


BASE = torch.arange(24.0)
STRIDED = {
    "turned": BASE.reshape(4, 6).t(),
    "every second": BASE[::2],
    "a column": BASE.reshape(4, 6)[:, 1],
    "expanded": torch.ones(1).expand(3, 4),
    "channels last": BASE.reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "a number": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "bool": torch.tensor([True, False]),
    "bfloat16": BASE.bfloat16(),
}


@pytest.mark.parametrize("name", STRIDED)
def test_any_strides_are_copied_to_memory_of_their_own_size(name):
    copy = copied(DenseBuffers(), STRIDED[name])
    assert copy.dtype == STRIDED[name].dtype
    assert torch.equal(copy, STRIDED[name])
    found = portable("x", copy, torch.preserve_format)
    assert found.untyped_storage().nbytes() == copy.numel() * copy.element_size()
    assert found.data_ptr() == copy.data_ptr()  # and not copied once more


@pytest.mark.parametrize("name", ["turned", "channels last"])
def test_dimensions_stay_in_the_order_in_which_they_lie_but_for_tensors_that_an_index_lists(name):
    tensor = STRIDED[name]
    for given in (tensor, tensor.repeat(2, *[1] * (tensor.dim() - 1))[: len(tensor)], tensor.expand(2, *tensor.shape)):
        copy = copied(DenseBuffers(), given)
        found = portable("x", copy, torch.preserve_format)
        assert found.stride() == copy.stride() == torch.empty_like(given).stride()
        assert torch.equal(found, given)
    with DenseBuffers().copying() as copying:
        listed = copying(("dense", "x"), tensor)
    assert portable("x", listed).data_ptr() == listed.data_ptr()  # one copy, in row-major order
    assert listed.is_contiguous()
    assert torch.equal(listed, tensor)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_a_cuda_device_are_copied_to_pinned_memory_whole():
    buffers, weight = DenseBuffers(), torch.zeros(1 << 24, device="cuda")
    for number in range(5):
        weight.fill_(number)  # enqueued before the copy
        copy = copied(buffers, weight)
        weight.fill_(-1)  # enqueued after it
        assert copy.is_pinned()
        assert (copy == number).all()


SAME = [
    {"a": 1, "b": [torch.arange(3), (None, 2.5)], "c": {1, 2}},
    torch.arange(6).reshape(2, 3).t(),
    np.arange(3, dtype=np.int16),
    torch.tensor(1.5),
    torch.empty(0),
]


@pytest.mark.parametrize("state", SAME, ids=str)
def test_equal_states_have_one_digest(state):
    def copied(value):
        if isinstance(value, torch.Tensor):
            return value.clone(memory_format=torch.contiguous_format)
        if isinstance(value, dict):
            return {key: copied(item) for key, item in value.items()}
        return type(value)(map(copied, value)) if isinstance(value, list | tuple) else value

    assert digest(state) == digest(copied(state))


def test_states_that_differ_have_other_digests():
    states = [
        *SAME,
        {"a": 2, "b": [torch.arange(3), (None, 2.5)], "c": {1, 2}},
        {"a": 1, "b": [torch.tensor([0, 1, 3]), (None, 2.5)], "c": {1, 2}},
        torch.arange(6).reshape(2, 3),
        torch.arange(6),
        torch.arange(6, dtype=torch.int32),
        np.arange(3, dtype=np.int32),
        torch.tensor([1.5]),
        1,
        True,
        1.0,
        "1",
        [1],
        (1,),
        [[1], 2],
        [1, [2]],
    ]
    assert len({digest(state) for state in states}) == len(states)


def test_digests_tell_how_lists_are_nested_and_not_in_which_order_a_dict_was_filled():
    assert digest([[1, 2], 3]) != digest([[1, 2, 3]])
    assert digest([{"a": 1}, {}]) != digest([{"a": 1, "b": {}}])
    assert digest({"a": 1, 2: 3}) == digest({2: 3, "a": 1})
    refused = torch.ones(2).to_sparse(), torch.empty(2, device="meta")
    assert [digest(state) for state in refused] == [0, 0]


def taken(digests, dense=0, small=0, large=0):
    now = digests.begin()
    copy = now.noting(as_it_is)
    copy(("dense", "top.weight"), torch.full((2,), float(dense)))
    copy(("register_for_checkpointing", "small"), {"n": small})
    copy(("register_for_checkpointing", "large"), torch.full((1 << 19,), float(large)))
    return now


def test_what_costs_time_is_looked_at_in_the_first_save_and_in_every_twentieth():
    digests = RankDigests()
    looked_at = [{name for name, found in taken(digests).by_name.items() if found > 1} for _ in range(41)]
    small = {"register_for_checkpointing 'small'"}
    everything = small | {"dense 'top.weight'", "register_for_checkpointing 'large'"}
    assert [number for number, names in enumerate(looked_at) if names == everything] == [0, 20, 40]
    assert all(names == small for number, names in enumerate(looked_at) if number % 20)


def test_what_differs_is_said_once_and_by_name_and_what_rank_0_does_not_have_is_not_saved(caplog):
    ranks = [RankDigests(), RankDigests()]
    for _ in range(3):
        first, second = taken(ranks[0]), taken(ranks[1], dense=1, small=1)
        if first.summary == second.summary:
            continue
        for rank, own in enumerate((first, second)):
            own.warn([first.by_name, second.by_name], rank)
    dense, small = [record.getMessage() for record in caplog.records]
    assert dense.startswith(
        "dense 'top.weight' differs on rank 1: only the state of rank 0 is saved, and restored on all ranks"
    )
    assert small.startswith("register_for_checkpointing 'small' differs on rank 1: ")
    assert "per_rank=True" in small
    ranks = [RankDigests().begin(), RankDigests().begin()]
    ranks[1].noting(as_it_is)(("dense", "stage_2.weight"), torch.ones(1))
    ranks[0].warn([rank.by_name for rank in ranks], 0)
    said = "dense 'stage_2.weight' is registered on rank 1 but not on rank 0, and is not saved"
    assert caplog.records[-1].getMessage().startswith(said)


def copies(n_rows=10_000, **changed):
    """Return the slots of a copy of a table; ``changed`` are slots of which row 7 is another."""
    slots = {"embedding": torch.ones(n_rows, 3), "sum": torch.ones(n_rows)}
    for slot in changed:
        slots[slot][7] = 2
    return slots


@pytest.mark.parametrize("slot", ["embedding", "sum"])
def test_copies_of_a_table_that_differ_in_a_row_are_named_once_after_some_saves(caplog, slot):
    ranks = [RankDigests() for _ in range(3)]
    for _ in range(4):  # each of which looks at about half of so many rows
        saves = [each.begin() for each in ranks]
        saves[0].note_rows("users", 20, copies(), audit=0)
        saves[2].note_rows("users", 20, copies(**{slot: True}), audit=0)  # rank 1 has no copy of these rows
        for rank, save in enumerate(saves):
            save.warn([each.by_name for each in saves], rank)
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("table 'users' from row 20 to 10019 differs on rank 2 from the other copies")


def test_an_audit_looks_at_all_rows_of_copies():
    own, other = RankDigests(), RankDigests()
    looks = []
    for _ in range(4):
        saves = [each.begin() for each in (own, other)]
        for save, slots in zip(saves, (copies(30_000), copies(30_000, sum=True)), strict=True):
            save.note_rows("users", 0, slots, audit=2)
        looks.append(saves[0].summary != saves[1].summary)
    assert looks == [False, True, False, True]


def test_an_object_that_is_large_on_one_rank_alone_differs_and_is_not_said_to_be_missing(caplog):
    states = [torch.zeros(300_000), torch.zeros(2)]
    digests = [RankDigests() for _ in states]
    for each in digests:
        each.begin()  # the first save looks at everything
    seconds = [each.begin() for each in digests]
    for each, state in zip(seconds, states, strict=True):
        each.noting(lambda place, state: state)(("extra", "x"), state)
    seconds[0].warn([each.by_name for each in seconds], 0)
    assert "extra 'x' differs on rank 1" in caplog.text
