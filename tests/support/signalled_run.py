"""A process that forks runs which are sent signals; driven by test_signals.py and the sweep in tests/faults.

One JSON line in is one run, of one rank or two: ``{"scene": ..., "url": ..., "ranks": ..., ...}``. The wait statuses of
its ranks come back. What a rank says goes to ``<url>.said.<rank>``, a line each, as it is said.
"""

import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import torch
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.policies import OnSignal
from recckpt.policies.when import EveryEventTime
from recckpt.sparse import HashTable, SparseAdagrad, gen_slice
from recckpt.storage.local import LocalStorage
from support.warm_python import Piped

N_ROWS = 50


class Job:
    """A run whose whole state follows from its step."""

    def __init__(self, url, interval=10**9, rank=0, ranks=1, **options):
        self.own = gen_slice(rank, ranks)
        self.table = HashTable(4, name="t", slice=self.own)
        self.top = nn.Linear(4, 1).requires_grad_(False)  # written by hand: no optimizer trains it
        model = nn.ModuleDict({"t": self.table, "top": self.top})
        self.saver = Saver(model, SparseAdagrad([self.table]), url, max_keep=2)
        self.manager = CheckpointManager(self.saver, interval, shard_id=rank, shard_num=ranks, **options)
        self.set_state(0)

    def train(self, n_steps, signals=None):
        """Train, and send this process the signals of a step while it goes on: step -> numbers."""
        for _ in range(n_steps):
            step = self.manager.global_step + 1
            self.set_state(step)
            for number in (signals or {}).get(step, ()):
                os.kill(os.getpid(), number)
            self.manager.step()

    def set_state(self, step):
        ids = torch.arange(step, step + N_ROWS)
        ids = ids[self.own.owns(ids)]
        values = torch.full((len(ids), 4), float(step))
        self.table.clear()
        self.table.insert(ids, values, {"sparse_adagrad_sum": values + 1})
        with torch.no_grad():
            self.top.weight.fill_(step)

    def is_of_step(self, step):
        """Say whether every bit is that of a step, on a job of one rank."""
        found, _ = self.table.lookup(torch.arange(step, step + N_ROWS))
        return (
            len(self.table) == N_ROWS
            and bool((found == step).all())
            and bool((self.table.slots["sparse_adagrad_sum"] == step + 1).all())
            and bool((self.top.weight == step).all())
        )


class Runs:
    """The other end: a process of this file, and what became of its runs."""

    def __init__(self):
        self._process = Piped(__file__)
        assert self._process.stdout.readline() == "ready\n"

    def run(self, scene, url, ranks=1, **options):
        """Return the exit code of each rank, negative for a signal, and what each has said."""
        print(json.dumps({"scene": scene, "url": str(url), "ranks": ranks, **options}), file=self._process.stdin)
        self._process.stdin.flush()
        statuses = json.loads(self._process.stdout.readline())
        said = [Path(f"{url}.said.{rank}").read_text().splitlines() for rank in range(ranks)]
        return [os.waitstatus_to_exitcode(status) for status in statuses], said

    def stop(self):
        self._process.terminate()  # not by closing stdin: a child forked meanwhile, such as a data worker, has it too
        self._process.wait(60)


# scenes, each in a process of its own


def sigterm(job, rank, say):
    job.train(5, {3: [signal.SIGTERM]})
    say("still here")


def sigusr1(job, rank, say):
    job.train(5, {3: [signal.SIGUSR1]})
    say(f"step {job.manager.global_step}")
    job.manager.close()


def both_signals(job, rank, say):
    job.train(5, {3: [signal.SIGTERM, signal.SIGUSR1]})
    say("still here")


def more_signals_during_the_commit(job, rank, say):
    put = LocalStorage.put_if_absent

    def noisy(self, name, data):
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        say(f"signals before {name.rpartition('/')[2]}")
        put(self, name, data)

    job.train(1, {1: [signal.SIGUSR1]})
    LocalStorage.put_if_absent = noisy
    job.train(5, {3: [signal.SIGTERM]})
    say("still here")


