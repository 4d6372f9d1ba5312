"""What a run of pytest says of a test that does not end, and of a process that does not end after its tests."""

import faulthandler
import os
import signal
import subprocess
import sys

import pytest
from support.forked import in_fork
from support.paths import PYTHONPATH
from support.watchdog import Watchdog

TESTS = """
import pathlib, threading
from support.forked import in_fork

def test_that_waits():
    assert in_fork(lambda: "forked") == "forked"
    pathlib.Path("in a test").read_text()

def wait_for_longer():
    pathlib.Path("after the tests").read_text()

def test_that_leaves_a_thread():
    threading.Thread(target=wait_for_longer).start()
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [["-n1"], []], ids=["a worker", "alone"])
def test_what_does_not_end_says_where_it_stands(tmp_path, options):
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nwatchdog_seconds = 0.5\n")
    for name in ("in a test", "after the tests"):
        os.mkfifo(tmp_path / name)
    command = [sys.executable, "-m", "pytest", "-p", "support.watchdog", "-p", "no:cacheprovider", *options]
    with subprocess.Popen(
        [*command, "-p", "no:hypothesispytest"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    ) as process:
        for name, place in (("in a test", "in test_that_waits"), ("after the tests", "in wait_for_longer")):
            assert any(place in line for line in process.stderr), process.stdout.read()
            (tmp_path / name).write_text("go on")  # waits until somebody reads there
        out, err = process.communicate()
    assert "2 passed" in out
    assert process.returncode == 0, out + err


def test_a_worker_that_waits_for_others_to_do_their_tests_is_not_watched():
    def do_all_tests():
        Watchdog(2, seconds=60, seconds_to_end=8).pytest_unconfigure()
        return signal.getitimer(signal.ITIMER_REAL)

    assert in_fork(do_all_tests) == "(0.0, 0.0)"


def test_a_forked_child_may_have_a_watchdog_of_its_own():
    def start_and_stop():
        faulthandler.dump_traceback_later(60)
        faulthandler.cancel_dump_traceback_later()

    assert in_fork(start_and_stop) == "None"
