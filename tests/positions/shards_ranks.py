"""What real ranks do for test_shards.py: run it as ``shards_ranks.py ROOT SIZE``.

Two ranks use a part of an epoch and save; any other number restores that, and uses the rest of it.
"""

import sys
from pathlib import Path

from support.numbered_shards import Numbers
from support.rank_processes import fork_ranks
from torch import nn

from recckpt import CheckpointManager
from recckpt.positions import ElasticShards


def use(rank, size, root):
    data, used = ElasticShards(Numbers(), 2), []
    with CheckpointManager.attach(nn.Linear(1, 1), loader=data, output_dir=root / "run", save_interval=3) as manager:
        manager.restore()
        for batch in data:
            used += batch["n"]
            if size == 2:
                manager.step()
                if manager.global_step == 3:
                    break
    return used


if __name__ == "__main__":
    fork_ranks(int(sys.argv[2]), Path(sys.argv[1]), use)
