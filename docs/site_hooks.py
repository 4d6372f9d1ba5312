"""Puts the pages that lie beside ``docs/`` on the site, and leads the links of all pages to where they lie there."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
BESIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)]+)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages beside the folder, and the examples as they are."""
    for name, page in BESIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    for example in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{example.name}", abs_src_path=str(example)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links to their pages; what is not on the site, such as a test, is named without a link."""
    beside = {page: name for name, page in BESIDE.items()}
    here = posixpath.dirname(beside.get(page.file.src_uri, f"docs/{page.file.src_uri}"))

    def led(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        place = posixpath.normpath(posixpath.join(here, target))
        name = BESIDE.get(place, place.removeprefix("docs/"))
        if files.get_file_from_path(name) is None and (ROOT / place).exists():
            return text
        return f"[{text}]({posixpath.relpath(name, posixpath.dirname(page.file.src_uri))}{anchor or ''})"

    return _LINK.sub(led, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Take the roles off the names in docstrings."""
    return re.sub(r":(?:class|meth|mod|attr|func|data):(?=<code)", "", html)
