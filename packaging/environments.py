"""Environments to try a wheel in: which Pythons there are, what a wheel asks for, and the commands of the README."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path
from zipfile import Path as ZipPath

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")  # of Python, that a release is tried with
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")


def pythons() -> dict[str, str | None]:
    """Return the interpreter of each version: that on the PATH, else the newest of pyenv; None where it is missing."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    found: dict[str, str | None] = {}
    for version in VERSIONS:
        installed = sorted(pyenv.glob(f"{version}.*/bin/python"), key=lambda path: int(path.parts[-3].split(".")[2]))
        candidates = [shutil.which(f"python{version}"), *map(str, reversed(installed))]
        found[version] = next((each for each in candidates if each and version_of(each) == version), None)
    return found


def version_of(python: str) -> str | None:
    """Return the version of an interpreter, such as 3.11; None where it does not start, as an idle shim of pyenv."""
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def fresh(python: str, folder: Path) -> Path:
    """Make a bare environment, in the place of the one that was there, and return its interpreter."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    return folder / "bin/python"


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> None:
    """Run a command, without the paths that this process imports from; exit by its words where it fails."""
    clean = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=clean | environment, check=False)
    if done.returncode != 0:
        sys.exit(f"exit code {done.returncode}: {shlex.join(map(str, command))}")


def install(python: Path, *arguments: str | Path) -> None:
    """Install into an environment, within the constraints: the torch that they name, and no other build of it."""
    run(python, *PIP, "install", "--no-compile", "--constraint", ROOT / "constraints.txt", *arguments)


def wheel_in(folder: Path) -> Path:
    """Return the one wheel that was built."""
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"{folder}: found {len(wheels)} wheels, expected one; `make dist` builds it")
    return wheels[0]


def metadata(wheel: Path) -> PathDistribution:
    """Return the metadata of a wheel."""
    [info] = (each for each in ZipPath(wheel).iterdir() if each.name.endswith(".dist-info"))
    return PathDistribution(info)


def requirements(wheel: Path, extra: str = "") -> dict[str, Requirement]:
    """Return what a wheel asks for, by name; of an extra what that adds."""
    asked = {}
    for each in map(Requirement, metadata(wheel).requires or []):
        if each.marker.evaluate({"extra": extra}) if each.marker else not extra:
            each.marker = None  # pip would look at it again, and knows of no extra where a requirement stands alone
            asked[each.name] = each
    return asked


def extras(wheel: Path) -> list[str]:
    """Return the extras of a wheel."""
    return metadata(wheel).metadata.get_all("Provides-Extra") or []


def lowest(requirement: Requirement) -> str:
    """Return a requirement of the lowest version that one allows."""
    [floor] = (each.version for each in requirement.specifier if each.operator == ">=")
    return f"{requirement.name}=={floor}"


def readme_blocks(language: str) -> list[str]:
    """Return the blocks of the README in a language."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def readme_commands() -> list[list[str]]:
    """Return the commands of `recckpt` that the README shows."""
    lines = (shlex.split(line, comments=True) for block in readme_blocks("sh") for line in block.splitlines())
    return [words for words in lines if words[:1] == ["recckpt"]]
