"""Self-contained HTML pages without scripts: skeleton, style, and escaped text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from html import escape

from recckpt.text.columns import Heading, Line, Table
from recckpt.text.words import escaped

_STYLE = """
.recckpt { font: 15px/1.45 system-ui, sans-serif; }
.recckpt h1, .recckpt h2, .recckpt h3 { line-height: 1.3; font-weight: 600; overflow-wrap: anywhere; }
.recckpt h1 { font-size: 1.4em; margin: 0 0 .4em; } .recckpt h2 { font-size: 1.1em; margin: 1.6em 0 .4em; }
.recckpt p { margin: .2em 0; overflow-wrap: anywhere; }
.recckpt .scroll { --page: var(--jp-layout-color0, var(--vscode-editor-background, Canvas)); }
.recckpt .scroll { overflow-x: auto; margin: 0 0 .4em; background:
  linear-gradient(to right, var(--page) 40%, transparent) left / 2em 100% no-repeat local,
  linear-gradient(to left, var(--page) 40%, transparent) right / 2em 100% no-repeat local,
  linear-gradient(to right, #8889, transparent) left / .8em 100% no-repeat scroll,
  linear-gradient(to left, #8889, transparent) right / .8em 100% no-repeat scroll; }
.recckpt .scroll table { border-collapse: collapse; font-size: .92em; font-variant-numeric: tabular-nums; margin: 0; }
.recckpt .scroll tr > * { padding: .25em .7em; border-bottom: 1px solid #8884; vertical-align: top; text-align: left; }
.recckpt .scroll tr > th { font-weight: 600; white-space: nowrap; }
.recckpt .scroll tr > td { overflow-wrap: anywhere; min-width: 16em; max-width: 22em; }
.recckpt .scroll tr > .n, .recckpt .scroll tr > .s { white-space: nowrap; min-width: 0; }
.recckpt .scroll tr > .n { text-align: right; }
"""  # .scroll gives these priority over table rules of Jupyter and others
# A table that extends beyond an edge has a shadow there: fixed shadows lie under covers that scroll with its ends.
_HEAD = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<meta name="color-scheme" content="light dark">'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
)
_SHORT = 32  # most characters of a short text
_BODY = "<style>body { color: CanvasText; margin: 1.2em auto; max-width: 75em; padding: 0 1em; }</style>"


def page(title: str, body: str) -> str:
    return f"{_HEAD}<title>{text(title)}</title></head><body>{_BODY}{body}</body></html>\n"


def body(kind: str, parts: Iterable[str], style: str) -> str:
    """Return the HTML that a notebook shows, in the notebook's colours, from parts in HTML.

    A notebook applies the style of each page to all pages, so each rule of ``style`` must begin with ``.recckpt.kind``
    for this ``kind`` of page.
    """
    return f'<style>{_STYLE}{style}</style><div class="recckpt {kind}">{"".join(parts)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[str]) -> str:
    """Return a table from cells in HTML; columns with numbers are aligned on the right."""
    heads = "".join(f"<th{_kind(name, '', numbers)}>{name.lower()}</th>" for name in head)
    lines = (
        "".join(f"<td{_kind(name, cell, numbers)}>{cell}</td>" for name, cell in zip(head, row, strict=True))
        for row in rows
    )
    inner = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{inner}</tbody></table></div>'


def _kind(name: str, cell: str, numbers: Collection[str]) -> str:
    """Return the class of a cell; short text is not broken on a narrow screen, where the table scrolls instead."""
    return ' class="n"' if name in numbers else ' class="s"' if len(cell) <= _SHORT else ""


def section(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[str]) -> list[str]:
    """Return a heading and a table from cells of plain text; [] without rows."""
    cells = [list(map(text, row)) for row in rows]
    return [f"<h2>{text(title)}</h2>", table(head, cells, numbers)] if cells else []


def lines(of: Iterable[Line]) -> Iterator[str]:
    for line in of:
        if isinstance(line, Table):
            yield table([text(name) for name in line.head], [list(map(text, row)) for row in line.rows], line.right)
        elif line.strip():
            kind = "h2" if isinstance(line, Heading) else "p"
            yield f"<{kind}>{text(line.strip())}</{kind}>"


def text(of: str) -> str:
    """Return text as HTML; control characters, including those for text direction, are escaped."""
    return escape(of if of.isprintable() else escaped(of))
