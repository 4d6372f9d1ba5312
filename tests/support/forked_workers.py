"""Runs the tests in forks of the process that has collected them: ``pytest --workers=2``, as ``make test`` does.

Each worker of pytest-xdist imports and collects everything anew, and its reports are slow to encode: 40 seconds of
processor in a run of the default suite. These workers begin with all that was imported, and take one file after
another from a pipe.
"""

import itertools
import mmap
import multiprocessing
import os
import select
import signal
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import pytest
from _pytest.tmpdir import TempPathFactory

_N_BYTES = 4  # of the number of a file in the pipe
_STARTERS = {
    *("servers.process", "support.rank_processes", "support.two_ranks", "support.warm_python"),
    *("faults.storage_faults", "faults.store_scene", "faults.tracing"),  # slow ones, of sweeps
    *("near.test_ranks", "support.forked", "support.killed"),
}
_LONGEST = 600  # seconds that one test may take; one that hangs is to be named, and the others to go on
_TESTS_A_STARTER = 200  # files that start processes take longer than their number of tests says


def pytest_addoption(parser):
    """Take how many forks are to run the tests."""
    parser.addoption("--workers", metavar="N", type=int, default=0, help="run the tests in N forks, a file at a time")


def pytest_configure(config):
    """Have them run the tests."""
    if config.option.workers > 0 and not config.option.collectonly:
        config.pluginmanager.register(_Foreman())


@dataclass
class _Worker:
    """What the foreman knows of a worker."""

    pid: int
    said: Connection
    at: int | None = None  # the number of the test that runs
    since: float = field(default_factory=time.monotonic)  # when it said so
    has_failed: bool = False


class _Foreman:
    """Hands out files, and reports what the workers say as if their tests ran here."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        """Run all tests."""
        if session.testsfailed:
            return None  # those are errors of collecting, which pytest reports
        self._session, self._names, self._workers = session, itertools.count(), {}
        self._files = longest_first(session.items)
        self._queue, numbers = os.pipe()
        os.write(numbers, b"".join(number.to_bytes(_N_BYTES, "little") for number in range(len(self._files))))
        os.close(numbers)
        self._stop = mmap.mmap(-1, 1)  # shared: 1 says that all are to stop
        try:
            for _ in range(min(session.config.option.workers, len(self._files))):
                self._fork([])
            while self._workers:
                self._hear()
        finally:
            for worker in self._workers.values():  # this process was interrupted
                os.kill(worker.pid, signal.SIGKILL)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def _fork(self, first):
        """Start a worker, which begins with the tests ``first``."""
        config = self._session.config
        capture, terminal = (config.pluginmanager.getplugin(name) for name in ("capturemanager", "terminalreporter"))
        root = config._tmp_path_factory.getbasetemp() / f"worker-{next(self._names)}"
        capture.read_global_capture()  # or the worker would write it once more, and what is not flushed
        terminal.flush()
        ours, theirs = multiprocessing.Pipe(duplex=False)
        if pid := os.fork():
            theirs.close()
            self._workers[os.pidfd_open(pid)] = _Worker(pid, ours)
            return
        self._workers, self._session.testsfailed = {}, 0
        capture.stop_global_capturing()  # the files that it writes to are not to be shared
        capture.start_global_capturing()
        config.pluginmanager.unregister(terminal)
        config.workerinput = {"workerid": root.name}  # plugins look for it to know that another process reports
        config._tmp_path_factory._exit_stack.pop_all()  # the foreman removes the directories of earlier runs
        config.option.basetemp = root
        config._tmp_path_factory = TempPathFactory.from_config(config, _ispytest=True)
        config.pluginmanager.register(work := _Work(self._session, theirs, self._stop))
        work.warnings.clear()  # pytest tells a new plugin of those before, which the foreman has reported
        work.do(first)
        for number in iter(lambda: os.read(self._queue, _N_BYTES), b""):
            work.do(self._files[int.from_bytes(number, "little")])
        pytest.exit("no test is left", returncode=int(self._session.testsfailed > 0))

    def _hear(self):
        """Wait until workers say something, or end, and report it."""
        files = [*self._workers, *(worker.said for worker in self._workers.values())]
        ready, _, _ = select.select(files, [], [], _LONGEST / 10)
        for worker in self._workers.values():
            if worker.at is not None and time.monotonic() - worker.since > _LONGEST:
                os.kill(worker.pid, signal.SIGABRT)  # which prints where each of its threads is
        for over, worker in list(self._workers.items()):
            with suppress(EOFError):
                while worker.said.poll():
                    self._report(worker, *worker.said.recv())
            if over in ready:
                self._bury(over, worker)

    def _report(self, worker, reports, warned, at):
        hook = self._session.config.hook
        for arguments in warned:
            hook.pytest_warning_recorded.call_historic(kwargs=arguments)
        for report in reports:
            hook.pytest_runtest_logreport(report=report)
            worker.has_failed |= report.failed
        worker.at, worker.since = at, time.monotonic()
        self._stop[0] |= bool(self._session.shouldfail or self._session.shouldstop)

    def _bury(self, over, worker):
        """See how a worker has ended; another goes on with the file in which it died."""
        del self._workers[over]
        os.close(over)
        worker.said.close()
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        if worker.at is not None:
            died, *later = self._session.items[worker.at :]
            text = f"the worker that ran this test ended with {code}"
            report = pytest.TestReport(died.nodeid, died.location, {}, "failed", text, "call")
            self._session.config.hook.pytest_runtest_logreport(report=report)
            self._fork([item for item in later if item.path == died.path])
        elif code != worker.has_failed:
            raise RuntimeError(f"a worker ended with {code} after its tests, expected {worker.has_failed:d}")


class _Work:
    """Runs tests in a worker, and says what comes of them."""

    def __init__(self, session, said, stop):
        self._session, self._said, self._stop = session, said, stop
        self._numbers = {item: number for number, item in enumerate(session.items)}
        self._reports, self.warnings = [], []

    def do(self, items):
        """Run tests of one file, and then end all that is not of the whole session."""
        for item, following in zip(items, [*items[1:], self._session], strict=False):
            if self._stop[0] or self._session.shouldfail or self._session.shouldstop:
                break
            self._say(self._numbers[item])
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        self._say(None)

    def pytest_runtest_logreport(self, report):
        self._reports.append(report)

    def pytest_warning_recorded(self, warning_message, when, nodeid, location):
        """Keep the text of a warning, for what it is about may not go from one process to another."""
        message = warnings.WarningMessage(
            str(warning_message.message), warning_message.category, warning_message.filename, warning_message.lineno
        )
        self.warnings.append({"warning_message": message, "when": when, "nodeid": nodeid, "location": location})

    def _say(self, at):
        self._said.send((self._reports, self.warnings, at))
        self._reports, self.warnings = [], []


def longest_first(items):
    """Return lists of the items of each file, those first that are likely to take longest."""
    files = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    return sorted(files.values(), key=_length, reverse=True)


def _length(items):
    names = vars(items[0].module).values()
    origins = {getattr(value, "__module__", None) or getattr(value, "__name__", None) for value in names}
    return len(items) + _TESTS_A_STARTER * bool(_STARTERS & origins)
