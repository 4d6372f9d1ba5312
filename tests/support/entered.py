"""Looks whether the tests of each source file enter it: ``pytest --entered=FILE``, as ``make test-entered`` does.

A line of FILE is a test file, and a source file of which it calls a function: in this process, in any thread, or in a
child that is forked, but not in other interpreters.
"""

import inspect
import os
import sys
import threading
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from support.tests_of import ROOT, sources, tests_of

_SOURCES = f"{ROOT}/recckpt/"
_UNSEEN = {  # run by numba, by a thread of Arrow, by other interpreters; or no function is there
    *("parallel/ahead.py", "__main__.py", "cli/completion.py"),
    *("format/dtypes.py", "output_dir/writer.py"),
}


def pytest_addoption(parser):
    """Take where to write."""
    parser.addoption("--entered", metavar="FILE", help="append to FILE which source files each test file enters")


def pytest_configure(config):
    """Follow all calls from now on."""
    if config.getoption("entered"):
        config.pluginmanager.register(_Entered(Path(config.getoption("entered"))))


class _Entered:
    def __init__(self, path):
        self._path, self._codes, self._lines, self._test = path, {}, set(), "none"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # that forked children write to as well

    def pytest_runtest_logstart(self, nodeid):
        test = nodeid.partition("::")[0].removeprefix("tests/")
        if test != self._test:
            self._codes, self._lines, self._test = {}, set(), test
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame, event, _):
        code = frame.f_code
        if event != "call" or id(code) in self._codes:
            return
        self._codes[id(code)] = code
        if not code.co_filename.startswith(_SOURCES) or not code.co_flags & inspect.CO_OPTIMIZED:
            return  # one of others, or the body of a module or a class
        line = f"{self._test} {code.co_filename.removeprefix(_SOURCES)}\n"
        if line not in self._lines:
            self._lines.add(line)
            with suppress(OSError):  # a test may have limited what files may hold
                os.write(self._file, line.encode())

    def pytest_sessionfinish(self):
        threading.setprofile(None)
        sys.setprofile(None)

    def pytest_terminal_summary(self, terminalreporter):
        for line in wrong(self._path.read_text().splitlines()):
            terminalreporter.write_line(line)


def wrong(lines):
    """Yield the source files that none of their tests enters, as far as these have run."""
    entering = defaultdict(set)
    for test, source in map(str.split, lines):
        entering[source].add(test)
    run = set().union(*entering.values())
    for source in sources():
        tests = set(tests_of(source))
        if tests <= run and source not in _UNSEEN and tests.isdisjoint(entering[source]):
            yield f"{source} is not entered by {' '.join(sorted(tests))}"
