"""Says where a test stands that has not ended after a minute, and what keeps a process from ending after its tests.

A plugin of pytest, whose own faulthandler_timeout cannot be used here. Its thread walks the stacks of threads that
run, without the lock of the interpreter, and has crashed a test that was only slow; and a child that a test forks
inherits the lock of that thread, but not the thread. A timer of the kernel has neither fault: its signal stops the
main thread, whose own stack is then printed, and as soon as Python runs again, those of all threads. No fork has it.
"""

import faulthandler
import os
import signal
import sys
import threading
import traceback

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
        signal.signal(signal.SIGALRM, self._say_all)
        faulthandler.register(signal.SIGALRM, file=stderr, all_threads=False, chain=True)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        """Watch one test, its fixtures included."""
        signal.setitimer(signal.ITIMER_REAL, self._seconds * (10 if item.get_closest_marker("slow") else 1))
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def pytest_unconfigure(self):
        """Watch the end of the interpreter: threads that it waits for, functions of atexit, the last garbage.

        A worker of xdist comes to that end when all others have done their tests, however long these take.
        """
        threading._register_atexit(signal.setitimer, signal.ITIMER_REAL, self._seconds_to_end)  # threads end after it

    def _say_all(self, number, frame):
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, top in sys._current_frames().items():
            stack = "".join(traceback.format_stack(top))
            os.write(self._stderr, f"Thread {names.get(ident, ident)}:\n{stack}\n".encode())
