"""Each source file has tests that are found."""

import subprocess
import sys

import pytest
from support import tests_of
from support.paths import ROOT, SUPPORT
from support.tests_of import TESTS, line_to_add, named_alike, sources


def test_each_source_file_has_tests():
    missing = [source for source in sources() if not tests_of.tests_of(source)]
    lines = "\n".join(map(line_to_add, missing))
    assert not missing, f"add to TESTS in tests/support/tests_of.py, or better, write a test of that name:\n{lines}"


def test_the_map_lists_what_there_is_and_what_a_name_does_not_say():
    gone = {name for name in TESTS if not (ROOT / "recckpt" / name).exists()}
    gone |= {
        name for name, tests in TESTS.items() if not all((ROOT / "tests" / test).is_file() for test in tests.split())
    }
    alike = {name for name in TESTS if set(named_alike(name)) & set(TESTS[name].split())}
    lines = "\n".join(f'    "{name}": "{TESTS[name]}",' for name in sorted(gone | alike))
    assert not lines, f"take out of TESTS in tests/support/tests_of.py, or put the names of today there:\n{lines}"


def test_no_test_file_is_empty():
    assert not [path for path in (ROOT / "tests").rglob("test_*.py") if "def " not in path.read_text()]


@pytest.mark.parametrize(
    ("file", "code", "said"),
    [
        ("recckpt/text/words.py", 0, "tests/text/test_words.py"),
        ("recckpt/sparse/table/rows.py", 0, "tests/sparse/table/test_row_store.py tests/sparse/table/test_table.py"),
        ("recckpt/convert/sources/npy.py", 0, "tests/convert/test_sources.py"),
        ("recckpt/text/word.py", 1, "expected a source file, such as recckpt/text/words.py"),
        ("", 1, "expected a source file, such as recckpt/"),
    ],
)
def test_the_tests_of_a_file_are_printed_or_the_name_that_is_nearest(file, code, said):
    command = [sys.executable, SUPPORT / "tests_of.py", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done
