"""A comparison as a page that needs no other file, no network and no script; every name in it is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from recckpt.inspect.diff import lines
from recckpt.inspect.diff.result import Differences, Side, TableDiff
from recckpt.text import count, escaped, html

_STYLE = """
.recckpt.diff .bar { display: flex; height: .8em; min-width: 9em; border-radius: .2em; overflow: hidden; }
.recckpt.diff .bar i { display: block; }
.recckpt.diff .added { background: #2e9e5b; } .recckpt.diff .gone { background: #d1495b; }
.recckpt.diff .changed { background: #e09f3e; } .recckpt.diff .same { background: #8886; }
.recckpt.diff .key i { display: inline-block; width: .8em; height: .8em; border-radius: .2em; margin: 0 .3em 0 1em; }
.recckpt.diff .key i:first-child { margin-left: 0; }
"""
_SHARES = ("added", "gone", "changed", "same")


def page_of(diff: Differences) -> str:
    """Return a whole page."""
    return html.page(f"{escaped(diff.before.ckpt_id)} and {escaped(diff.after.ckpt_id)}", body_of(diff))


def body_of(diff: Differences) -> str:
    """Return what a notebook shows."""
    parts = [f"<h1>{html.text(lines.verdict(diff))}</h1>"]
    parts += [f"<p>{what} {html.text(lines.side_text(side))}</p>" for what, side in _sides(diff)]
    if diff.tolerance:
        parts.append(f"<p>tolerance {diff.tolerance:g}</p>")
    if diff.tables:
        key = " ".join(f'<i class="{share}"></i>{share}' for share in _SHARES)
        rows = ([*map(html.text, lines.table_row(table)), _bar(table)] for table in diff.tables)
        parts += ["<h2>Tables</h2>", html.table((*lines.TABLE_HEAD, "ROWS"), rows, lines.NUMBERS)]
        parts.append(f'<p class="key">{key}</p>')
    section = partial(html.section, numbers=lines.NUMBERS)
    tensors = [each for each in diff.tensors if each.status != "same"]
    values = [each for each in diff.values if each.status != "same"]
    parts += section("How far rows moved that changed", lines.SLOT_HEAD, lines.slot_rows(diff.tables))
    parts += section("Embeddings that moved most", lines.MOVED_HEAD, lines.moved_rows(diff.tables))
    parts += section("Dense tensors", lines.TENSOR_HEAD, map(lines.tensor_row, tensors))
    parts += section("All else", lines.VALUE_HEAD, map(lines.value_row, values))
    if any(each.status == "unclear" for each in values):
        parts.append(f"<p>{html.text(lines.UNCLEAR)}</p>")
    return html.body("diff", parts, _STYLE)


def _sides(diff: Differences) -> Iterable[tuple[str, Side]]:
    return ("before:", diff.before), ("after:", diff.after)


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
