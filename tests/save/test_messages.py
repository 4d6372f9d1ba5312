"""How often the ranks of a save meet, and how much they send each other."""

import pytest
import torch
from support.thread_ranks import Wire, on_ranks
from torch import nn

from recckpt import Saver
from recckpt.sparse import HashTable, gen_slice


def wire_of_a_save(root, size, **options):
    """Return what was sent for the second save of a job: the first has a directory to take over."""
    wire = Wire(size)

    def on_rank(rank, connect):
        table = HashTable(2, name="t", slice=gen_slice(rank, size))
        ids = torch.arange(100)
        table(ids[table.slice.owns(ids)])
        model = nn.ModuleDict({"t": table, "top": nn.Linear(2, 1, bias=False)})
        with torch.no_grad():
            model["top"].weight.fill_(1)
        saver = connect(Saver(model, output_dir=str(root), concurrency=1, **options))
        saver.save("a", rank, size)
        wire.barrier.wait(60)
        if rank == 0:
            wire.messages.clear()
            wire.n_bytes = 0
        wire.barrier.wait(60)
        saver.save("b", rank, size)

    on_ranks(size, on_rank, wire)
    return wire


@pytest.mark.parametrize("deltas", [False, True])
def test_the_ranks_of_a_save_meet_four_times(tmp_path, deltas):
    wire = wire_of_a_save(tmp_path, 2, deltas=deltas)
    assert wire.messages == ["gather", "broadcast", "broadcast", "gather", "broadcast"]


def test_what_crosses_the_wire_grows_with_the_ranks_and_not_with_their_square(tmp_path):
    sizes = {size: wire_of_a_save(tmp_path / str(size), size).n_bytes for size in (2, 4, 8, 16)}
    a_rank = (sizes[8] - sizes[4]) / 4
    assert (sizes[4] - sizes[2]) / 2 == pytest.approx(a_rank, rel=0.1)
    assert (sizes[16] - sizes[8]) / 8 == pytest.approx(a_rank, rel=0.1)
