"""Puts the pages that lie beside ``docs/`` on the site, and leads the links of all pages to where they lie there."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
BESIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "STABILITY.md": "stability.md",
    "SECURITY.md": "security.md",
}
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)]+)?\)")
_pages: dict[str, str] = {}  # of the site: address -> first sentence
_nav: list[Any] = []  # the sections of the site
_SECTION = re.compile(r"^\[[^\]]+\]\(\.\./CONTRIBUTING\.md#([\w-]+)\)$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages beside the folder, and the examples as they are."""
    for name, page in BESIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    for example in sorted(path for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb")):
        files.append(File.generated(config, f"examples/{example.name}", abs_src_path=str(example)))
    return files


def on_nav(nav: Any, config: Any, files: Any) -> Any:
    """Keep the order of the pages for ``llms.txt``."""
    _nav[:] = nav.items
    return nav


def on_post_build(config: Any) -> None:
    """Write ``llms.txt``, by which programs that read for people find their way: https://llmstxt.org."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for item in _nav:
        pages = item.children if item.is_section else [item]
        lines += ["", f"## {item.title}", ""] if item.is_section else []
        lines += [f"- [{page.title}]({page.url or 'index.html'}): {_pages[page.url]}" for page in pages]
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links to their pages; what is not on the site, such as a test, is named without a link.

    A line that is nothing but a link to a section of CONTRIBUTING.md becomes that section, so that there is one of it.
    """
    _pages[page.url] = first_sentence(markdown)
    beside = {page: name for name, page in BESIDE.items()}
    own_place = beside.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def led(text: str, place: str) -> str:
        def link(match: re.Match[str]) -> str:
            text, target, anchor = match.groups()
            there = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
            name = BESIDE.get(there, there.removeprefix("docs/"))
            if files.get_file_from_path(name) is None and (ROOT / there).exists():
                return text
            return f"[{text}]({posixpath.relpath(name, posixpath.dirname(page.file.src_uri))}{anchor or ''})"

        return _LINK.sub(link, text)

    parts = _SECTION.split(markdown)  # text, the name of a section, text, ...
    parts[::2] = [led(text, own_place) for text in parts[::2]]
    parts[1::2] = [led(section(name), "CONTRIBUTING.md") for name in parts[1::2]]
    return "".join(parts)


def first_sentence(markdown: str) -> str:
    """Return the first sentence of a page, without links."""
    prose = (block for block in re.split(r"\n\s*\n", markdown) if re.match(r"[\w*`]", block))
    sentence = re.split(r"(?<=\.) ", " ".join(next(prose, "").split()))[0]
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", sentence)


def section(anchor: str) -> str:
    """Return what stands below a heading of CONTRIBUTING.md, up to the next one."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    heading = anchor.replace("-", " ")
    found = re.search(rf"^## {heading}\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL | re.IGNORECASE)
    if found is None:
        raise ValueError(f"CONTRIBUTING.md has no section {anchor!r}")
    return found[1].strip()


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Make links of the pages that docstrings name, take the roles off names, and break the long lines of errors."""
    if page.file.src_uri == "does-not-resume.md":
        html = html.replace('class="highlight"', 'class="highlight wrapped"')
    html = re.sub(r":(?:class|meth|mod|attr|func|data):(?=<code)", "", html)
    here = posixpath.dirname(page.file.dest_uri)

    def link(match: re.Match[str]) -> str:
        target = files.get_file_from_path(f"{match[1]}.md")
        return f'<a href="{posixpath.relpath(target.dest_uri, here)}">{match[1]}</a>' if target else match[0]

    return re.sub(r"\bdocs/([\w-]+)\.md\b(?![^<]*</a>)", link, html)
