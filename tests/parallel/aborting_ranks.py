"""Pairs of ranks that return from ``main`` after a load: ``aborting_ranks.py ROOT N_PAIRS`` prints their exit codes.

Threads of gloo get a processor only when nothing else wants it, and the interpreter late, so that they drop the tensors
of the last collective while the interpreter ends: 18 of 20 ranks aborted where groups were not closed before.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from recckpt import CheckpointManager, Saver


def main(rank, root):
    """Save and load, and return."""
    dist.init_process_group("gloo", init_method=f"file://{root}/meeting", rank=rank, world_size=2)
    manager = CheckpointManager(Saver(torch.nn.Linear(2, 2), output_dir=f"{root}/runs"), 1, shard_id=rank, shard_num=2)
    manager.step()
    hold_up_gloo(rank)
    manager.restore()


def hold_up_gloo(rank):
    """Let threads of gloo come late, as on a busy machine."""
    cpus = sorted(os.sched_getaffinity(0))
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), {cpus[rank % len(cpus)]})
        if "gloo_run" in (task / "comm").read_text():
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
    sys.setswitchinterval(0.1)


def fork_pair(root):
    """Return the number of this rank in a fork, and None, with the codes of both, in the process that forks them."""
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            return rank, []
        pids.append(pid)
    return None, [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


if __name__ == "__main__":
    torch.set_num_threads(1)
    codes = []
    for number in range(int(sys.argv[2])):
        root = Path(sys.argv[1]) / str(number)
        root.mkdir()
        rank, codes_of_pair = fork_pair(root)
        if rank is not None:
            main(rank, root)
            break  # to a real end of the interpreter
        codes += codes_of_pair
    else:
        print(json.dumps(codes))
