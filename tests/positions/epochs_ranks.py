"""What real ranks do for test_epochs.py: run it as ``epochs_ranks.py ROOT SIZE``.

Two ranks use a part of an epoch and save; any other number restores that, and uses the rest of it.
"""

import sys
from pathlib import Path

from support.rank_processes import fork_ranks
from torch import nn

from recckpt import CheckpointManager
from recckpt.positions import ElasticLoader


def use(rank, size, root):
    data, used = ElasticLoader(range(57), 4), []
    with CheckpointManager.attach(nn.Linear(1, 1), loader=data, output_dir=root / "run", save_interval=3) as manager:
        manager.restore()
        for batch in data:
            used += batch.tolist()
            manager.step()
            if size == 2 and manager.global_step == 3:
                break
    return used


if __name__ == "__main__":
    fork_ranks(int(sys.argv[2]), Path(sys.argv[1]), use)
