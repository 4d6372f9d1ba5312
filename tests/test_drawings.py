"""The pictures of the documentation are what their script draws, can be read aloud, and stand on a page."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from support.documents import DOCS, PAGES
from support.paths import ROOT

SVG = "{http://www.w3.org/2000/svg}"
NAMES = sorted(path.name for path in (DOCS / "drawings").iterdir())


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import drawings

    return drawings


def test_the_files_are_what_the_script_draws(script: ModuleType) -> None:
    assert {name: draw().svg() for name, draw in script.DRAWINGS.items()} == {
        path.name: path.read_text(encoding="utf-8") for path in Path(script.FOLDER).iterdir()
    }, "run `python docs/drawings.py`"


@pytest.mark.parametrize("name", NAMES)
def test_a_drawing_has_words_for_who_does_not_see_it_and_colours_for_the_dark(name: str) -> None:
    picture = ElementTree.parse(DOCS / "drawings" / name).getroot()
    assert picture.get("role") == "img"
    labels = {each.get("id"): each.text or "" for each in picture if each.tag in {f"{SVG}title", f"{SVG}desc"}}
    assert set((picture.get("aria-labelledby") or "").split()) == set(labels)
    assert all(len(text) > 10 for text in labels.values())
    assert "prefers-color-scheme: dark" in (picture.findtext(f"{SVG}style") or "")


@pytest.mark.parametrize("name", NAMES)
def test_no_text_leaves_the_picture_or_its_box(name: str) -> None:
    picture = ElementTree.parse(DOCS / "drawings" / name).getroot()
    _, _, width, height = (float(side) for side in (picture.get("viewBox") or "").split())
    boxes = [
        [float(box.get(side) or 0) for side in ("x", "y", "width", "height")] for box in picture.iter(f"{SVG}rect")
    ]
    for text in picture.iter(f"{SVG}text"):
        x, y, kind = float(text.get("x") or 0), float(text.get("y") or 0), text.get("class") or ""
        wide = len(text.text or "") * (7.5 if "small" in kind else 9 if "bold" in kind else 8.6)
        left = x if "left" in kind else x - wide / 2
        assert 0 <= left <= left + wide <= width, text.text
        assert 0 <= y - 14 <= y <= height, text.text
        around = [box for box in boxes if box[0] < x < box[0] + box[2] < width and box[1] < y < box[1] + box[3]]
        assert all(box[0] <= left <= left + wide <= box[0] + box[2] for box in around), text.text


@pytest.mark.parametrize("name", NAMES)
def test_each_drawing_stands_on_a_page_with_words_in_its_place(name: str) -> None:
    pages = [page.read_text(encoding="utf-8") for page in PAGES.values()]
    shown = [page for page in pages if f"(drawings/{name})" in page]
    assert shown
    assert all(f"![](drawings/{name})" not in page for page in shown)
