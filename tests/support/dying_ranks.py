"""Jobs of real ranks of which one dies in a phase of a save; for test_dying_ranks.py: ``dying_ranks.py ROOT CASES``.

CASES is JSON: a list of {"n_ranks", "victim", "signal", "phase", "background", "timeout_sec"}. What the survivors met
is written to ``ROOT/<number of the case>/survivors.json``, and what they saved to ``ROOT/<number>/runs``.
"""

import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it has much to say of connections that end

import torch
import torch.distributed as dist
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.errors import RecckptError
from recckpt.parallel.process_group import ProcessGroup
from recckpt.policies import Transfers
from recckpt.sparse import HashTable, SparseAdam, gen_slice
from recckpt.storage.local import LocalStorage
from support.rank_processes import whole_life

PHASES = ("staging", "writing", "written", "commit", "committed", "rotation")
N_ROWS = 60
AT_ONCE = 4
HANG = 0  # no signal: the thread that is in the store hangs there, and all others go on
_HANG_SEC = 120.0  # beyond the timeout: what takes longer hangs
_FORK = multiprocessing.get_context("fork")


class Job:
    """One rank of a job whose whole state follows from its step."""

    def __init__(self, url, rank, size, **options):
        self.own = gen_slice(rank, size)
        self.table = HashTable(4, name="t", slice=self.own)
        self.top = nn.Linear(4, 1)
        model = nn.ModuleDict({"t": self.table, "top": self.top})
        self.saver = Saver(model, SparseAdam([self.table]), str(url), **options)

    def set_state(self, step):
        ids = torch.arange(N_ROWS)
        self.table.clear()
        self.table.insert(ids[self.own.owns(ids)], torch.full((int(self.own.owns(ids).sum()), 4), float(step)))
        with torch.no_grad():
            self.top.weight.fill_(step)

    def is_of_step(self, step):
        """Say whether this rank has all of its rows, and every value is that of a step."""
        ids = torch.arange(N_ROWS)
        ids = ids[self.own.owns(ids)]
        found, there = self.table.lookup(ids)
        values = (found == step).all() and (self.top.weight == step).all()
        return bool(there.all()) and len(self.table) == len(ids) and bool(values)


class Lateness:
    """How much later than asked for this process went on after sleeping: what a busy machine adds to a timeout."""

    def __init__(self):
        self.seconds = 0.0
        threading.Thread(target=self._measure, daemon=True).start()

    def _measure(self):
        while True:
            asleep_since = time.monotonic()
            time.sleep(0.02)
            self.seconds += time.monotonic() - asleep_since - 0.02


def survive(case, rank, url, root):
    """Save until that fails, and once more; return what this rank met."""
    job = Job(url, rank, case["n_ranks"], transfers=Transfers(timeout_sec=case["timeout_sec"]))
    manager = CheckpointManager(job.saver, 1, async_save=case["background"])
    acknowledged, handles, late = 0, [], Lateness()
    job.set_state(1)
    manager.step()
    job.saver.settle()
    job.saver.ranks.of(rank, case["n_ranks"]).gather(None)  # all are through with step 1, rotation included
    if rank == case["victim"]:
        die_in(case["phase"], rank, lambda: die(case["signal"], root))
    for step in range(2, 6):
        job.set_state(step)
        try:
            manager.step()
            handles.append((step, job.saver._runner._worker.task))
        except RecckptError as error:
            first = told(error, late)
            break
    for step, handle in handles:
        if handle is None or (handle.done() and handle.committed.exception() is None):
            acknowledged = step
    begin = time.monotonic()
    try:
        job.saver.save("ckpt_9")
    except RecckptError as error:
        return {"rank": rank, "first": first, "acknowledged": acknowledged, "again": told(error, late, begin)}


def told(error, late, begin=0.0):
    """Return what an error says, and when."""
    lost = getattr(error.__cause__, "ranks", ())
    kind, rank, step = type(error).__name__, getattr(error, "rank", None), getattr(error, "step", None)
    return {
        "kind": kind,
        "rank": rank,
        "step": step,
        "lost": lost,
        "text": str(error),
        "time": time.monotonic() - begin - late.seconds,
    }


