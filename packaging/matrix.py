"""Try the versions that setup.py claims: `make test-matrix`, of the wheel in dist/.

``reading``: on each Python of this machine a bare environment with the wheel and no torch, which reads, queries,
converts and rewrites a run that a Python with torch has trained, answers the commands of the README, and reads the
golden files of each edition to the bit.
``lowest`` and ``newest``: the default suite with the lowest versions that setup.py allows, and with the newest that the
registry has, on the Python that ``--writer`` has, since torch is installed for that one.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from build_dist import DIST, ROOT
from environments import (
    VERSIONS,
    fresh,
    install,
    lowest,
    pythons,
    readme_blocks,
    readme_commands,
    requirements,
    run,
    wheel_in,
)

WORK = ROOT / "build/matrix"
PARTS = ("reading", "lowest", "newest")


def without_torch(wheel: Path) -> list[str]:
    """Return what reading takes: all that the wheel asks for but torch, and what SQL takes."""
    return [str(each) for name, each in (requirements(wheel) | requirements(wheel, "sql")).items() if name != "torch"]


def try_reading(writer: Path) -> None:
    """Try the wheel without torch on each Python of this machine."""
    wheel, folder = wheel_in(DIST), WORK / "reading"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for block in readme_blocks("python"):
        run(writer, "-c", block, cwd=folder, PYTHONPATH=str(ROOT))
    for version, python in pythons().items():
        if python is None:
            print(f"PYTHON {version} IS SKIPPED: it is not on this machine", flush=True)
            continue
        bare = fresh(python, WORK / f"python{version}")
        install(bare, *without_torch(wheel))
        install(bare, "--no-deps", wheel)
        copy = shutil.copytree(folder, WORK / f"run{version}", dirs_exist_ok=True)
        run(bare, ROOT / "packaging/try_reading.py", cwd=copy)
        for edition in (ROOT / "tests/golden").glob("[0-9]*"):
            run(bare, ROOT / "tests/golden/read.py", edition, cwd=copy)
        for command in readme_commands():
            run(bare.parent / command[0], *command[1:], cwd=copy)
        print(f"PYTHON {version}: reads without torch", flush=True)


def pinned(wheel: Path) -> list[str]:
    """Return the lowest versions that the wheel allows, but of torch, which constraints.txt names.

    With them that of s3fs, which goes with one version of fsspec alone: pip would look for it for a long time.
    """
    asked = requirements(wheel) | {"s3fs": requirements(wheel, "test")["s3fs"]}
    return [lowest(each) for name, each in asked.items() if name != "torch"]


def try_suite(writer: Path, part: str, tests: Sequence[str]) -> None:
    """Run the default suite, or some of it, with the lowest or the newest versions of what setup.py asks for."""
    wheel = wheel_in(DIST)
    python = fresh(str(writer.resolve()), WORK / part)
    exact = pinned(wheel) if part == "lowest" else []
    install(python, "--upgrade", "pip", "setuptools")
    install(python, *exact, "torch", *map(str, requirements(wheel).values()))
    install(python, *exact, *map(str, requirements(wheel, "test").values()))
    install(python, "--no-build-isolation", "--no-deps", "--editable", ROOT)  # the suite is no part of the wheel
    run(python, "-m", "pip", "freeze", "--exclude-editable")
    run(python, "-m", "pytest", "-p", "no:cacheprovider", *tests)
    print(f"the suite passes with the {part} versions", flush=True)


def main() -> None:
    """Try what the arguments name."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("parts", nargs="+", choices=PARTS)
    arguments.add_argument("--writer", type=Path, required=True, help="a Python with recckpt's requirements and torch")
    arguments.add_argument("--tests", default="", help="files and folders of tests instead of all, with spaces between")
    args = arguments.parse_args()
    if args.parts == ["reading"] and not any(pythons().values()):
        sys.exit(f"none of the Pythons {', '.join(VERSIONS)} is on this machine")
    for part in args.parts:
        if part == "reading":
            try_reading(args.writer.absolute())
        else:
            try_suite(args.writer, part, args.tests.split())


if __name__ == "__main__":
    main()
