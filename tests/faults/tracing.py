"""Saves in processes of their own, under strace, which kills them, fails their system calls or records them."""

import json
import os
import shutil
import signal
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from faults.crash_worker import NOT_DURABLE, SAVE_FAILED, SAVED
from faults.job import State
from support.warm_python import Piped

STRACE = shutil.which("strace")


@dataclass(frozen=True)
class Save:
    """What a process does.

    Attributes:
        steps: that it saves, one after another.
        branch: of the run.
        restore: what it begins with: ``newest``, ``nothing`` or a step.
        before: the number of the save that strace comes before.
        threads: of the saver.
        background: whether training could go on meanwhile.
        plant: a bug to plant.
        file_limit: bytes that a file may have.
        deltas: whether it saves what has changed.
        live: whether its tables are live ones.
        offers: whether it makes an offer of what it stands on before it saves, which it adopts then.
    """

    steps: tuple[int, ...]
    branch: int = 0
    restore: str | int = "newest"
    before: int = 0
    threads: int = 1
    background: bool = False
    plant: str | None = None
    file_limit: int | None = None
    deltas: bool = False
    live: bool = False
    offers: bool = False

    @property
    def states(self):
        return [State(step, self.branch) for step in self.steps]


@dataclass(frozen=True)
class Outcome:
    """How a process ended."""

    status: int
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def word(self):
        if os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == signal.SIGKILL:
            return "killed"
        words = {SAVED: "saved", SAVE_FAILED: "failed", NOT_DURABLE: "not durable"}
        code = os.WEXITSTATUS(self.status) if os.WIFEXITED(self.status) else None
        assert code in words, f"wait status {self.status}: {self.told}"
        return words[code]


class Worker:
    """The process that forks the children, and the strace that is attached to one of them."""

    def __init__(self):
        if STRACE is None:
            pytest.skip("NO CRASH WAS TESTED: strace is not installed")
        self.process = Piped(Path(__file__).with_name("crash_worker.py"))
        assert self.process.stdout.readline() == "ready\n"

    def run(self, url, max_keep, save, *options):
        """Save in a child, with options of strace, and say how it ended."""
        order = {**asdict(save), "url": str(url), "max_keep": max_keep}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        pid = int(self.process.stdout.readline())
        if options:
            with traced(pid, options) as said:
                outcome = self._end(pid, signal.SIGCONT if "attached" in said else signal.SIGKILL)
            if "attached" not in said:
                pytest.skip(f"NO CRASH WAS TESTED, strace may not attach here: {said}")
            return outcome
        return self._end(pid, signal.SIGCONT)

    def _end(self, pid, how):
        os.kill(pid, how)
        return Outcome(*json.loads(self.process.stdout.readline()))

    def close(self):
        self.process.terminate()  # not by closing stdin: a child forked meanwhile, such as a data worker, has it too
        self.process.wait()


class traced:  # noqa: N801
    """Attach strace to a process until that has ended, which is for the block to see to."""

    def __init__(self, pid, options):
        command = [STRACE, "-f", *options, "-p", str(pid)]
        self._tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def __enter__(self):
        return self._tracer.stderr.readline()

    def __exit__(self, *rest):
        self._tracer.communicate()


def disturbing(inject):
    """Return the options that fail a call or kill at it, such as ``write:signal=KILL:when=3``."""
    return "-o", "/dev/null", "-e", f"trace={inject.partition(':')[0]}", "-e", f"inject={inject}"


def killing(call, k):
    """Return the options that kill at the k-th call."""
    return disturbing(f"{call}:signal=KILL:when={k}")
