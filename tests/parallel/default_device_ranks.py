"""Real ranks that send each other something while tensors are made on another device by default."""

import sys
from pathlib import Path

import torch
from support.rank_processes import fork_ranks

from recckpt.parallel.process_group import ProcessGroup


def work(rank, size, root):
    """Return what each method of a group returns."""
    group = ProcessGroup(60)
    with torch.device("meta"):
        return group.all_gather(rank), group.gather_to_first(f"of {rank}"), group.broadcast(f"from {rank}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    root, size = Path(sys.argv[1]), int(sys.argv[2])
    fork_ranks(size, root, work)
