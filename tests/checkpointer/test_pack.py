"""What of a state goes into a file."""

import pytest
import torch
from support.checkpointing import everything

from recckpt.checkpointer.pack import pack
from recckpt.dense.torch_archive import ArchiveContents, write_archive
from recckpt.storage import SinkFile, open_storage


def n_bytes(state):
    return [piece.numel() for piece in pack(state).pieces]


def test_tensors_of_the_state_are_not_copied_to_be_packed():
    tensors = [torch.ones(10), torch.ones(4, 6).t(), torch.arange(20)[5:10], torch.tensor(1.0)]
    pieces = pack({"t": tensors}).pieces
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
    assert pack(everything()).pickle == pack(everything()).pickle
    one = "".join(["a", "ä"])
    assert pack({"x": one, one: one}).pickle == pack({"x": "".join(["a", "ä"]), "aä": "".join(["a", "ä"])}).pickle


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
    contents = ArchiveContents(pack({"a": 1}).pickle, [memoryview(bytes([n]) * n) for n in range(1, 200, 7)])
    with open_storage(str(tmp_path)).draft("x") as draft:
        write_archive(SinkFile(draft), contents, lambda: None)
    data = (tmp_path / "x").read_bytes()
    for n in range(8, 200, 7):
        assert data.index(bytes([n]) * n) % 64 == 0
