"""Hooks for checkpointers, in a module of their own so that the writer process can import them."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

from recckpt.checkpointer import WriterHook


def note(directory, what):
    """Leave a line that the test can read, whichever process this is."""
    with Path(directory, "notes").open("a") as file:
        file.write(json.dumps(what) + "\n")


def names(directory):
    return sorted(file.name for file in Path(directory).iterdir())


def notes(directory):
    path = directory / "notes"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Noting(WriterHook):
    """Notes what it is called with, and what is on disk then."""

    def __init__(self, directory):
        self.directory = str(directory)

    def pre_commit(self, path, **kwargs):
        note(self.directory, ["pre", path, names(path), kwargs])

    def post_commit(self, path, **kwargs):
        note(self.directory, ["post", path, names(path), kwargs])


class Failing(WriterHook):
    """Raises where it is told to."""

    def pre_commit(self, path, fail="", **kwargs):
        if fail == "pre":
            raise LookupError("not today")
        if fail == "unpicklable":
            raise type("LocalError", (Exception,), {})("from nowhere")

    def post_commit(self, path, fail="", **kwargs):
        if fail == "post":
            raise LookupError("not today")


class Pausing(WriterHook):
    """Waits at a pipe before the commit, where ``pause`` is its name, until the test writes to it or ends."""

    def pre_commit(self, path, pause=None, **kwargs):
        if pause:
            with Path(f"{pause}.begun").open("w") as begun:
                begun.write(str(os.getpid()))
            with Path(f"{pause}.go").open() as go:
                go.read()

    def post_commit(self, path, die=False, **kwargs):
        if die:
            os.kill(os.getpid(), signal.SIGKILL)


class Reporting(WriterHook):
    """Notes what the process it runs in is like."""

    def __init__(self, directory):
        self.directory = str(directory)

    def pre_commit(self, path, **kwargs):
        links = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
        note(
            self.directory,
            {
                "modules": sorted(sys.modules),
                "links": links,
                "ignores": [signal.getsignal(n) == signal.SIG_IGN for n in (signal.SIGINT, signal.SIGTERM)],
                "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
                "session": os.getsid(0) == os.getpid(),
                "threads": threading.active_count(),
            },
        )

    def post_commit(self, path, **kwargs):
        pass


def set_up(directory, word):
    note(directory, ["set up", word])


def linger():
    """Start a thread that keeps the process from ending."""
    threading.Thread(target=threading.Event().wait).start()


def fail_to_set_up(flag):
    """Fail while there is no such file."""
    if not Path(flag).exists():
        raise LookupError("no flag")
