"""Fixtures that any test may ask for."""

import json
from collections import Counter, defaultdict
from itertools import count

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import settings

torch.set_num_threads(1)  # the tests' tensors are tiny: threads that wait for each other would cost the most
settings.register_profile("untimed", deadline=None)  # machines are shared: a slow example is no failure
settings.load_profile("untimed")
_numbers = count()


@pytest.fixture
def memory_url():
    """A URL of an empty object store in memory."""
    url = f"memory://bucket-{next(_numbers)}/runs"
    yield url
    root = "/" + url.removeprefix("memory://").partition("/")[0]
    for name in [name for name in MemoryFileSystem.store if name.startswith(f"{root}/")]:
        del MemoryFileSystem.store[name]
    MemoryFileSystem.pseudo_dirs[:] = [name for name in MemoryFileSystem.pseudo_dirs if not name.startswith(root)]


@pytest.fixture(params=["local", "memory"])
def url(request, tmp_path):
    """An output dir on each kind of storage."""
    return str(tmp_path / "runs") if request.param == "local" else request.getfixturevalue("memory_url")


def pytest_terminal_summary(terminalreporter):
    """Print the figures of tests/faults, one JSON line a harness."""
    sums = defaultdict(Counter)
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if getattr(report, "when", None) == "teardown":
            for figures in (value for key, value in report.user_properties if key == "figures"):
                for name, counts in figures.items():
                    sums[name].update(counts)
    for name in sorted(sums):
        terminalreporter.write_line(json.dumps({"figures": name, **sums[name]}))
