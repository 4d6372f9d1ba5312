"""The tables of a checkpoint read once, every byte checked: part by part, of a chain link by link (no torch here)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import pyarrow as pa

from recckpt.checkpoint.chain import OpenChain
from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.buckets import N_BUCKETS
from recckpt.format.catalog import Batch, Catalog, Part
from recckpt.format.tables import TableEntry
from recckpt.inspect.diff.distances import numbers
from recckpt.inspect.report.damage import damage_text
from recckpt.inspect.report.result import TableHealth
from recckpt.inspect.report.row_counts import RowCounts, TakenAt
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.arrow_format import ID_SPEC, column_buffer
from recckpt.sparse.files.id_check import repeated_between_shards
from recckpt.sparse.files.link_cursors import LinkCursor, Piece, bucket_ranges, row_of
from recckpt.sparse.files.merged_rows import check_count, current_rows
from recckpt.sparse.files.once import Int64s
from recckpt.sparse.files.part_reader import PartReader
from recckpt.sparse.files.table_reader import TableReader
from recckpt.sparse.files.verifier import PartCheck, between_parts, check_part
from recckpt.types import SlotSpec

_CHUNK_ROWS, _CHUNK_BYTES = 1 << 15, 8 << 20  # that are looked at at once, at most
_SLICE_ROWS = 1 << 18  # of a table of a chain, worth a thread
_MERGE_BYTES = 256 << 20  # of all threads

Advance = Callable[[int], object]


def read_tables(opened: OpenChain, clock: TakenAt, threads: int, advance: Advance) -> list[TableHealth]:
    """Return how the tables of a checkpoint are; what is damaged is said of each, and left out of its figures."""
    read = _read_parts if len(opened.checkpoint.links) == 1 else _read_chain
    return list(read(opened, clock, threads, advance))


def _read_parts(opened: OpenChain, clock: TakenAt, threads: int, advance: Advance) -> Iterator[TableHealth]:
    """Read a full checkpoint: its parts, one a thread."""
    tables = opened.manifest.tables
    [link] = opened.links
    try:
        catalogs = link.catalogs
    except (CorruptCheckpointError, OSError) as error:
        yield from (_unread(table, error) for table in tables)
        return
    parts = [part for catalog in catalogs for part in catalog.parts]
    found = run_all(partial(_read_part, opened, clock, advance), parts, threads)
    checks = {part.file: check for part, (check, _) in zip(parts, found, strict=True)}
    damage = _Damage(opened, catalogs, checks)
    for table in tables:
        counts = RowCounts(table, clock)
        for _, counted in found:
            if table.name in counted:
                counts.merge(counted[table.name])
        yield counts.result(damage.of(table))


def _read_part(
    opened: OpenChain, clock: TakenAt, advance: Advance, part: Part
) -> tuple[PartCheck, dict[str, RowCounts]]:
    manifest, [link] = opened.manifest, opened.links
    counts: dict[str, RowCounts] = {}

    def seen(batch: Batch, values: pa.RecordBatch) -> None:
        entry = manifest.named_table(batch.table)
        columns = [(spec, values.column(spec.name)) for spec in (ID_SPEC, *entry.slots)]
        piece = [np.frombuffer(column_buffer(column), row_of(spec)) for spec, column in columns]
        counted = counts.setdefault(batch.table, RowCounts(entry, clock))
        _count(counted, entry.slots, piece, np.arange(batch.rows))
        advance(values.nbytes)

    entries = [entry for name in part.tables if (entry := manifest.table(name))]
    return check_part(link.files, opened.directory, entries, part, seen), counts


class _Damage:
    """What is wrong with the files of a full checkpoint."""

    def __init__(self, opened: OpenChain, catalogs: Sequence[Catalog], checks: Mapping[str, PartCheck]) -> None:
        self._opened, self._catalogs, self._checks = opened, catalogs, checks
        between = [list(between_parts(checks[part.file] for part in catalog.parts)) for catalog in catalogs]
        self._between = [error for errors in between for error in errors]

    def of(self, table: TableEntry) -> tuple[str, ...]:
        """Return what is wrong with the files in which a table lies, and with its ids."""
        parts = {part.file for catalog in self._catalogs for part in catalog.parts if table.name in part.tables}
        errors = [error for name in sorted(parts) for error in self._checks[name].errors]
        paths = {self._checks[name].path for name in parts}
        errors += [error for error in self._between if error.path in paths]
        if not errors:
            [link], directory = self._opened.links, self._opened.directory
            errors += repeated_between_shards(link.files, directory, table, self._catalogs)
        return tuple(map(damage_text, errors))


def _read_chain(opened: OpenChain, clock: TakenAt, threads: int, advance: Advance) -> Iterator[TableHealth]:
    """Read a delta and what it stands on: table by table, a range of buckets a thread."""
    frames: dict[str, tuple[str, ...]] = {}
    for table in opened.manifest.tables:
        try:
            chain = opened.table(table.name, [slot.name for slot in table.slots]).links
            n_slices = max(1, min(threads, table.rows // _SLICE_ROWS))
            borders = [N_BUCKETS * n // n_slices for n in range(n_slices + 1)]
            work = partial(_read_slice, chain, clock, _MERGE_BYTES // n_slices, advance)
            first, *others = run_all(work, list(pairwise(borders)), threads)
            for other in others:
                first.merge(other)
            check_count(chain[0], first.n_rows)
            damage = _frame_damage(chain, frames)
        except (CorruptCheckpointError, OSError) as error:
            yield _unread(table, error)
        else:
            yield first.result(damage)


def _frame_damage(chain: Sequence[TableReader], known: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return what is wrong between the values of the parts of a table, each looked at once for all of its tables.

    Of files that are not mapped it would all have to be read again, which a restore does not either.
    """
    found: list[str] = []
    for link in chain:
        for part in (part for catalog in link.catalogs for part in catalog.parts if link.entry.name in part.tables):
            path = layout.join(link.directory, part.file)
            if path not in known:
                known[path] = _of_frame(link, part, link.storage.map(path))
            found += known[path]
    return tuple(found)


