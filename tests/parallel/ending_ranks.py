"""Two ranks of which the first ends in the way that a test names: ``ending_ranks.py ROOT WAY``; for test_gloo_group.py.

What the first has to say is JSON in ``ROOT/said``. The other one is killed when the first has ended.
"""

import atexit
import json
import os
import signal
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from support.rank_processes import whole_life

from recckpt.errors import RecckptError
from recckpt.parallel.process_group import ProcessGroup

N_THREADS = 4  # two of torch's group, and two of ours
_SEC = 3600  # what waits for another rank does not come back


def n_threads():
    """Return how many threads of this process carry out collectives of gloo."""
    return sum("gloo_run" in name.read_text() for name in Path("/proc/self/task").glob("*/comm"))


def threads_after(group):
    """Do what the interpreter does at its end, and say how many of those threads there were and are then."""
    while (before := n_threads()) < N_THREADS:  # a thread names itself a moment after it has started
        os.sched_yield()
    atexit._run_exitfuncs()
    return before, n_threads()


def well(group):
    """End after the last collective, and try another one then."""
    threads = threads_after(group)
    try:
        group.all_gather(1)
    except RecckptError as error:
        return threads, str(error)


def under_way(group):
    """End while a daemon thread waits for the other rank."""
    begun = threading.Event()

    def wait(torch_group):
        begun.set()
        dist.barrier(group=torch_group)

    threading.Thread(target=lambda: group._collective(wait), daemon=True).start()
    begun.wait()
    return threads_after(group)


def interrupted(group):
    """End after an interrupt that came before the collective was waited for."""

    def interrupt(torch_group):
        dist.barrier(group=torch_group, async_op=True)
        raise KeyboardInterrupt

    try:
        group._collective(interrupt)
    except KeyboardInterrupt:
        return threads_after(group)


def forked(group):
    """Let a fork, in which the threads of the group are not, end first."""
    pid = os.fork()
    if pid == 0:
        atexit._run_exitfuncs()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


FIRST = {"well": well, "under_way": under_way, "interrupted": interrupted, "forked": forked}
OTHER = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def be_rank(rank, root, way):
    with whole_life():
        dist.init_process_group("gloo", init_method=f"file://{root}/meeting", rank=rank, world_size=2)
        group = ProcessGroup(_SEC)
        group.all_gather(rank)
        if rank == 0:
            (root / "said").write_text(json.dumps(FIRST.get(way, threads_after)(group)))
            return
        os.kill(os.getpid(), OTHER.get(way, signal.SIGSTOP))


if __name__ == "__main__":
    torch.set_num_threads(1)
    pids = []
    for number in range(2):
        pids.append(os.fork())
        if pids[-1] == 0:
            be_rank(number, Path(sys.argv[1]), sys.argv[2])
    code = os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1])
    os.kill(pids[1], signal.SIGKILL)
    sys.exit(code)
