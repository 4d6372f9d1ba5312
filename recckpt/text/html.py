"""Pages that need no other file, no network and no script: their skeleton and style, and text that cannot break out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape

from recckpt.text.words import escaped

_STYLE = """
.recckpt { font: 15px/1.45 system-ui, sans-serif; }
.recckpt h1 { font-size: 1.4em; margin: 0 0 .4em; overflow-wrap: anywhere; }
.recckpt h2 { font-size: 1.1em; margin: 1.6em 0 .4em; overflow-wrap: anywhere; }
.recckpt p { margin: .2em 0; overflow-wrap: anywhere; }
.recckpt .scroll { overflow-x: auto; }
.recckpt table { border-collapse: collapse; font-size: .92em; font-variant-numeric: tabular-nums; }
.recckpt th, .recckpt td { padding: .25em .7em; border-bottom: 1px solid #8884; vertical-align: top; }
.recckpt th { font-weight: 600; white-space: nowrap; text-align: left; }
.recckpt td { text-align: left; overflow-wrap: anywhere; min-width: 12em; max-width: 22em; }
.recckpt td.n, .recckpt td.s { white-space: nowrap; min-width: 0; } .recckpt .n { text-align: right; }
"""
_HEAD = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<meta name="color-scheme" content="light dark">'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
)
_SHORT = 24  # characters
_BODY = "<style>body { color: CanvasText; margin: 1.2em auto; max-width: 75em; padding: 0 1em; }</style>"


def page(title: str, body: str) -> str:
    """Return a whole page; its title is text, and its body is of :func:`body`."""
    return f"{_HEAD}<title>{text(title)}</title></head><body>{_BODY}{body}</body></html>\n"


def body(parts: Iterable[str], style: str) -> str:
    """Return what a notebook shows, in its own colours: parts that are HTML, with a style beside that of all pages."""
    return f'<style>{_STYLE}{style}</style><div class="recckpt">{"".join(parts)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[str]) -> str:
    """Return a table of cells that are HTML already; the columns that are numbers are aligned on the right."""
    heads = "".join(f"<th{_kind(name, '', numbers)}>{name.lower()}</th>" for name in head)
    lines = (
        "".join(f"<td{_kind(name, cell, numbers)}>{cell}</td>" for name, cell in zip(head, row, strict=True))
        for row in rows
    )
    inner = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{inner}</tbody></table></div>'


def _kind(name: str, cell: str, numbers: Collection[str]) -> str:
    """Return the class of a cell; a short text is not broken on a narrow screen, where the table scrolls."""
    return ' class="n"' if name in numbers else ' class="s"' if len(cell) <= _SHORT else ""


def section(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[str]) -> list[str]:
    """Return a heading and a table of cells that are text, or nothing where there are no rows."""
    cells = [list(map(text, row)) for row in rows]
    return [f"<h2>{text(title)}</h2>", table(head, cells, numbers)] if cells else []


def text(of: str) -> str:
    """Return text as HTML; control characters, and such as turn the direction of text, as escapes."""
    return escape(of if of.isprintable() else escaped(of))