def _of_frame(link: TableReader, part: Part, mapped: memoryview | None) -> tuple[str, ...]:
    slots = link.entry.slots if part.holds == "rows" else ()
    try:
        if mapped is not None:
            PartReader(link.storage, link.directory, part, slots, mapped=mapped).check_frame()
    except CorruptCheckpointError as error:
        return (damage_text(error),)
    return ()


def _read_slice(
    chain: Sequence[TableReader], clock: TakenAt, budget_bytes: int, advance: Advance, buckets: tuple[int, int]
) -> RowCounts:
    entry, specs = chain[0].entry, chain[0].specs
    counts, cursors = RowCounts(entry, clock), [LinkCursor(link, buckets) for link in chain]
    for within in bucket_ranges(chain, buckets, budget_bytes * 3 // 4):
        for piece, _, rows in current_rows(cursors, within):
            _count(counts, specs, piece, rows)
            advance(len(rows) * entry.row_bytes)
    return counts


def _count(counts: RowCounts, slots: Sequence[SlotSpec], piece: Piece, rows: Int64s) -> None:
    """Count some rows of a piece, which are in order."""
    if not len(rows):
        return
    step = max(1, min(_CHUNK_ROWS, _CHUNK_BYTES // sum(column.itemsize for column in piece)))
    firsts = np.arange(0, len(piece[0]), step)
    for first, some in zip(firsts, np.split(rows, np.searchsorted(rows, firsts[1:])), strict=True):
        chunk = [column[first : first + step] for column in piece]
        values = {slot.name: numbers(column, slot) for slot, column in zip(slots, chunk[1:], strict=True)}
        counts.add(chunk[0].view(np.int64), values, slice(None) if len(some) == len(chunk[0]) else some - first)


def _unread(table: TableEntry, error: Exception) -> TableHealth:
    return TableHealth(table.name, table.rows, table.row_bytes, damage=(damage_text(error),))
