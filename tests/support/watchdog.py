"""Says where a test stands that has not ended after a minute, and what keeps a process from ending after its tests.

A plugin of pytest, whose own faulthandler_timeout cannot be used here: a child that a test forks inherits the lock of
that watchdog's thread, but not the thread, and waits forever when it starts a watchdog too. This one stops for forks.
"""

import faulthandler
import os
import time

import pytest

_SECONDS_TO_END = 8  # of a worker: pytest-xdist kills it after 10


def pytest_addoption(parser):
    """Take how long a test may take."""
    text = "seconds after which a test says where it stands; ten times as many for one that is marked slow"
    parser.addini("watchdog_seconds", text, default="60")


def pytest_configure(config):
    """Start to watch: pytest captures nothing now, so stderr is that of the terminal, in the workers of xdist too."""
    seconds = float(config.getini("watchdog_seconds"))
    to_end = min(seconds, _SECONDS_TO_END) if hasattr(config, "workerinput") else seconds
    config.pluginmanager.register(Watchdog(os.dup(2), seconds, to_end))


class Watchdog:
    """Prints the stacks of all threads, once for each test, and once where the process does not end.

    Args:
        stderr: the descriptor to print to.
        seconds: how long a test may take.
        seconds_to_end: how long the process may take to end after its last test.
    """

    def __init__(self, stderr, seconds, seconds_to_end):
        self._stderr, self._seconds, self._seconds_to_end = stderr, seconds, seconds_to_end
        self._deadline, self._pid = 0.0, os.getpid()
        os.register_at_fork(before=self._stop, after_in_parent=self._start)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        """Watch one test, its fixtures included."""
        self._deadline = time.monotonic() + self._seconds * (10 if item.get_closest_marker("slow") else 1)
        self._start()
        try:
            return (yield)
        finally:
            self._deadline = 0.0
            self._stop()

    @pytest.hookimpl(tryfirst=True)
    def pytest_unconfigure(self):
        """Watch the end: threads that are waited for, functions of atexit, the last collection of garbage."""
        self._deadline = time.monotonic() + self._seconds_to_end
        self._start()

    def _start(self):
        left = self._deadline - time.monotonic()
        if left > 0 and os.getpid() == self._pid:
            faulthandler.dump_traceback_later(left, file=self._stderr)

    def _stop(self):
        if os.getpid() == self._pid:
            faulthandler.cancel_dump_traceback_later()
