"""Which test files try a source file; as a script: ``tests_of.py FILE`` prints them, for ``make test-of``.

The tests of recckpt/a/b.py are tests/a/test_b.py and a few of those that import it, of tests/a/ first; where there are
none, those of the files that import it; and of what is imported by its name alone, all in tests/a/.
"""

import difflib
import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
_IMPORT = re.compile(r"^\s*(?:from ([\w.]+) import (\([^)]*\)|[^\n]*)|import ([\w.]+))", re.MULTILINE)
_MOST = 4  # test files that import one source file


def sources():
    """Return the source files that do something, by their paths within recckpt."""
    files = sorted((ROOT / "recckpt").rglob("*.py"))
    return [str(file.relative_to(ROOT / "recckpt")) for file in files if not _is_empty(file)]


def _is_empty(file):
    return file.name == "__init__.py" and "def " not in file.read_text()  # a docstring, and what it imports


@cache
def _imported(folder):
    """Return each file below a folder with the modules, and names in modules, that it imports."""
    found = {}
    for file in sorted((ROOT / folder).rglob("*.py")):
        found[str(file.relative_to(ROOT / folder))] = names = set()
        for module, of_it, alone in _IMPORT.findall(file.read_text()):
            names |= {module or alone, *(f"{module}.{name}" for name in re.findall(r"\w+", of_it))}
    return found


def _importing(source, folder):
    name = f"recckpt/{source}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return [file for file, names in _imported(folder).items() if name in names]


def tests_of(source):
    """Return the test files of a source file, by their paths within tests."""
    own = _trying(source, ())
    room = sorted((ROOT / "tests" / source).parent.glob("test_*.py"))
    return own or [str(test.relative_to(ROOT / "tests")) for test in room]


def _trying(source, users):
    room, alike = f"{Path(source).parent}/", str(Path(source).with_name(f"test_{Path(source).name}"))
    tests = [test for test in _importing(source, "tests") if "/test_" in f"/{test}" and "integrations/" not in test]
    tests = sorted(tests, key=lambda test: not test.startswith(room))[:_MOST]
    if (ROOT / "tests" / alike).exists():
        return list(dict.fromkeys([alike, *tests]))
    for user in () if tests else _importing(source, "recckpt"):
        if user != source and user not in users and not user.endswith("__init__.py"):
            tests += [test for test in _trying(user, (*users, source))[:2] if test not in tests]
    return tests


def main(file):
    """Print the paths of the tests of a file, or the name that is nearest to it."""
    path = Path(file).resolve()
    source = str(path.relative_to(ROOT / "recckpt")) if path.is_relative_to(ROOT / "recckpt") else str(file)
    if source not in sources():
        near = difflib.get_close_matches(source, sources(), 1, 0)
        sys.exit(f"found FILE={file}, expected a source file, such as recckpt/{near[0]}")
    print(*(f"tests/{test}" for test in tests_of(source)))


if __name__ == "__main__":
    main(*sys.argv[1:])
