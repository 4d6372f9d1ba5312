"""What real ranks do for test_save_info.py: run it as ``save_info_ranks.py ROOT SIZE``."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from support.rank_processes import fork_ranks
from torch import nn

from recckpt import Saver
from recckpt.sparse import HashTable, gen_slice

N_ROWS = 2000


class Slow:
    """State that takes the last rank longer than the others."""

    def __init__(self, rank, size):
        self.n_rounds = 300 if rank == size - 1 else 0

    def dump_io_state(self):
        for _ in range(self.n_rounds):
            os.urandom(1 << 16)
        return {}

    def load_io_state(self, state):
        pass


def work(rank, size, root):
    """Save in the background; return what the info says, and what each rank has seen itself."""
    table = HashTable(4, name="t", slice=gen_slice(rank, size))
    ids = torch.arange(N_ROWS)
    table(ids[table.slice.owns(ids)] if rank else ids[table.slice.owns(ids)][:10])
    saver = Saver(nn.ModuleDict({"t": table}), output_dir=str(root / "run"))
    saver.register_io_state("slow", Slow(rank, size))
    handle = saver.save_async("c")
    record, info = handle.wait(), handle.info
    own = {"stage_sec": info.stage_sec, "blocked_sec": info.blocked_sec}
    own["n_bytes"] = sum(file.n_bytes for file in record.files if f"{rank:05}-of-{size:05}" in file.name)
    maxima = {"stage_sec": info.max_stage_sec, "blocked_sec": info.max_blocked_sec, "n_bytes": info.max_rank_bytes}
    of_all = [None] * size
    dist.all_gather_object(of_all, own)
    return maxima, info.write_sec, info.slowest_shard, of_all


if __name__ == "__main__":
    torch.set_num_threads(1)
    root, size = Path(sys.argv[1]), int(sys.argv[2])
    fork_ranks(size, root, work)
