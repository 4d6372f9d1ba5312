"""``recckpt.inspect.history``: follows rows of a table through the checkpoints of a run, by reading only changes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from recckpt.checkpoint.chain import OpenLink
from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.format.buckets import distinct
from recckpt.inspect.distances import squares
from recckpt.inspect.find import refuse_checkpoint
from recckpt.output_dir.forget_requests import forgotten_among
from recckpt.output_dir.index_file import why_nothing
from recckpt.output_dir.listing import Checkpoint, Listing, look_around
from recckpt.output_dir.open_files import first_whole
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.arrow_format import column_values, ids_in
from recckpt.sparse.files.catalogs import IdSet
from recckpt.sparse.files.chain_table import AskedTable, as_ids
from recckpt.sparse.files.pieces import Int64s
from recckpt.sparse.files.table_reader import DELETED
from recckpt.storage import Storage, open_storage
from recckpt.text import Line, Table, cell, escaped, html, nearest, one_line, plain, plural, section
from recckpt.text.columns import Tone
from recckpt.types import EMBEDDING

_THREADS = 8
_HEAD = ("CHECKPOINT", "STEP", "ROW", "SINCE STEP", "NORM", "MOVED")
_TONES: dict[str, Tone] = {"changed": "newest", "new": "good", "back": "good", "gone": "past", "damaged": "damaged"}

Change = Literal["there", "new", "changed", "same", "gone", "back", "absent", "damaged"]
StoredRow = Mapping[str, npt.NDArray[Any]]  # slot -> its values, bfloat16 as float32


@dataclass(frozen=True)
class RowAt:
    ckpt_id: str  # the checkpoint
    step: int | None  # global step; None if the saver does not count steps
    time: str  # time of the commit, in UTC, as ISO 8601
    # the row's change since the previous checkpoint: ``"new"``; ``"changed"``: a value of any slot differs;
    # ``"same"``; ``"gone"``; ``"back"``: present again; ``"absent"``: still not present.
    # ``"there"`` or ``"absent"`` in the oldest checkpoint; ``"damaged"`` if a file needed to compare is damaged.
    change: Change
    # the oldest checkpoint since which the row is unchanged; None if the row is absent
    since: str | None = None
    since_step: int | None = None  # step of that checkpoint
    # Euclidean norm of the embedding; NaN if a value is not finite, None if the row is absent
    norm: float | None = None
    moved: float | None = None  # Euclidean distance that a changed embedding moved
    # other slots: a single number's value, else the norm
    slots: Mapping[str, float] | None = None


@dataclass(frozen=True)
class RowHistory:
    id: int  # id of the row
    states: tuple[RowAt, ...]  # the row in each checkpoint, oldest first
    was_forgotten: bool = False  # whether the audit lists a request to forget the id

    @property
    def is_known(self) -> bool:
        return any(state.norm is not None for state in self.states)


@dataclass(frozen=True, repr=False)
class TableHistory:
    """Rows of a table over the checkpoints of a run; prints as ``recckpt history``, or as tables in notebooks.

    Attributes:
        url: the output dir.
        table: name of the table.
        rows: one per requested id, in the order of the request.
        damage: directory of a checkpoint -> what is wrong with the checkpoint or with a link of its chain.
    """

    url: str
    table: str
    rows: tuple[RowHistory, ...]
    damage: Mapping[str, str]

    def row(self, id_: int) -> RowHistory:
        return {row.id: row for row in self.rows}[id_]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(plain(lines_of(self)))

    def __repr__(self) -> str:
        return f"<TableHistory {self.url!r}: {plural(len(self.rows), 'row')} of table {escaped(self.table)}>"

    def _repr_html_(self) -> str:
        return html.body("history", html.lines(lines_of(self)), "")


def history(
    path: str | os.PathLike[str], table: str, ids: Iterable[int] | npt.NDArray[np.integer[Any]]
) -> TableHistory:
    """Return the history of rows over all kept checkpoints of a run: their norms, changes, counts and moments.

    From each checkpoint's own files, which for a delta have only changes, reads the catalogs and the batches that may
    contain the ids, each once. Every byte read is checked. Damage is reported, and hides only the checkpoints that need
    the damaged file. Imports no torch. Prints as the text of ``recckpt history``.

    Args:
        path: an output dir; any fsspec URL.
        table: name of the table.
        ids: int64 numbers; a repeated id is looked up once.

    Raises:
        TypeError: ``ids`` are not int64 numbers.
        CheckpointNotFoundError: there is no usable checkpoint, or ``path`` is a checkpoint.
        KeyError: no checkpoint has this table.
        CheckpointRemovedError: the writer removed a checkpoint during each of several reads.
    """
    asked, storage = as_ids(ids), open_storage(os.fspath(path))
    return first_whole(lambda: look_around(storage), partial(_history, storage, table, asked))


def _history(storage: Storage, table: str, asked: Int64s, listing: Listing) -> TableHistory:
    checkpoints = listing.current
    for newer in listing.damaged.values():
        if isinstance(newer, FormatVersionError):  # its contents are unknown here
            raise newer
    if not checkpoints:
        for error in (*listing.damaged.values(), *listing.unreadable.values()):
            raise error
        refuse_checkpoint(storage.url)
        raise CheckpointNotFoundError(f"{storage.url}: {why_nothing(storage)}")
    names = {entry.name for checkpoint in checkpoints for entry in checkpoint.manifest.tables}
    if table not in names:
        raise KeyError(f"{storage.url}: found no table {table!r} in any checkpoint{nearest(table, sorted(names))}")
    ids, links = distinct(asked), {link.directory: link for each in checkpoints for link in each.links}
    read = partial(_named_rows, storage, table=table, ids=ids)
    of_links = dict(zip(links, run_all(read, links.values(), storage.threads(_THREADS)), strict=True))
    damage = {directory: of_link for directory, of_link in of_links.items() if isinstance(of_link, str)}
    damage |= {directory: str(error) for directory, error in (listing.damaged | listing.unreadable).items()}
    try:
        forgotten = forgotten_among(storage, table, ids)
    except CorruptCheckpointError as error:
        forgotten, damage = set(), damage | {error.path: str(error)}
    rows = (
        RowHistory(id_, tuple(_states(id_, checkpoints, table, of_links)), id_ in forgotten)
        for id_ in dict.fromkeys(asked.tolist())
    )
    return TableHistory(storage.url, table, tuple(rows), damage)


NamedRows = Mapping[int, StoredRow | None]  # id -> row, None if the id is deleted


def _named_rows(storage: Storage, checkpoint: Checkpoint, table: str, ids: Int64s) -> NamedRows | str:
    """Return the rows of sorted, distinct ids in a checkpoint's own files, or the reason why they are unknown.

    Batches that cannot contain the ids are not read. CheckpointRemovedError if the writer removes the checkpoint.
    """
    entry = checkpoint.manifest.table(table)
    if entry is None:
        return {}
    try:
        reader = OpenLink.of(storage, checkpoint).reader(table, [slot.name for slot in entry.slots], IdSet(ids))
        asked = AskedTable(reader)
        places = asked.find(ids)
    except CorruptCheckpointError as error:
        return str(error)
    named: dict[int, StoredRow | None] = dict.fromkeys(ids[places == DELETED].tolist())
    for batch in asked.batches:
        columns = {slot.name: column_values(batch.column(slot.name), slot) for slot in entry.slots}
        for n, id_ in enumerate(ids_in(batch).tolist()):
            named[id_] = {name: np.array(values[n]) for name, values in columns.items()}
    return named


def _states(
    id_: int, checkpoints: Sequence[Checkpoint], table: str, links: Mapping[str, NamedRows | str]
) -> Iterator[RowAt]:
    """Yield one row's state in each checkpoint, oldest first, from the rows in the files of the chain's links."""
    before: StoredRow | None = None
    since: Checkpoint | None = None
    was_there, is_first = False, True
    for checkpoint in checkpoints:
        manifest = checkpoint.manifest
        head = (manifest.ckpt_id, manifest.step, manifest.time)
        row = _row_in(checkpoint, table, id_, links)
        if isinstance(row, str):
            yield RowAt(*head, "damaged")
            continue
        if row is None:
            yield RowAt(*head, "absent" if before is None else "gone")
            since = None
        elif before is not None and _is_same(before, row):
            yield _row_at(head, "same", row, since)
        else:
            change: Change = (
                "changed" if before is not None else "there" if is_first else "back" if was_there else "new"
            )
            since = checkpoint
            yield _row_at(head, change, row, since, before)
        before, is_first, was_there = row, False, was_there or row is not None


def _row_in(
    checkpoint: Checkpoint, table: str, id_: int, links: Mapping[str, NamedRows | str]
) -> StoredRow | str | None:
    """Return the row in the newest link that has its id; None if no link has it, a text if a link is damaged."""
    for link in checkpoint.links:
        entry, named = link.manifest.table(table), links[link.directory]
        if entry is None:
            return None
        if isinstance(named, str):
            return named
        if id_ in named or entry.is_whole:
            return named.get(id_)
    return None


def _is_same(one: StoredRow, other: StoredRow) -> bool:
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype
        and value.shape == other[name].shape
        and value.tobytes() == other[name].tobytes()
        for name, value in one.items()
    )


def _row_at(
    head: tuple[str, int | None, str],
    change: Change,
    row: StoredRow,
    since: Checkpoint | None,
    before: StoredRow | None = None,
) -> RowAt:
    embedding, moved = row[EMBEDDING], None
    if before is not None and before[EMBEDDING].shape == embedding.shape:
        with np.errstate(all="ignore"):
            moved = _norm(embedding.astype(np.float64) - before[EMBEDDING].astype(np.float64))
    slots = {name: _norm(value) if value.ndim else value.item() for name, value in row.items() if name != EMBEDDING}
    since_id, since_step = (None, None) if since is None else (since.ckpt_id, since.manifest.step)
    return RowAt(*head, change, since_id, since_step, _norm(embedding), moved, slots)


def _norm(values: npt.NDArray[Any]) -> float:
    return float(np.sqrt(squares(np.reshape(values, (1, -1))), dtype=np.float64)[0]) if np.size(values) else 0.0


def lines_of(history: TableHistory) -> list[Line]:
    lines: list[Line] = []
    for row in history.rows:
        forgotten = ", which was asked to be forgotten" if row.was_forgotten else ""
        lines += section(f"{escaped(history.table)} {row.id}{forgotten}", _lines_of_row(row))
    broken = [f"{escaped(directory)}: {one_line(reason)}" for directory, reason in history.damage.items()]
    return [*lines, *section("damaged", broken)][1:]


def _lines_of_row(row: RowHistory) -> Iterator[Line]:
    if not row.is_known and all(state.change == "absent" for state in row.states):
        yield f"in none of {plural(len(row.states), 'checkpoint')}"
        return
    slots = list(dict.fromkeys(name for state in row.states for name in state.slots or ()))
    rows = []
    for state in row.states:
        values = [state.norm, state.moved, *((state.slots or {}).get(name) for name in slots)]
        step, since = ("-" if step is None else str(step) for step in (state.step, state.since_step))
        shown = ("-" if value is None else cell(value) for value in values)
        rows.append([escaped(state.ckpt_id), step, state.change, since, *shown])
    head = (*_HEAD, *map(escaped, slots))
    tones = {number: _TONES[state.change] for number, state in enumerate(row.states) if state.change in _TONES}
    yield Table(head, rows, (*_HEAD[3:], "STEP", *map(escaped, slots)), tones)
