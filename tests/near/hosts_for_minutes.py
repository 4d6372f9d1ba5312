"""Hosts that die, go away, come back with old disks or hang, for as long as one likes; each restart is compared.

``make test-hosts MINUTES=20`` prints a JSON line a life, and one at the end. A life is a job on all hosts, in which
something happens after some steps; then its processes are killed, and the next begins. What is restored has to be, bit
for bit, what one process without saves has at that step, and no older than the newest near save that was acknowledged,
while a copy of each of its files is left, else than the newest checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from support.near_hosts import Life, Training

MOST_NEAR_DIRS, MOST_CHECKPOINTS = 3, 12  # on a host; in the output dir, links that others stand on included
EVENTS = [
    "all die",
    "one rank dies",
    "a host is lost",
    "a host comes back with old files",
    "a host hangs",
    "two are lost",
]


class Oracle:
    """What one process without saves has at each step; steps are made as they are asked for."""

    def __init__(self) -> None:
        self._training, self._known = Training(0, 1), dict[int, tuple[int, int]]()
        self._step = -1
        self._advance()

    def _advance(self) -> None:
        self._step += 1
        if self._step:
            self._training.step(self._step)
        self._known[self._step] = self._training.digest(), self._training.dense_digest()

    def at(self, step: int) -> tuple[int, int]:
        """Return the numbers of the rows and of the tower after a step."""
        while self._step < step:
            self._advance()
        return self._known[step]


class Run:
    """The lives of one run, and what is known to be safe."""

    def __init__(self, root: Path, n_hosts: int, ranks: int, copies: int, seed: int) -> None:
        self.root, self.ranks, self.copies, self.random = root, ranks, copies, random.Random(seed)
        self.hosts = [f"host{number}" for number in range(n_hosts)]
        self.oracle, self.counts = Oracle(), Counter[str]()
        self.near_step = self.saved_step = 0  # acknowledged, and restored if no more than one host is lost; if all are
        self.number = self.n_lost = self.reached = 0
        self.steps_lost: list[int] = []  # at each restart with a copy of all that was acknowledged
        (root / "hosts").mkdir()

    def live(self) -> dict[str, object]:
        """Begin a life, look at what it restores, let something happen in it, and end it."""
        life = Life(self.root, self.number, self.hosts, self.ranks, self.copies)
        self.number += 1
        try:
            life.wait_for_step(0)
            restored = self.check(life)
            event = self.random.choice(EVENTS)
            life.wait_for_step(self.random.randint(1, 120))
            self.happen(event, life)
        finally:
            life.end()
        lost = self.note(life, event)
        self.look_for_growth()
        return {"life": self.number, "restored": restored, "event": event, "hosts": len(self.hosts), **lost}

    def check(self, life: Life) -> int:
        """Compare what all ranks have restored with what one process has."""
        first = [life.log(rank)[:1] for rank in range(life.size)]
        until = time.monotonic() + 60
        while not all(first):
            assert life.is_alive(), f"life {self.number}: processes ended before they had restored"
            assert time.monotonic() < until
            time.sleep(0.02)
            first = [life.log(rank)[:1] for rank in range(life.size)]
        lines = [line for [line] in first]
        [step] = {line["restored"] for line in lines}
        rows, dense = self.oracle.at(step)
        assert sum(line["rows"] for line in lines) % 2**64 == rows, f"life {self.number}: other rows at step {step}"
        assert {line["dense"] for line in lines} == {dense}, f"life {self.number}: another tower at step {step}"
        assert step >= self.near_step, f"life {self.number}: step {step} came back, {self.near_step} was acknowledged"
        self.near_step = step
        if self.n_lost <= self.copies:
            self.steps_lost.append(self.reached - step)
        return step

    def happen(self, event: str, life: Life) -> None:
        """Let something happen to the processes."""
        if event == "one rank dies" and life.pids:
            os.kill(self.random.choice(list(life.pids)), signal.SIGKILL)
            time.sleep(self.random.uniform(0, 0.2))
        elif event == "a host hangs":
            host = self.random.choice(self.hosts)
            life.signal(signal.SIGSTOP, host)
            time.sleep(self.random.uniform(0, 6))
            life.signal(signal.SIGCONT, host)
            time.sleep(self.random.uniform(0, 0.5))

    def note(self, life: Life, event: str) -> dict[str, object]:
        """Note what was acknowledged, and let hosts be lost that the event says."""
        lines = life.log(0)[1:]
        acknowledged = [line["near"] for line in lines if line["near"]]
        self.near_step = max([self.near_step, *acknowledged])
        self.n_lost = 0 if acknowledged else self.n_lost
        saved = [line["step"] for line in lines if line["saved"]]
        self.saved_step = max([self.saved_step, *saved])
        self.near_step = max(self.near_step, self.saved_step)
        self.counts.update(
            {event: 1}, near=sum(bool(line["near"]) for line in lines), saved=len(saved), steps=len(lines)
        )
        if lines:
            assert lines[-1]["fds"] <= lines[0]["fds"] + 40, "descriptors grow"
        self.reached = lines[-1]["step"] if lines else self.near_step
        self.damage(event)
        return {"steps": len(lines), "reached": self.reached, "near": self.near_step, "saved": self.saved_step}

    def damage(self, event: str) -> None:
        """Take the disks of hosts away, or put old ones in their place."""
        root, n_lost = self.root / "hosts", {"a host is lost": 1, "two are lost": 2}.get(event, 0)
        for host in self.random.sample(self.hosts, min(n_lost, len(self.hosts))):
            shutil.rmtree(root / host, ignore_errors=True)
        old = self.root / "old"
        if event == "a host comes back with old files" and old.is_dir():
            host, n_lost = old.joinpath("host").read_text(), 1
            shutil.rmtree(root / host, ignore_errors=True)
            shutil.copytree(old / "files", root / host)
        elif self.random.random() < 0.3:
            host = self.random.choice([path.name for path in root.iterdir()] or [""])
            shutil.rmtree(old, ignore_errors=True)
            if host:
                shutil.copytree(root / host, old / "files")
                old.joinpath("host").write_text(host)
        self.n_lost += n_lost  # since the last near save of which each host had its part
        if self.n_lost > self.copies:
            self.near_step = self.saved_step

    def look_for_growth(self) -> None:
        """Compare what lies there with what may."""
        for host in (self.root / "hosts").iterdir():
            n_near = len(list(host.rglob("near.json")))
            assert n_near <= MOST_NEAR_DIRS, f"{host.name}: {n_near} near saves"
        n_checkpoints = len(list((self.root / "runs").glob("*/manifest.json")))
        assert n_checkpoints <= MOST_CHECKPOINTS, f"{n_checkpoints} checkpoints"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2, help="of a host")
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lives", type=int, default=1, help="at least so many, however long they take")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        run = Run(Path(directory), args.hosts, args.ranks, args.copies, args.seed)
        end = time.monotonic() + 60 * args.minutes
        while time.monotonic() < end or run.number < args.lives:
            print(json.dumps(run.live()), flush=True)
        lost = {"most_steps_lost": max(run.steps_lost), "median_steps_lost": statistics.median(run.steps_lost)}
        print(json.dumps({"lives": run.number, "wrong": 0, "lost": 0, **lost, **run.counts}), flush=True)


if __name__ == "__main__":
    main()
