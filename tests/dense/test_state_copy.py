"""Copies of dense state: whole, apart from the original, and in the same memory from save to save."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from recckpt.dense.state_copy import DenseBuffers, as_it_is, portable


def copied(buffers, state):
    with buffers.copying() as copy:
        return copy(("x",), state)


def test_a_copy_is_equal_and_does_not_follow_the_original():
    state = OrderedDict(a=torch.arange(3.0), b=[torch.ones(2), (torch.zeros(1), "text")], c={"n": 5, None: 2.5})
    copy = copied(DenseBuffers(), state)
    for tensor in (state["a"], state["b"][0], state["b"][1][0]):
        tensor.fill_(9)
    assert type(copy) is OrderedDict
    assert copy["a"].tolist() == [0, 1, 2]
    assert copy["b"][0].tolist() == [1, 1]
    assert (copy["b"][1][0].tolist(), copy["b"][1][1]) == ([0], "text")
    assert copy["c"] == {"n": 5, None: 2.5}


def test_tensors_in_a_set_are_copied_too():
    tensor = torch.ones(2)
    [copy] = copied(DenseBuffers(), {tensor})
    tensor.zero_()
    assert copy.tolist() == [1, 1]


def test_a_state_that_was_not_copied_is_the_same_object():
    state = {"a": torch.ones(1)}
    assert as_it_is(("x",), state) is state


def test_the_memory_serves_again_from_save_to_save():
    buffers, weight, bias = DenseBuffers(), torch.ones(1000), torch.ones(10)
    first = copied(buffers, {"weight": weight, "bias": bias})
    second = copied(buffers, {"weight": weight + 1, "bias": bias})
    assert {name: tensor.data_ptr() for name, tensor in first.items()} == {
        name: tensor.data_ptr() for name, tensor in second.items()
    }
    assert (second["weight"] == 2).all()


@pytest.mark.parametrize("changed", [torch.ones(11), torch.ones(10, dtype=torch.float64), torch.ones(2, 5)])
def test_a_tensor_of_another_shape_or_dtype_gets_other_memory(changed):
    buffers = DenseBuffers()
    first = copied(buffers, torch.zeros(10))
    copy = copied(buffers, changed)
    assert torch.equal(copy, changed)
    assert (copy.dtype, first.tolist()) == (changed.dtype, [0.0] * 10)


def test_the_memory_of_what_is_no_longer_there_is_let_go():
    buffers = DenseBuffers()
    copied(buffers, {"old": torch.ones(3), "both": torch.ones(3)})
    copied(buffers, {"both": torch.ones(3)})
    assert list(buffers._buffers) == [("x", "both")]


def test_a_failed_staging_leaves_the_buffers_as_they_were():
    buffers = DenseBuffers()
    first = copied(buffers, torch.ones(3))
    with pytest.raises(KeyError), buffers.copying():
        raise KeyError
    assert copied(buffers, torch.zeros(3)).data_ptr() == first.data_ptr()


def test_tensors_that_are_one_are_one_in_the_copy():
    weight = nn.Parameter(torch.ones(4, 4))
    copy = copied(DenseBuffers(), {"embed": weight, "out": weight.detach(), "rows": weight[:2], "turned": weight.t()})
    assert copy["embed"] is copy["out"]
    assert len({tensor.data_ptr() for tensor in copy.values()}) == 3
    assert not any(tensor.requires_grad for tensor in copy.values())


@pytest.mark.parametrize("n", [4, 1000, 100_000])
def test_tensors_that_live_at_one_address_one_after_the_other_are_not_one(n):
    buffers = DenseBuffers()
    for _ in range(2):  # the second time no memory is taken in between
        with buffers.copying() as copy:
            copies = [copy((number,), torch.full((n,), number)) for number in range(4)]
        assert [tensor.tolist() for tensor in copies] == [[number] * n for number in range(4)]


def test_a_number_and_its_conjugate_are_not_one():
    number = torch.tensor([1 + 2j])
    copy = copied(DenseBuffers(), [number, number.conj(), number.imag, number.conj().imag])
    assert [tensor.tolist() for tensor in copy] == [[1 + 2j], [1 - 2j], [2.0], [-2.0]]


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
    assert portable("x", copy).untyped_storage().nbytes() == copy.numel() * copy.element_size()
    assert portable("x", copy).data_ptr() == copy.data_ptr()  # and not copied once more


def test_what_is_no_plain_tensor_is_left_to_those_who_refuse_it():
    for odd in (torch.ones(3).to_sparse(), torch.empty(2, device="meta"), nn.parameter.UninitializedParameter()):
        assert copied(DenseBuffers(), [odd])[0] is odd


def test_a_state_that_holds_itself_is_left_to_those_who_refuse_it():
    endless = []
    endless.append(endless)
    with pytest.raises(ValueError, match="x: it holds itself"):
        portable("x", copied(DenseBuffers(), endless))


def test_buffers_made_in_inference_mode_serve_outside_of_it():
    buffers = DenseBuffers()
    with torch.inference_mode():
        copied(buffers, torch.ones(2))
    assert copied(buffers, torch.zeros(2)).tolist() == [0, 0]


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
