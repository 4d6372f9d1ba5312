"""Each source file has tests that are found."""

import subprocess
import sys

import pytest
from support import tests_of
from support.paths import ROOT, SUPPORT
from support.sweeps import mostly_slow
from support.tests_of import sources


def test_each_source_file_has_tests_and_few():
    tests = {source: tests_of.tests_of(source) for source in sources()}
    assert not [source for source, of_it in tests.items() if not of_it]
    assert all((ROOT / "tests" / test).is_file() for of_it in tests.values() for test in of_it)
    assert sum(map(len, tests.values())) < 4 * len(tests)


def test_no_test_file_is_empty():
    assert not [path for path in (ROOT / "tests").rglob("test_*.py") if "def " not in path.read_text()]


@mostly_slow()
@pytest.mark.parametrize(
    ("file", "code", "said"),
    [
        ("recckpt/text/words.py", 0, "tests/text/test_words.py"),  # by its name
        ("recckpt/sparse/table/rows.py", 0, "tests/sparse/table/test_row_store.py"),  # by what it imports
        ("recckpt/inspect/save_times.py", 0, "tests/inspect/test_watch.py"),
        ("recckpt/convert/arrow.py", 0, "tests/convert/test_sources.py"),  # which is imported by its name alone
        ("recckpt/text/word.py", 1, "expected a source file, such as recckpt/text/words.py"),
        ("", 1, "expected a source file, such as recckpt/"),
    ],
)
def test_the_tests_of_a_file_are_printed_or_the_name_that_is_nearest(file, code, said):
    command = [sys.executable, SUPPORT / "tests_of.py", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done
