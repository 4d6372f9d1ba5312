"""Two real ranks whose object store stops answering for longer than they wait for each other: ``away_ranks.py ROOT``.

The process of the server is stopped, and goes on, while the ranks make near saves.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from fsspec.config import conf
from support.near_runs import ALL
from support.rank_processes import fork_ranks
from torch import nn

from recckpt import CheckpointManager, Near, Saver
from recckpt.sparse import HashTable, gen_slice

TIMEOUT_SEC = 12.0


def work(rank, size, root):
    """Return how many near saves were made, failed and left out, before the outage, after it, and at the end."""
    server = json.loads((root / "server").read_text())
    conf["s3"] = {"endpoint_url": server["endpoint"], "key": "tests", "secret": "tests"}
    table = HashTable(2, name="t", slice=gen_slice(rank, size))
    near = Near(root / "near", interval=1, timeout_sec=TIMEOUT_SEC)
    saver = Saver(nn.ModuleDict({"t": table}), output_dir=server["url"], deltas=ALL, near=near)
    manager, counts = CheckpointManager(saver, 10**9), []

    def step(n_steps):
        for _ in range(n_steps):
            ids = torch.arange(20) + 20 * manager.global_step
            ids = ids[table.slice.owns(ids)]
            table.insert(ids, torch.ones(len(ids), 2))
            manager.step()
            saver.near_saves.settle()
        counts.append((manager.counts.near, manager.counts.near_failed, manager.counts.near_skipped))

    def send(number):
        dist.barrier()
        if rank == 0:
            os.kill(server["pid"], number)
        dist.barrier()

    step(3)
    send(signal.SIGSTOP)
    step(3)
    send(signal.SIGCONT)
    step(2)
    return counts


if __name__ == "__main__":
    torch.set_num_threads(1)
    fork_ranks(2, Path(sys.argv[1]), work)
