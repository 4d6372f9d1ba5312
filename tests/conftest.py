"""Fixtures that any test may ask for."""

import atexit
import functools
import gc
import inspect
import json
import logging
import signal
import sys
import threading
import zlib
from collections import Counter, defaultdict
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from servers.process import ServerProcess
from support import disks, warm_python
from support.gate import Gate
from support.sweeps import mark_slow

pytest_plugins = ["support.entered", "support.forked_workers", "support.watchdog"]
_UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # a shared machine may be slow
settings.register_profile("anew", **_UNTIMED)  # by --hypothesis-profile
settings.register_profile("same", **_UNTIMED, derandomize=True)  # what fails, fails for what was changed
settings.load_profile("same")
disks.leave_to_the_kernel()
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as of what a shell has started in the background, such as CI
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the processes of tests would inherit
_numbers = count()
_n_modules = [0]  # that were imported when garbage was last looked for in all of them


def pytest_addoption(parser):
    """Take which part of the tests is to run."""
    parser.addoption("--part", metavar="K/N", help="run the tests whose names fall into part K, from 0, of N")


def pytest_collection_modifyitems(config, items):
    """Leave out what falls into other parts."""
    if config.option.part:
        number, n_parts = map(int, config.option.part.split("/"))
        others = [item for item in items if zlib.crc32(item.nodeid.encode()) % n_parts != number]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % n_parts == number]


def pytest_configure(config):
    """Start the interpreter that all workers share: it is warm by the time the tests are collected."""
    if config.option.workers and not config.option.collectonly:
        warm_python.start()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Look for no garbage while modules are imported and tests are made, all of which stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector, obj):
    """Make no items of a slow test that the default suite would only deselect: a third of the time to collect it.

    Where a test is named on the command line it is made, and pytest says that it was deselected.
    """
    config = collector.config
    if config.option.markexpr == "not slow" and not any("::" in arg for arg in config.args):
        own_marks = getattr(obj, "pytestmark", [])
        if inspect.isfunction(obj) and any(mark.name == "slow" for mark in own_marks):
            return []
    return None


def pytest_itemcollected(item):
    """Leave to the slow suite what a test says that it need not try by default."""
    mark_slow(item)


def pytest_collection_finish():
    """Make ready a process that runs tests; the one that hands them out does not come here, and imports no torch.

    The tensors of tests are tiny: threads that wait for each other would cost the most. Each collection of garbage is
    spared the way through all that was imported, which takes a quarter of a second. Nor is garbage looked for in it
    now: what imports leave needs no end of its own, and the look would take as long as a hundred tests.
    """
    import torch

    from recckpt.cli import app

    torch.set_num_threads(1)
    app.parsers = functools.cache(app.parsers)  # 70 % of what most commands take that are run in this process
    gc.set_threshold(10_000)  # of 700 by default, which takes 6 % of the time
    _let_loggers_propagate()
    _freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """After a file, spare them what it has imported, such as the compiler of torch, which optimizers import."""
    yield
    if (nextitem is None or nextitem.path != item.path) and len(sys.modules) > _n_modules[0] + 100:
        gc.collect()
        _freeze()


def _let_loggers_propagate():
    """Let pytest catch at the root what libraries log.

    Else it adds two handlers to each of the 40 loggers of torch, and removes them, three times a test.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


def _freeze():
    gc.freeze()
    _n_modules[:] = [len(sys.modules)]


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure(config):
    """Look for garbage in all once: pytest looks twice more, which took so long that pytest-xdist killed the worker.

    The end of the interpreter collects all again: libraries report what is left over there. Where workers ran
    the tests, there is nothing to find here.
    """
    if config.option.workers and not hasattr(config, "workerinput"):
        return
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


@pytest.fixture
def memory_url():
    """A URL of an empty object store in memory."""
    from fsspec.implementations.memory import MemoryFileSystem

    url = f"memory://bucket-{next(_numbers)}/runs"
    yield url
    root = "/" + url.removeprefix("memory://").partition("/")[0]
    for name in [name for name in MemoryFileSystem.store if name.startswith(f"{root}/")]:
        del MemoryFileSystem.store[name]
    MemoryFileSystem.pseudo_dirs[:] = [name for name in MemoryFileSystem.pseudo_dirs if not name.startswith(root)]


@pytest.fixture(scope="session")
def s3_options():
    """How fsspec reaches a server that speaks S3: moto's, in a process of its own."""
    from aiobotocore.session import AioSession

    server = ServerProcess([sys.executable, Path(__file__).parent / "servers" / "moto_s3.py"], r"on port (\d+)")
    reach = {"endpoint_url": f"http://127.0.0.1:{server.said[1]}", "key": "tests", "secret": "tests"}
    yield {**reach, "session": AioSession()}  # one for all, since each reads 5 MB of JSON
    server.stop()


@pytest.fixture(scope="session")
def s3_buckets(s3_options):
    """Makes buckets."""
    import fsspec

    return fsspec.filesystem("s3", skip_instance_cache=True, **s3_options)


@pytest.fixture
def s3_url(s3_options, s3_buckets, monkeypatch):
    """A URL of an empty prefix in a bucket of its own."""
    from fsspec.config import conf

    monkeypatch.setitem(conf, "s3", s3_options)
    bucket = f"bucket-{next(_numbers)}"
    s3_buckets.mkdir(bucket)
    return f"s3://{bucket}/runs"


@pytest.fixture(params=["local", "memory"])
def url(request, tmp_path):
    """An output dir on each kind of storage."""
    return str(tmp_path / "runs") if request.param == "local" else request.getfixturevalue("memory_url")


@pytest.fixture
def storage(url):
    """An empty output dir on each kind of storage, opened."""
    return _opened(url)


@pytest.fixture
def local(tmp_path):
    """An empty output dir on the disk, opened."""
    return _opened(str(tmp_path / "runs"))


def _opened(url):
    from recckpt.storage import open_storage

    storage = open_storage(url)
    storage.prepare()
    return storage


@pytest.fixture
def interrupted():
    """Give a block that is interrupted, as by control-C, once it waits for a thread and ``ready`` says yes."""
    from recckpt.parallel import threads

    @contextmanager
    def block(ready=lambda: True):
        def interrupt(number, frame):
            if frame.f_code.co_filename in (threading.__file__, threads.__file__) and ready():
                signal.setitimer(signal.ITIMER_REAL, 0)
                raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        try:
            with pytest.raises(KeyboardInterrupt):
                yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    return block


@pytest.fixture
def gate(monkeypatch):
    """Make gates, all of which are open at the end."""
    gates = []

    def make(owner, method, error=None):
        gates.append(Gate(monkeypatch, owner, method, error))
        return gates[-1]

    yield make
    for made in gates:
        made.open()


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
