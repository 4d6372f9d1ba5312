"""Real ranks: processes under gloo on this machine, forked from one interpreter that has imported everything."""

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from support.warm_python import WarmProcess

_SECONDS = 60  # that a collective may take


def run_script(script: Path, root: Path, *arguments: object, seconds: float = 300) -> None:
    """Run a script that calls :func:`fork_ranks`, which must end well; end it and its ranks in any case."""
    process = WarmProcess(script, root, *arguments)
    try:
        code = process.wait(seconds)
    finally:
        process.terminate()
        process.wait()
    assert code == 0


def results(root: Path, size: int) -> list[Any]:
    """Return what each of the ranks returned."""
    return [pickle.loads((root / f"{rank}-of-{size}").read_bytes()) for rank in range(size)]


def fork_ranks(size: int, root: Path, work: Callable[[int, int, Path], Any]) -> None:
    """Do ``work(rank, size, root)`` on every rank of a process group, and keep what it returns under ``root``.

    The interpreter ends where a rank fails. One rank alone has no process group.
    """
    pids: set[int] = set()

    def stop(*_: object) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        os._exit(1)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, size, root, work)
        pids.add(pid)
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if status:
            stop()


@contextmanager
def whole_life() -> Iterator[None]:
    """Do the block in a fork and end this process, with 1 where it raised; never returns."""
    import torch

    code = 1
    try:
        # In a fork torch makes its pool of threads anew when one first computes. If a thread of gloo and one that
        # trains do so at the same moment, one of them fails: "Invalid thread pool!". So make it before there are any.
        torch.set_num_threads(torch.get_num_threads())
        yield
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _be_rank(rank: int, size: int, root: Path, work: Callable[[int, int, Path], Any]) -> None:
    with whole_life():
        import torch.distributed as dist

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        if size > 1:
            meeting = f"file://{root}/rendezvous-{size}"
            timeout = timedelta(seconds=_SECONDS)
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=timeout)
        (root / f"{rank}-of-{size}").write_bytes(pickle.dumps(work(rank, size, root)))
        if size > 1:
            dist.barrier()
            dist.destroy_process_group()
