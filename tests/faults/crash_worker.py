"""A process that forks children which save, and stop themselves right before it; driven by tracing.py.

It runs no threads of ours, so that a fork is a whole process; those of Arrow, which it may have, know how to fork.
One JSON line in is one child: its pid comes back once it has stopped itself, and once it is gone, its wait status and
what it had to tell.
"""

import json
import mmap
import os
import resource
import signal
import sys
import traceback

import torch
from faults import plants
from faults.job import Job
from support import disks

import recckpt
from recckpt.errors import CommitNotDurableError, SaveFailedError

SAVED, SAVE_FAILED, NOT_DURABLE = 0, 3, 4  # exit codes
RESTORE = -1  # in place of the number of a save: before a process restores
_TOLD_BYTES = 1 << 14


def prepare(plant):
    if plant is not None:
        plants.plant(plant)


def save_in_child(url, max_keep, steps, branch, restore, before, threads, background, plant, file_limit, tell, **how):
    """Save each of the steps; stop before the one whose number is ``before``, or before the restore."""
    if before == RESTORE:
        prepare(plant)
        os.kill(os.getpid(), signal.SIGSTOP)
    job = Job.resumed(url, restore, max_keep, threads=threads, deltas=how["deltas"], live=how["live"])
    if before != RESTORE:
        prepare(plant)
    for number, step in enumerate(steps):
        job.advance(branch)
        assert job.manager.global_step == step
        if number == before:
            if file_limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
            os.kill(os.getpid(), signal.SIGSTOP)
        if how["offers"]:
            job.saver._to.fence.hold()  # first: an offer belongs to the epoch under which it was begun
            recckpt.rewrite.compact(url, threads=1)
        if how["forgets"] is not None:
            recckpt.rewrite.forget(url, "t", [how["forgets"]])
        try:
            job.save(background=background)
        except SaveFailedError as error:
            cause = error.__cause__
            tell(message=str(error), cause=type(cause).__name__, errno=getattr(cause, "errno", None))
            return NOT_DURABLE if isinstance(error, CommitNotDurableError) else SAVE_FAILED
        os.access(f"{url}/acknowledged/{step}.{branch}", os.F_OK)  # seen in the log of calls
    return SAVED


def run_child(order, told):
    """Do as ordered and end; what is told goes by shared memory, since any system call may fail."""

    def tell(**facts):
        data = json.dumps(facts).encode()[: _TOLD_BYTES - 1]
        told[: len(data) + 1] = data + b"\0"

    status = 1
    try:
        status = save_in_child(**order, tell=tell)
    except BaseException:
        tell(message=traceback.format_exc()[-3000:])
    finally:
        os._exit(status)


def main():
    disks.wait_for_them()  # strace looks for the calls
    torch.set_num_threads(1)
    told = mmap.mmap(-1, _TOLD_BYTES)
    print("ready", flush=True)
    for line in sys.stdin:
        told[:1] = b"\0"
        pid = os.fork()
        if pid == 0:
            run_child(json.loads(line), told)
        os.waitpid(pid, os.WUNTRACED)
        print(pid, flush=True)
        status = os.waitpid(pid, 0)[1]
        print(json.dumps([status, json.loads(told[: told.find(b"\0")] or "{}")]), flush=True)


if __name__ == "__main__":
    main()
