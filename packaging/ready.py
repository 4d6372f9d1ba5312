"""Refuse a release that is not ready: `make release-check TAG=v1.0.0` says all that is missing in one message.

A release is not ready while an address is a placeholder, a workflow uses an action that is not pinned by its digest,
two files name different versions, or API.txt is not what the code says.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import api

ROOT = Path(__file__).resolve().parent.parent
# ".invalid" is a top-level domain that never is one (RFC 2606): no placeholder can lead anybody anywhere.
PLACEHOLDER = re.compile(r"[\w@:/.-]+\.invalid\b")
# What a release takes along or is made by; placeholders elsewhere, such as in tests, harm nobody.
RELEASED = ("setup.py", "*.md", "*.cff", "mkdocs.yml", "docs/**/*.md", ".github/**/*.yml")
_USES = re.compile(r"\buses: *(\S+)(.*)")
_PINNED = re.compile(r"[\w./-]+@[0-9a-f]{40}")


def released_lines(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (file and line number, line) of what a release takes along."""
    for path in sorted({path for pattern in RELEASED for path in root.glob(pattern)}):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield f"{path.relative_to(root)}:{number}", line


def placeholders(root: Path) -> Iterator[str]:
    """Yield what has yet to be filled in: addresses, and how to install what is published."""
    for place, line in released_lines(root):
        for match in PLACEHOLDER.finditer(line):
            yield f"{place}: {match[0]} is a placeholder; write the project's own address"
        if "pip install . " in line:  # which nobody can write who has no checkout
            yield f"{place}: installs a checkout; write `pip install recckpt`"


def unpinned(root: Path) -> Iterator[str]:
    """Yield the actions of workflows that are not pinned by a digest, with the version beside it."""
    for place, line in released_lines(root):
        if place.startswith(".github/") and (uses := _USES.search(line)) and not uses[1].startswith("./"):
            if not _PINNED.fullmatch(uses[1]):
                yield f"{place}: {uses[1]} is not pinned; write the 40 digits of its commit after the @"
            elif not re.fullmatch(r" +# v\d[\d.]*", uses[2]):
                yield f"{place}: {uses[1]} does not say its version; add ' # v1.2.3'"


def versions(root: Path) -> dict[str, str | None]:
    """Return the version that each file names; of CHANGELOG.md that of the newest section."""

    def named(file: str, pattern: str) -> str | None:
        match = re.search(pattern, (root / file).read_text(encoding="utf-8"), re.MULTILINE)
        return match[1] if match else None

    return {
        "recckpt/__init__.py": named("recckpt/__init__.py", r'^__version__ = "(.+)"$'),
        "CITATION.cff": named("CITATION.cff", r"^version: (\S+)$"),
        "CHANGELOG.md": named("CHANGELOG.md", r"^## \[([^\]]+)\]"),
    }


def disagreeing(root: Path, tag: str | None) -> Iterator[str]:
    """Yield what names another version than the package does, the tag too where there is one."""
    named = versions(root)
    expected = named["recckpt/__init__.py"]
    if tag is not None:
        named["the tag"] = tag.removeprefix("v") if tag.startswith("v") else None
    for place, version in named.items():
        if version != expected:
            yield f"{place}: found version {version}, expected {expected} as in recckpt/__init__.py"


def undated(root: Path) -> Iterator[str]:
    """Yield that the newest section of CHANGELOG.md has no date, as that of a release does."""
    newest = re.search(r"^## .*$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    if newest is None or not re.fullmatch(r"## \[\S+\] - \d{4}-\d\d-\d\d", newest[0]):
        yield f"CHANGELOG.md: {newest[0] if newest else 'no section'!r} has no date; write '## [version] - YYYY-MM-DD'"


def problems(root: Path = ROOT, tag: str | None = None) -> list[str]:
    """Return all that keeps a release from being made."""
    found = [*disagreeing(root, tag), *unpinned(root), *placeholders(root), *undated(root)]
    if api.API.read_text(encoding="utf-8") != api.listing((ROOT / "STABILITY.md").read_text(encoding="utf-8")):
        found.append("API.txt: not what the code says; run `make api`, and write a line in CHANGELOG.md")
    return found


def main() -> None:
    """Exit with a message that has all problems, or say that there are none."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--tag", help="the tag that is to be released, such as v1.0.0")
    if found := problems(tag=arguments.parse_args().tag):
        lines = "".join(f"\n  {problem}" for problem in found)
        sys.exit(f"NOT READY FOR A RELEASE: {len(found)} problem{'s' * (len(found) > 1)}{lines}")
    print("ready for a release")


if __name__ == "__main__":
    main()
