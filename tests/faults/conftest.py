"""Figures of the harnesses: what was tried and what was found, printed as JSON lines at the end of the run."""

import os
import tempfile
from collections import Counter, defaultdict
from contextlib import contextmanager
from pathlib import Path

import pytest
from faults.tracing import Worker


class Figures:
    """Counts by harness; ``figures.add("T5", points=1, lost=0)`` adds to them."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)

    def add(self, name: str, **counts: int) -> None:
        """Add to the counts of a harness; a count of 0 is printed too."""
        for what, count in counts.items():
            self._counts[name][what] += count

    def take(self) -> dict[str, dict[str, int]]:
        """Return what was added since the last call."""
        taken, self._counts = self._counts, defaultdict(Counter)
        return {name: dict(counts) for name, counts in taken.items()}


_figures = Figures()


@pytest.fixture(scope="session")
def figures() -> Figures:
    """Where a harness counts."""
    return _figures


@pytest.fixture
def finding(figures):
    """Expect of a block that its harness finds the bug that is planted (T11)."""

    @contextmanager
    def finding(match, error=AssertionError):
        figures.add("T11", planted=1, found=0)
        with pytest.raises(error, match=match):
            yield
        figures.add("T11", found=1)

    return finding


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    """Send the counts along with the report of a test: with several processes, reports alone reach the summary."""
    if call.when == "teardown":
        item.user_properties += [("figures", taken) for taken in [_figures.take()] if taken]


@pytest.fixture(scope="session")
def worker():
    """A process whose children save under strace."""
    worker = Worker()
    yield worker
    worker.close()


def _in_memory(fallback):
    """Yield a directory in memory, where there is one: a kill leaves the same there, and fsync takes no time."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield fallback
        return
    with tempfile.TemporaryDirectory(dir=shared, prefix="recckpt-") as directory:
        yield Path(directory)


@pytest.fixture
def ram(tmp_path):
    """A directory for fast files."""
    yield from _in_memory(tmp_path)


@pytest.fixture(scope="module")
def shared_ram(tmp_path_factory):
    """A directory for fast files of all tests of a module."""
    yield from _in_memory(tmp_path_factory.mktemp("shared"))
