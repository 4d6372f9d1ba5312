"""Jobs of three hosts, a rank each, of which one is killed at a call of its storage: ``host_kills.py ROOT RANK N...``.

The job of each number N has ``ROOT/N``. What is acknowledged is noted there by each rank that has learnt it.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it has much to say of connections that end

import torch
import torch.distributed as dist
from support.killed import CALLS, kill_at
from support.near_runs import NearRun
from support.rank_processes import whole_life

from recckpt.errors import SaveFailedError
from recckpt.sparse import gen_slice

HOSTS = ("a", "b", "c")
OTHERS = {f"_{id_}": 0.5 for id_ in range(100, 120)}
N_STEPS = 4


def rows_at(step):
    """Return the rows of a step: each sets its own and row 0, and erases that of the step before the last."""
    own = {number: float(number) for number in (step - 1, step) if number > 1}
    return {0: float(step)} | own if step else {}


def begin(run):
    """Make the checkpoint that near saves stand on."""
    run.put(_0=1.0, **OTHERS).step()


def train(run, root):
    """Make steps, and note each whose near save is acknowledged."""
    for step in range(2, N_STEPS + 1):
        run.put(**{f"_{step}": float(step), "_0": float(step)})
        if step > 3 and step - 2 in run.rows:
            run.erase(step - 2)
        n_made = run.counts[0]
        try:
            run.step()
        except SaveFailedError:  # a rank is lost
            return
        if run.counts[0] > n_made:
            (root / f"acknowledged-{step}").touch()


def be_rank(rank, root, victim, number):
    """Train as one rank, which is killed at a call where it is the victim."""
    with whole_life():
        meeting, size = f"file://{root}/rendezvous", len(HOSTS)
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        run = NearRun(root, slice=gen_slice(rank, size), shard_id=rank, shard_num=size, near=HOSTS[rank])
        begin(run)
        dist.barrier()
        n_calls = kill_at(number, CALLS) if rank == victim else None
        train(run, root)
        if n_calls is not None:
            (root / "calls").write_text(str(n_calls()))


def main():
    torch.set_num_threads(1)
    root, victim = Path(sys.argv[1]), int(sys.argv[2])
    for number in map(int, sys.argv[3:]):
        of_job = root / f"{number}"
        of_job.mkdir()
        pids = []
        for rank in range(len(HOSTS)):
            pids.append(os.fork())
            if not pids[-1]:
                be_rank(rank, of_job, victim, number)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        (of_job / "codes").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
