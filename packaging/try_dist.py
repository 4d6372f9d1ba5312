"""Try what packaging/build_dist.py put into dist/ as its users will meet it, before it is published.

Its files are checked, the wheel is installed into a bare environment and does there what the README shows, and all
extras are resolved together. torch is the one that constraints.txt names.
"""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from build_dist import DIST, ROOT
from environments import PIP, extras, fresh, install, readme_blocks, readme_commands, requirements, run, wheel_in

WORK = ROOT / "build/dist"


def check_files(wheel: Path, sdist: Path) -> None:
    """Check metadata and contents: one pure wheel with its types, an sdist without tests, and nothing else."""
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    with tarfile.open(sdist) as archive, TemporaryDirectory() as folder:
        members = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(folder, filter="data")
        package = next(Path(folder).iterdir()) / "recckpt"
        run(sys.executable, "-m", "check_wheel_contents", "--package", package, wheel)
    names = ZipFile(wheel).namelist()
    if not wheel.name.endswith("-py3-none-any.whl") or "recckpt/py.typed" not in names:
        sys.exit(f"{wheel.name}: expected a pure wheel with recckpt/py.typed")
    stray = sorted(name for name in members if name.startswith(("tests/", "benchmarks/", "packaging/")))
    missing = {"LICENSE", "README.md", "CHANGELOG.md", "STABILITY.md", "SECURITY.md", "API.txt"} - members
    if stray or missing:
        sys.exit(f"{sdist.name}: found {stray[:3]}, which do not belong there; missing are {sorted(missing)}")


def try_readme(python: Path, folder: Path) -> None:
    """Do what the README shows, with what was installed and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    for block in readme_blocks("python"):
        run(python, "-c", block, cwd=folder)
    for command in readme_commands():
        run(python.parent / command[0], *command[1:], cwd=folder)


def main() -> None:
    """Check the files of dist/, install the wheel, do what the README shows, and resolve each extra."""
    wheel = wheel_in(DIST)
    [sdist] = DIST.glob("*.tar.gz")
    check_files(wheel, sdist)
    python = fresh(sys.executable, WORK / "bare")
    install(python, *map(str, requirements(wheel).values()))
    install(python, "--no-deps", wheel)
    run(python, *PIP, "check")
    try_readme(python, WORK / "readme")
    every = ",".join(extras(wheel))  # at once: what goes together goes alone
    install(python, "--dry-run", f"{wheel}[{every}]")
    print(f"recckpt[{every}]: resolved")
    print(f"{wheel.name}: checked, installed, and does what the README shows")


if __name__ == "__main__":
    main()
