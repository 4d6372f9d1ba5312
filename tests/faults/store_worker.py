"""A process that forks children which save to a store, and stop themselves before it, for the tests of deaths.

One JSON line in is one child: its pid comes back once it has stopped itself, and its wait status once it is gone.
"""

import json
import os
import signal
import sys
import traceback

import torch
from aiobotocore.session import AioSession
from faults import plants
from faults.job import Job
from fsspec.config import conf

from recckpt.storage import upload


class LargeJob(Job):
    """A run whose dense state goes up in two parts."""

    def __init__(self, url, max_keep):
        super().__init__(url, max_keep)
        self.saver.register_for_checkpointing("large", torch.nn.Linear(1, 1_500_000, bias=False))


JOBS = {"small": Job, "large": LargeJob}


def save_in_child(session, job, url, max_keep, restore_step, options, from_start, plant=None):
    if plant is not None:
        plants.plant(plant)
    conf["s3"] = {**options, "session": session}
    upload.BLOCK_BYTES = 5 << 20  # the least that S3 takes
    if from_start:
        os.kill(os.getpid(), signal.SIGSTOP)
    run = JOBS[job](url, max_keep)
    run.manager.restore(restore_step)
    run.advance()
    if not from_start:
        os.kill(os.getpid(), signal.SIGSTOP)
    run.manager.save()


def main():
    torch.set_num_threads(1)
    session = AioSession()
    loader = session.get_component("data_loader")
    for name in ("service-2", "endpoint-rule-set-1"):
        loader.load_service_model("s3", name)
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                save_in_child(session, **json.loads(line))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.waitpid(pid, os.WUNTRACED)
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


if __name__ == "__main__":
    main()