def die(number, root):
    (root / "died").write_text(str(time.monotonic()))
    if number == HANG:
        threading.Event().wait()
    signal.raise_signal(number)  # this thread: a stop of the process may reach it after what is to be left undone


def die_in(phase, rank, die):
    """Let this process die when it comes to a phase."""
    from recckpt.output_dir import rotation
    from recckpt.save import propose, save

    def before(owner, name, when=lambda *args: True):
        real = getattr(owner, name)

        def dying(*args, **kwargs):
            if when(*args):
                die()
            return real(*args, **kwargs)

        setattr(owner, name, dying)

    def after(owner, name, when=lambda *args: True):
        real = getattr(owner, name)

        def dying(*args, **kwargs):
            result = real(*args, **kwargs)
            if when(*args):
                die()
            return result

        setattr(owner, name, dying)

    calls = []
    if phase == "staging":
        before(propose, "stage")
    elif phase == "writing":
        before(LocalStorage, "create", lambda storage, name: name.endswith(".arrow"))
    elif phase == "written":
        after(save, "write")
    elif phase == "commit" and rank == 0:
        before(save, "commit")
    elif phase == "commit":  # while rank 0 commits: the answers before are the plan, and where to write
        before(ProcessGroup, "broadcast", lambda *args: calls.append(args) or len(calls) == 3)
    elif phase == "committed":
        after(save, "commit")
    elif rank == 0:
        after(rotation, "remove")
    else:  # while rank 0 rotates
        after(ProcessGroup, "broadcast", lambda *args: calls.append(args) or len(calls) == 3)


class Running:
    """A case that has begun: its ranks are processes."""

    def __init__(self, case, root):
        self.case, self.root = case, root
        root.mkdir()
        inbox, sender = _FORK.Pipe(duplex=False)
        self._ranks = [_FORK.Process(target=be_rank, args=(case, 0, 0, root, sender))]
        self._ranks[0].start()
        port = inbox.recv()
        for rank in range(1, case["n_ranks"]):
            self._ranks.append(_FORK.Process(target=be_rank, args=(case, rank, port, root, sender)))
            self._ranks[-1].start()

    def end(self):
        """Wait for the survivors, end all, and write down what became of them."""
        victim = self._ranks[self.case["victim"]]
        survivors = [process for process in self._ranks if process is not victim]
        deadline = time.monotonic() + self.case["timeout_sec"] + _HANG_SEC
        for process in survivors:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [process.pid for process in survivors if process.is_alive()]
        self.kill()
        met = [json.loads(path.read_text()) for path in sorted(self.root.glob("met-*.json"))]
        died = float((self.root / "died").read_text())
        (self.root / "survivors.json").write_text(json.dumps({"hung": hung, "met": met, "died": died}))

    def kill(self):
        """End all ranks, those too that were stopped."""
        for process in self._ranks:
            process.kill()
            process.join()


def be_rank(case, rank, port, root, sender):
    """Be a rank; never returns."""
    with whole_life():
        logging.disable(logging.CRITICAL)
        timeout, is_host = timedelta(seconds=60), rank == 0
        store = dist.TCPStore("127.0.0.1", port, case["n_ranks"], is_host, timeout=timeout, wait_for_workers=False)
        if is_host:
            sender.send(store.port)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=case["n_ranks"], timeout=timeout)
        (root / f"met-{rank}.json").write_text(json.dumps(survive(case, rank, root / "runs", root)))


def main():
    torch.set_num_threads(1)
    root, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for first in range(0, len(cases), AT_ONCE):
        running = []
        try:
            for number, case in enumerate(cases[first : first + AT_ONCE], start=first):
                running.append(Running(case, root / str(number)))
            for one in running:
                one.end()
        finally:
            for one in running:
                one.kill()


if __name__ == "__main__":
    main()
