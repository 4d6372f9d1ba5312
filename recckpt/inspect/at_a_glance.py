"""What prompts and notebooks show of a checkpoint: by its manifest alone, so nothing is opened or read for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recckpt.checkpoint.chain import OpenChain
from recckpt.format.manifest import Manifest
from recckpt.text import cell, count, escaped, html, one_line, plural, size

_MOST = 20  # names in a line
_TABLE_HEAD = ("TABLE", "ROWS", "BYTES", "SLOTS")
_STATE_HEAD = ("NAME", "VALUE")
_STYLE = """
.recckpt.checkpoint h1 { font-size: 1.1em; } .recckpt.checkpoint .scroll { margin: .5em 0; }
.recckpt.checkpoint .scroll td:last-child { max-width: 34em; }
"""


def words_of(opened: OpenChain) -> str:
    """Return a checkpoint in one line."""
    manifest = opened.manifest
    place = one_line(opened.storage.url_of(opened.checkpoint.directory))
    content = f"{plural(manifest.rows, 'row')} in {plural(len(manifest.tables), 'table')}"
    return f"{place}: {_kind(opened)}, {content}, {size(manifest.n_bytes)}"


def body_of(opened: OpenChain) -> str:
    """Return a checkpoint as a notebook shows it."""
    manifest = opened.manifest
    parts = [f"<h1>{html.text(words_of(opened))}</h1>"]
    parts += html.section("Tables", _TABLE_HEAD, _table_rows(manifest), ("ROWS", "BYTES"))
    state = [(escaped(name), one_line(cell(value))) for name, value in manifest.state.items()]
    parts += html.section("Training state", _STATE_HEAD, state, ())
    names = manifest.names
    groups = {"dense": names.dense, "registered": names.extra, "positions": names.io_state}
    listed = ((group, _few(all_names)) for group, all_names in groups.items() if all_names)
    parts += [f"<p><strong>{group}:</strong> {html.text(few)}</p>" for group, few in listed]
    return html.body("checkpoint", parts, _STYLE)


def _kind(opened: OpenChain) -> str:
    manifest, n_links = opened.manifest, len(opened.checkpoint.links)
    links = f" of {plural(n_links, 'link')}" if n_links > 1 else ""
    step = "" if manifest.step is None else f", step {manifest.step}"
    return f"{manifest.kind}{links}{step}, {one_line(manifest.time)}"


def _table_rows(manifest: Manifest) -> Iterator[Sequence[str]]:
    for table in manifest.tables:
        slots = ", ".join(f"{escaped(slot.name)} {slot.kind}" for slot in table.slots)
        yield escaped(table.name), count(table.rows), size(table.rows * table.row_bytes), slots


def _few(names: Sequence[str]) -> str:
    more = f" and {count(len(names) - _MOST)} more" if len(names) > _MOST else ""
    return ", ".join(map(escaped, names[:_MOST])) + more
