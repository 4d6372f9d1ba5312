"""Tests that forks of one process run are reported as if it had run them."""

import os
import signal
from types import SimpleNamespace

import pytest
from support import rank_processes, warm_python
from support.forked_workers import longest_first

pytestmark = pytest.mark.slow

FIXTURES = """
import os, pathlib, warnings
import pytest

@pytest.fixture(scope="session")
def whole_session(tmp_path_factory):
    yield tmp_path_factory.mktemp("session")
    pathlib.Path(f"ended-{os.getpid()}").touch()
"""
FILES = {
    "conftest.py": FIXTURES,
    "test_deaths.py": """
import os, signal

def test_before(whole_session): pass
def test_death(): os.kill(os.getpid(), signal.SIGKILL)
def test_after(whole_session, tmp_path):
    assert list(tmp_path.iterdir()) == []
    print("to nobody")
""",
    "test_outcomes.py": """
import warnings
import pytest

@pytest.fixture(scope="module")
def broken():
    yield
    raise OSError("at the end of the file")

def test_success(whole_session, tmp_path): (tmp_path / "file").touch()
def test_failure():
    print("said before")
    raise ValueError("it fails")
def test_skip(): pytest.skip("not here")
def test_warning(): warnings.warn("be warned")
def test_end(broken): pass
""",
}


def pytest_run(root, files, *options):
    for name, text in files.items():
        (root / name).write_text(text)
    alone = ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:hypothesispytest", "-c", os.devnull, "--rootdir=."]
    plugin = ["-p", "support.forked_workers", "--workers=2"]
    return warm_python.run("-m", "pytest", "--basetemp=temporary", *alone, *plugin, *options, cwd=root)


def test_whatever_becomes_of_a_test_is_reported(tmp_path):
    done = pytest_run(tmp_path, FILES, "-rA")
    summary = done.stdout.partition("short test summary info")[2].splitlines()[1:]
    assert sorted(summary[:-1]) == [
        "ERROR test_outcomes.py::test_end - OSError: at the end of the file",
        f"FAILED test_deaths.py::test_death - the worker that ran this test ended with {-signal.SIGKILL}",
        "FAILED test_outcomes.py::test_failure - ValueError: it fails",
        "PASSED test_deaths.py::test_after",
        "PASSED test_deaths.py::test_before",
        "PASSED test_outcomes.py::test_end",
        "PASSED test_outcomes.py::test_success",
        "PASSED test_outcomes.py::test_warning",
        "SKIPPED [1] test_outcomes.py:14: not here",
    ]
    assert "2 failed, 5 passed, 1 skipped, 1 warning, 1 error in" in summary[-1]
    assert "said before" in done.stdout
    assert "be warned" in done.stdout
    assert done.returncode == 1
    assert len([*tmp_path.glob("ended-*")]) == 2  # not of the worker that died


def test_a_test_that_hangs_is_ended_and_named_with_where_it_stands(tmp_path):
    limit = "import sys\nsys.modules['support.forked_workers']._LONGEST = 3\n"
    text = "import threading\ndef test_hang(): threading.Event().wait(60)\n"
    text = f"def test_before(): pass\n{text}def test_after(): pass\n"
    done = pytest_run(tmp_path, {"conftest.py": limit, "test_it.py": text}, "-rA")
    assert f"FAILED test_it.py::test_hang - the worker that ran this test ended with {-signal.SIGABRT}" in done.stdout
    assert "1 failed, 2 passed" in done.stdout
    assert "in test_hang" in done.stderr  # the stack of the thread


def test_after_a_failure_all_stop_where_they_are_asked_to(tmp_path):
    later = "".join(f"def test_{number}(): assert not {number}\n" for number in range(100))
    done = pytest_run(tmp_path, {"test_a.py": later, "test_b.py": later}, "-x")
    assert "stopping after" in done.stdout
    assert done.stdout.count("\nFAILED ") < 5


def test_a_fixture_of_the_session_that_ends_badly_fails_the_run(tmp_path):
    fixture = "import pytest\n@pytest.fixture(scope='session')\ndef it():\n    yield\n    raise OSError('at its end')\n"
    done = pytest_run(tmp_path, {"conftest.py": fixture, "test_it.py": "def test_it(it): pass\n"})
    assert done.returncode == 3
    assert "OSError: at its end" in done.stderr
    assert "a worker ended with 1 after its tests, expected 0" in done.stdout


def test_files_that_start_processes_come_first_and_then_those_with_many_tests():
    def items_of(path, n, **names):
        return [SimpleNamespace(path=path, module=SimpleNamespace(**names)) for _ in range(n)]

    files = [items_of("few", 1), items_of("many", 3), items_of("forks", 2, warm=warm_python), items_of("some", 2)]
    files.append(items_of("ranks", 1, run=rank_processes.run_script))
    items = [item for at in range(3) for file in files for item in file[at : at + 1]]
    assert [[item.path for item in file] for file in longest_first(items)] == [
        ["forks"] * 2,
        ["ranks"],
        ["many"] * 3,
        ["some"] * 2,
        ["few"],
    ]
