"""A comparison as a page that needs no other file, no network and no script; every name in it is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from recckpt.inspect.diff import lines
from recckpt.text import count, escaped

if TYPE_CHECKING:
    from recckpt.inspect.diff.result import CheckpointDiff, Side, TableDiff

_STYLE = """
.recckpt-diff { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif; color: CanvasText; }
.recckpt-diff h1 { font-size: 1.4em; margin: 0 0 .4em; }
.recckpt-diff h2 { font-size: 1.1em; margin: 1.6em 0 .4em; }
.recckpt-diff p { margin: .2em 0; overflow-wrap: anywhere; }
.recckpt-diff .scroll { overflow-x: auto; }
.recckpt-diff table { border-collapse: collapse; font-size: .92em; font-variant-numeric: tabular-nums; }
.recckpt-diff th, .recckpt-diff td { padding: .25em .7em; border-bottom: 1px solid #8884; vertical-align: top; }
.recckpt-diff th { font-weight: 600; white-space: nowrap; text-align: left; }
.recckpt-diff td { text-align: left; overflow-wrap: anywhere; min-width: 4em; max-width: 22em; }
.recckpt-diff .n { text-align: right; white-space: nowrap; }
.recckpt-diff .bar { display: flex; height: .8em; min-width: 9em; border-radius: .2em; overflow: hidden; }
.recckpt-diff .bar i { display: block; }
.recckpt-diff .added { background: #2e9e5b; } .recckpt-diff .gone { background: #d1495b; }
.recckpt-diff .changed { background: #e09f3e; } .recckpt-diff .same { background: #8886; }
.recckpt-diff .key i { display: inline-block; width: .8em; height: .8em; border-radius: .2em; margin: 0 .3em 0 1em; }
"""
_HEAD = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<meta name="color-scheme" content="light dark">'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
)
_SHARES = ("added", "gone", "changed", "same")


def page_of(found: CheckpointDiff) -> str:
    """Return a whole page."""
    title = f"{_text(found.before.ckpt_id)} and {_text(found.after.ckpt_id)}"
    body = "<style>body { margin: 1.2em auto; max-width: 75em; padding: 0 1em; }</style>"
    return f"{_HEAD}<title>{title}</title></head><body>{body}{body_of(found)}</body></html>\n"


def body_of(found: CheckpointDiff) -> str:
    """Return what a notebook shows."""
    parts = [f"<h1>{_text(lines.verdict(found))}</h1>"]
    parts += [f"<p>{what} {_text(lines.side_text(side))}</p>" for what, side in _sides(found)]
    if found.tolerance:
        parts.append(f"<p>tolerance {found.tolerance:g}</p>")
    if found.tables:
        key = " ".join(f'<i class="{share}"></i>{share}' for share in _SHARES)
        rows = ([*map(_text, lines.table_row(table)), _bar(table)] for table in found.tables)
        parts += ["<h2>Tables</h2>", _table((*lines.TABLE_HEAD, "ROWS"), rows), f'<p class="key">{key}</p>']
    tensors = [each for each in found.tensors if each.status != "same"]
    values = [each for each in found.values if each.status != "same"]
    parts += _section("How far rows moved that changed", lines.SLOT_HEAD, lines.slot_rows(found.tables))
    parts += _section("Embeddings that moved most", lines.MOVED_HEAD, lines.moved_rows(found.tables))
    parts += _section("Dense tensors", lines.TENSOR_HEAD, map(lines.tensor_row, tensors))
    parts += _section("All else", lines.VALUE_HEAD, map(lines.value_row, values))
    if any(each.status == "unclear" for each in values):
        parts.append(f"<p>{_text(lines.UNCLEAR)}</p>")
    return f'<style>{_STYLE}</style><div class="recckpt-diff">{"".join(parts)}</div>'


def _sides(found: CheckpointDiff) -> Iterable[tuple[str, Side]]:
    return ("before:", found.before), ("after:", found.after)


def _bar(table: TableDiff) -> str:
    """Return the shares of the rows of a table as a bar."""
    counts = {share: getattr(table, share) for share in _SHARES}
    total = max(1, sum(counts.values()))
    shares = (
        f'<i class="{share}" style="width:{100 * n / total:.2f}%" title="{share}: {count(n)}"></i>'
        for share, n in counts.items()
        if n
    )
    return f'<div class="bar">{"".join(shares)}</div>'


def _section(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [list(map(_text, row)) for row in rows]
    return [f"<h2>{title}</h2>", _table(head, cells)] if cells else []


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are HTML already."""
    kinds = [' class="n"' if name in lines.NUMBERS else "" for name in head]
    heads = "".join(f"<th{kind}>{name.lower()}</th>" for name, kind in zip(head, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _text(text: str) -> str:
    """Return text as HTML; control characters, and such as turn the direction of text, as escapes."""
    return escape(text if text.isprintable() else escaped(text))
