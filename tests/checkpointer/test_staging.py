"""What of a state goes into a file, and its copy in shared memory that is kept from save to save."""

import gc
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from support.checkpointing import everything

from recckpt.checkpointer.staging import Arena, SharedMemoryStager, pack
from recckpt.dense.torch_archive import ArchiveContents, write_archive
from recckpt.storage import SinkFile, open_storage


def n_bytes(state):
    return [piece.numel() for piece in pack(state)[1]]


def test_tensors_of_the_state_are_not_copied_to_be_packed():
    tensors = [torch.ones(10), torch.ones(4, 6).t(), torch.arange(20)[5:10], torch.tensor(1.0)]
    _, pieces = pack({"t": tensors})
    assert [piece.data_ptr() for piece in pieces] == [tensor.data_ptr() for tensor in tensors]


def test_memory_that_tensors_share_is_one_piece():
    base = torch.arange(100)
    assert n_bytes({"a": base[:60], "b": base[40:], "c": base}) == [800]
    assert n_bytes({"a": base[:40], "b": base[60:]}) == [320, 320]
    assert n_bytes({"a": base[::2], "b": base[1::2]}) == [800]
    assert n_bytes({"a": base[::10], "b": base[5:6]}) == [80, 8]
    assert n_bytes({"a": base, "b": base.view(torch.float64)}) == [800, 800]
    assert n_bytes({"a": base[:0], "b": base[:0]}) == [0, 0]
    assert n_bytes({"a": torch.ones(1).expand(1000), "b": torch.ones(1)}) == [4000, 4]


def test_equal_states_make_equal_bytes_whatever_objects_they_consist_of():
    assert pack(everything())[0] == pack(everything())[0]
    one = "".join(["a", "ä"])
    assert pack({"x": one, one: one})[0] == pack({"x": "".join(["a", "ä"]), "aä": "".join(["a", "ä"])})[0]


def test_a_write_that_is_to_be_dropped_is_dropped_between_two_chunks(tmp_path):
    class DroppedError(Exception):
        pass

    asked = []

    def proceed():
        asked.append(1)
        if len(asked) == 4:
            raise DroppedError

    def write(storage, contents):
        with storage.draft("x") as draft:
            write_archive(SinkFile(draft), contents, proceed)

    piece = memoryview(bytes(20 << 20))
    with pytest.raises(DroppedError):
        write(open_storage(str(tmp_path)), ArchiveContents(b"pickle", [piece]))
    assert list(tmp_path.iterdir()) == []


def test_pieces_are_aligned_so_that_the_file_can_be_mapped(tmp_path):
    contents = ArchiveContents(pack({"a": 1})[0], [memoryview(bytes([n]) * n) for n in range(1, 200, 7)])
    with open_storage(str(tmp_path)).draft("x") as draft:
        write_archive(SinkFile(draft), contents, lambda: None)
    data = (tmp_path / "x").read_bytes()
    for n in range(8, 200, 7):
        assert data.index(bytes([n]) * n) % 64 == 0


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


def test_a_staged_state_is_a_copy_that_outlives_the_stager(stager):
    staged = stager.stage({"a": 1, "e": torch.empty(0)})
    assert (staged.arena.n_bytes, staged.spans) == (0, [(0, 0)])  # without tensors it needs no memory
    values = torch.arange(10, dtype=torch.int64)
    staged = stager.stage({"v": values})
    values.zero_()
    stager.close()
    stager.close()
    gc.collect()
    assert bytes_of(staged) == [np.arange(10).tobytes()]
    with pytest.raises(RuntimeError, match="the stager is closed; make a new one"):
        stager.stage({})


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