def storage_that_hangs(job, rank, say):
    job.train(1, {1: [signal.SIGUSR1]})
    LocalStorage.create = hang
    job.train(5, {3: [signal.SIGTERM]})
    say("still here")


def save_before_that_hangs(job, rank, say):
    job.train(1, {1: [signal.SIGUSR1]})
    job.manager.saver.settle()
    LocalStorage.create = hang
    job.train(1)
    job.saver.save_async("hangs")
    job.train(5, {3: [signal.SIGTERM]})
    say("still here")


def save_that_fails(job, rank, say):
    job.train(1, {1: [signal.SIGUSR1]})
    LocalStorage.create = fail
    job.train(5, {3: [signal.SIGTERM]})
    say("still here")


def signal_after_the_last_step(job, rank, say):
    with job.manager:
        job.train(2)
        os.kill(os.getpid(), signal.SIGTERM)
        say("the block ends")
    say("still here")


def signal_to_rank_1(job, rank, say):
    job.train(5, {3: [signal.SIGTERM]} if rank == 1 else {})
    say("still here")


def other_signals_to_each_rank(job, rank, say):
    job.train(5, {3: [signal.SIGUSR1 if rank == 0 else signal.SIGTERM]})
    say("still here")


def save_before_that_failed(job, rank, say):
    create, LocalStorage.create = LocalStorage.create, fail
    job.train(2)
    job.saver._runner._worker.wait()  # several ranks are told when they save the next time
    LocalStorage.create = create
    job.train(5, {3: [signal.SIGTERM]} if rank == 1 else {})
    say("still here")


def event_times_that_differ(job, rank, say):
    manager = CheckpointManager(job.saver, EveryEventTime(3600), shard_id=rank, shard_num=2)
    for times in [(10, 10), (3500, 3601), (3599, 3602), (3610, 3603), (7300, 3604), (7400, 7300)]:
        manager.step(event_time=times[rank])
    say(f"{manager.counts.begun} saves")
    manager.restore()
    say(f"{manager._run.event_time}")


def at_any_moment(job, rank, say, event=None):
    """Train, save in the background, and get a SIGTERM at a certain call or return of any function, on any thread."""
    n_events = iter(range(1 << 62))

    def count(frame, kind, argument):
        if next(n_events) == event:
            # Not to any thread: one that is profiled spins in CPython 3.11 until the main thread has taken the signal,
            # which it does not do while it waits for that very thread.
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)

    threading.setprofile(count)
    sys.setprofile(count)
    with job.manager:
        job.train(12)
        say(f"{next(n_events)} events of training")
    sys.setprofile(None)
    say(f"{next(n_events)} events")


# what they do


def hang(*args):
    threading.Event().wait()


def fail(*args):
    raise OSError(5, "broken")


def be_rank(rank, scene, url, ranks, options, job):
    torch.set_num_threads(1)  # for a fork, before gloo has threads: see whole_life() in rank_processes.py
    said = os.open(f"{url}.said.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def say(text):
        os.write(said, f"{text}\n".encode())

    class Heard(logging.Handler):
        def emit(self, record):
            if record.levelno >= logging.WARNING:
                say(record.getMessage())

    logging.getLogger("recckpt").addHandler(Heard())
    if ranks > 1:
        method = f"file://{url}.rendezvous"
        torch.distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=ranks)
    on_signal = OnSignal(SIGNALS, grace_sec=job.pop("grace_sec", None))
    globals()[scene](Job(url, rank=rank, ranks=ranks, save_on_signal=on_signal, **job), rank, say, **options)


SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def main():
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        order = {"options": {}, "job": {}, **json.loads(line)}
        pids = []
        for rank in range(order["ranks"]):
            pids.append(os.fork())
            if pids[-1] == 0:
                try:
                    be_rank(rank, **order)
                    os._exit(0)
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                finally:
                    os._exit(1)
        print(json.dumps([os.waitpid(pid, 0)[1] for pid in pids]), flush=True)


if __name__ == "__main__":
    main()
