"""The site has all pages and all public names; that it builds, and has no dead link, is tried by ``make docs``."""

from __future__ import annotations

import re

import pytest
from paths import ROOT

import recckpt
import recckpt.sparse

DOCS = ROOT / "docs"


def test_the_site_has_every_page() -> None:
    listed = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    here = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert here | {"index.md", "contributing.md", "changelog.md"} == listed


@pytest.mark.parametrize("module", [recckpt, recckpt.sparse], ids=lambda module: module.__name__)
def test_the_reference_has_every_public_name(module: object) -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    named = {name for home, name in re.findall(r"^::: (\S+)\.(\w+)$", pages, re.MULTILINE) if home == module.__name__}
    assert set(module.__all__) <= named
