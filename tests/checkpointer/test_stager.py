"""Staging: copies in shared memory that is kept from save to save."""

import gc
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from support.checkpointing import everything

from recckpt.checkpointer import SharedMemoryStager
from recckpt.checkpointer.child import Arena


@pytest.fixture
def stager():
    stager = SharedMemoryStager()
    yield stager
    stager.close()


def bytes_of(staged):
    memory = staged.arena.memory
    return [memory[begin : begin + size] for begin, size in staged.spans]


def address(staged):
    return torch.frombuffer(staged.arena.memory, dtype=torch.uint8).data_ptr()


def test_a_staged_state_is_a_copy(stager):
    values = torch.arange(10, dtype=torch.int64)
    staged = stager.stage({"v": values})
    values.zero_()
    assert bytes_of(staged) == [np.arange(10).tobytes()]


def test_memory_is_used_again_and_grows_where_it_must(stager):
    first = stager.stage({"a": torch.ones(1000), "b": torch.zeros(3)})
    again = stager.stage({"a": torch.ones(900)})
    assert (first.arena is again.arena, address(first)) == (True, address(again))
    size = first.arena.n_bytes
    larger = stager.stage({"a": torch.full((100_000,), 2.0)})
    assert larger.arena is first.arena
    assert larger.arena.n_bytes > size
    assert bytes_of(larger) == [np.full(100_000, 2, np.float32).tobytes()]


def test_pieces_do_not_overlap_and_are_aligned(stager):
    staged = stager.stage(everything())
    end = 0
    for begin, size in staged.spans:
        assert begin % 64 == 0
        assert begin >= end
        end = begin + size
    assert end <= staged.arena.n_bytes


def test_what_is_staged_outlives_the_stager(stager):
    staged = stager.stage({"v": torch.ones(5)})
    stager.close()
    stager.close()
    gc.collect()
    assert bytes_of(staged) == [np.ones(5, np.float32).tobytes()]
    with pytest.raises(RuntimeError, match="the stager is closed; make a new one"):
        stager.stage({})


def test_a_state_without_tensors_needs_no_memory(stager):
    staged = stager.stage({"a": 1, "e": torch.empty(0)})
    assert (staged.arena.n_bytes, staged.spans) == (0, [(0, 0)])


def test_more_memory_than_there_are_addresses_for_is_an_error_and_no_crash():
    arena = Arena()
    with pytest.raises((OSError, OverflowError)):
        arena.reserve(1 << 62)
    assert (arena.n_bytes, arena.memory) == (0, None)
    arena.reserve(100)
    assert arena.n_bytes == len(arena.memory) == 100


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_from_a_device_are_whole_whatever_training_enqueues_next(stager):
    state = {"w": torch.zeros(1 << 26, device="cuda"), "cpu": torch.ones(3)}
    for step in range(20):
        staged = stager.stage(state)
        assert isinstance(staged, Future)
        state["w"].add_(1)
        values = torch.frombuffer(staged.result().arena.memory, dtype=torch.float32)[: 1 << 26]
        assert values.is_pinned()
        assert values.eq(step).all()
