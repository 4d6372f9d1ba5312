"""A process that forks children which save, and stop themselves right before it; driven by test_crash.py.

It runs no threads of ours, so that a fork is a whole process; those of Arrow, which it may have, know how to fork.
One JSON line in is one child: its pid comes back once it has stopped itself, and its wait status once it is gone.
"""

import json
import os
import signal
import sys

import torch
from torch import nn

import recckpt.save
from recckpt import CheckpointManager, SaveFailedError, Saver, rotation
from recckpt.errors import CommitNotDurableError
from recckpt.listing import list_checkpoints
from recckpt.sparse import HashTable, SparseAdagrad

SAVE_FAILED, NOT_DURABLE = 3, 4  # exit codes


class Job:
    """A run whose whole state follows from its step."""

    def __init__(self, url, max_keep, concurrency=1):  # with one, a save makes no threads: its calls come in one order
        self.table = HashTable(4, name="t")
        self.top = nn.Linear(4, 1)
        optim = SparseAdagrad([self.table])
        self.saver = Saver(nn.ModuleDict({"t": self.table, "top": self.top}), optim, url, max_keep, concurrency)
        self.manager = CheckpointManager(self.saver, 10**9)

    def advance(self):
        self.manager.step()
        self.set_state(self.manager.global_step)

    def set_state(self, step):
        ids = torch.arange(step, step + 50)
        values = torch.full((50, 4), float(step))
        self.table.clear()
        self.table.insert(ids, values, {"sparse_adagrad_sum": values + 1})
        with torch.no_grad():
            self.top.weight.fill_(step)

    def is_of_step(self, step):
        found, _ = self.table.lookup(torch.arange(step, step + 50))
        return (
            len(self.table) == 50
            and bool((found == step).all())
            and bool((self.table.slots["sparse_adagrad_sum"] == step + 1).all())
            and bool((self.top.weight == step).all())
        )


def save_in_child(url, max_keep, restore_step, plant, threads):
    job = Job(url, max_keep, 4 if threads else 1)
    job.manager.restore(restore_step)
    job.advance()
    if plant == "rotation before the commit":
        commit = recckpt.save.commit

        def rotate_and_commit(storage, fence, directory, record):
            for victim in list_checkpoints(storage).committed:
                rotation.remove(storage, victim)
            return commit(storage, fence, directory, record)

        recckpt.save.commit = rotate_and_commit
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        job.manager.save()
    except CommitNotDurableError:
        os._exit(NOT_DURABLE)
    except SaveFailedError:
        os._exit(SAVE_FAILED)
    os._exit(0)


def main():
    torch.set_num_threads(1)
    warm = Job("memory://warm", 1)  # compiles what there is to compile
    warm.advance()
    warm.manager.save()
    warm.manager.restore()
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                save_in_child(**json.loads(line))
            finally:
                os._exit(1)
        os.waitpid(pid, os.WUNTRACED)
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


if __name__ == "__main__":
    main()
