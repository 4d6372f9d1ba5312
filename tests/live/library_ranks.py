"""What real ranks do with a hash table of another library for test_library.py: ``library_ranks.py ROOT SIZE...``.

Each rank has the ids of its slice; each run of ranks restores what that before it has saved.
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from live.test_library import ALWAYS, Hkv, truth_of
from support.rank_processes import fork_ranks
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.live import live_tables
from recckpt.sparse import gen_slice


def run(rank, size, root, before):
    torch.manual_seed(0)
    one, model = Hkv(capacity=400), nn.ModuleDict({"top": nn.Linear(2, 1)})
    one.table.slice = gen_slice(rank, size)
    tables = live_tables(model, adapters=[one.table])
    saver = Saver(model, output_dir=str(root / "runs"), tables=tables, deltas=ALWAYS, progress=False, max_keep=99)

    def own(first, end):
        return [key for key in range(first, end) if one.table.slice.owns(np.array([key])).all()]

    if before:
        assert CheckpointManager(saver, 10).restore() == before
    else:
        one.train(own(0, 100))
    assert saver.save(f"full-{size}", step=10 * size).kind == "full"  # of several ranks it is not known to be whole
    one.train(own(90, 110))
    one.erase(own(10 * size, 10 * size + 5))
    info = saver.save(f"delta-{size}", step=size)
    assert (info.kind, info.tables[0].delta.upserts, info.tables[0].delta.deletes) == ("delta", 20, 5)
    saver.close()
    return truth_of(one)


if __name__ == "__main__":
    root, *sizes = sys.argv[1:]
    torch.set_num_threads(1)
    before = 0
    for size in map(int, sizes):
        fork_ranks(size, Path(root), partial(run, before=before))
        before = size
