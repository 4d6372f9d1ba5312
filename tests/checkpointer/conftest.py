"""Checkpointers of both kinds, closed when the test ends."""

import os
from pathlib import Path

import pytest

from recckpt.checkpointer import make_async_checkpointer, make_sync_checkpointer

MAKERS = {"sync": make_sync_checkpointer, "async": make_async_checkpointer}


class Pipe:
    """Two named pipes at which a hook of the writer process and the test wait for each other."""

    def __init__(self, path):
        self.name = str(path)
        os.mkfifo(f"{path}.begun")
        os.mkfifo(f"{path}.go")

    def wait(self):
        """Wait until the hook is there, and return the process that it runs in."""
        with Path(f"{self.name}.begun").open() as begun:
            return int(begun.read())

    def go(self):
        with Path(f"{self.name}.go").open("w"):
            pass

    def release(self):
        """Let go whoever waits, when a test has failed."""
        for end in ("begun", "go"):
            os.close(os.open(f"{self.name}.{end}", os.O_RDWR | os.O_NONBLOCK))


@pytest.fixture
def make():
    """Make a checkpointer of a kind."""
    made = []

    def make(kind="async", **options):
        made.append(MAKERS[kind](**options))
        return made[-1]

    make.made = made
    yield make
    for checkpointer in made:
        checkpointer.close()


@pytest.fixture
def pipe(make, tmp_path):
    pipe = Pipe(tmp_path / "pipe")
    yield pipe
    pipe.release()


@pytest.fixture(params=MAKERS)
def kind(request):
    return request.param
