"""Reads the tables of a checkpoint once, checks every byte, and gathers statistics of the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from recckpt.checkpoint.chain import OpenChain
from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.buckets import N_BUCKETS
from recckpt.format.catalog import Batch
from recckpt.format.tables import TableEntry
from recckpt.inspect.distances import numbers, squares
from recckpt.inspect.report_result import EXPLODING, Distribution, LargeRow, TableHealth
from recckpt.inspect.spread import Floats, Histogram
from recckpt.inspect.verify_checkpoint import Checkup
from recckpt.parallel.threads import run_all
from recckpt.policies.evict import COUNT, LAST_STEP, LAST_TIME
from recckpt.sparse.files.merged_rows import LinkCursor, bucket_ranges, check_count, current_rows
from recckpt.sparse.files.part_reader import PartReader
from recckpt.sparse.files.pieces import Int64s, RowPiece
from recckpt.sparse.files.table_reader import TableReader
from recckpt.sparse.files.verifier import PartCheck, VerifyTask, check_part
from recckpt.storage.base import Files
from recckpt.types import EMBEDDING, is_optimizer_slot

BUSY_SHARE = 0.8  # share of the look-ups

_CHUNK_BYTES = 1 << 22  # bytes of rows to check and count at once, within the caches of a core
_SLICE_ROWS = 1 << 18  # least rows of a chain's table for each thread
_MERGE_BYTES = 256 << 20  # memory of all threads
_NAMED_ROWS = 5
_BARS = 40
_DAY_SEC = 86_400

Array = npt.NDArray[Any]
Advance = Callable[[int], object]
Clock = tuple[int | None, float | None]  # step and Unix time of a checkpoint
Rows = Int64s | slice  # row numbers, or slice(None) for all rows


def damage_text(error: Exception) -> str:
    """Return an error's message without the default remedy of CorruptCheckpointError."""
    return str(error).removesuffix(f"; {CorruptCheckpointError.REMEDY}")


def read_parts(look: Checkup, files: Files, clock: Clock, threads: int, advance: Advance) -> list[TableHealth]:
    """Read the parts of a full checkpoint, one part per thread; its other files have been checked.

    Damaged batches are listed with their table, and left out of the table's statistics.
    """
    tasks = list(look.part_tasks())
    catalogs = (layout.MANIFEST, *(shard.catalog for shard in look.record.shards))
    of_catalogs = {layout.join(look.directory, name) for name in catalogs}
    for error in look.errors:
        if error.path in of_catalogs:
            return [
                TableHealth(table.name, table.rows, table.row_bytes, damage=(damage_text(error),))
                for table in look.record.tables
            ]
    counts = {table.name: RowCounts(table, clock) for table in look.record.tables}
    results = run_all(partial(_read_part, files, clock, advance), tasks, threads)
    look.take_parts(checked for checked, _ in results)
    for _, counted in results:
        for name, each in counted.items():
            counts[name].merge(each)
    tables = []
    for table in look.record.tables:
        parts = (part for catalog in look.catalogs for part, _ in catalog.parts_of(table.name))
        paths = {layout.join(look.directory, part.file) for part in parts}
        errors = [error for error in look.errors if error.path in paths]
        errors = errors or list(TableReader(files, look.directory, look.catalogs, table, ()).repeats())
        tables.append(counts[table.name].result(map(damage_text, errors)))
    return tables


def _read_part(
    files: Files, clock: Clock, advance: Advance, task: VerifyTask
) -> tuple[PartCheck, dict[str, RowCounts]]:
    entries = {table.name: table for table in task.tables}
    counts: dict[str, RowCounts] = {}

    def visit(batch: Batch, piece: RowPiece) -> Callable[[], None]:
        so_far = counts.setdefault(batch.table, RowCounts(entries[batch.table], clock))
        counted = RowCounts(entries[batch.table], clock, so_far.least_named)
        counted.add_piece(piece, np.arange(batch.rows))

        def take() -> None:
            so_far.merge(counted)
            advance(piece.n_bytes)

        return take

    return check_part(files, task.directory, task.tables, task.part, visit), counts


def read_chain(opened: OpenChain, clock: Clock, threads: int, advance: Advance) -> Iterator[TableHealth]:
    """Read a delta and its bases, table by table, one range of buckets per thread; damage as in :func:`read_parts`."""
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
            yield TableHealth(table.name, table.rows, table.row_bytes, damage=(damage_text(error),))
        else:
            yield first.result(damage)


def _frame_damage(chain: Sequence[TableReader], known: dict[str, tuple[str, ...]]) -> list[str]:
    """Return the damage in the bytes between the values, for a table's parts; each part is checked once for all tables.

    Only mapped files are checked: unmapped files would have to be read again, and a restore does not check them either.
    """
    found: list[str] = []
    for link in chain:
        for part in (part for catalog in link.catalogs for part, _ in catalog.parts_of(link.entry.name)):
            path = layout.join(link.directory, part.file)
            if path not in known:
                known[path] = ()
                slots = link.entry.slots if part.holds == "rows" else ()
                try:
                    if link.storage.map(path) is not None:
                        PartReader(link.storage, link.directory, part, slots).check_frame()
                except CorruptCheckpointError as error:
                    known[path] = (damage_text(error),)
            found += known[path]
    return found


def _read_slice(
    chain: Sequence[TableReader], clock: Clock, budget_bytes: int, advance: Advance, buckets: tuple[int, int]
) -> RowCounts:
    entry = chain[0].entry
    counts, cursors = RowCounts(entry, clock), [LinkCursor(link, buckets) for link in chain]
    for within in bucket_ranges(chain, buckets, budget_bytes * 3 // 4):
        for piece, rows in current_rows(cursors, within):
            counts.add_piece(piece, rows)
            piece.end()
            advance(len(rows) * entry.row_bytes)
    return counts


class RowCounts:
    """Statistics of some rows of a table. Not thread-safe.

    Only rows with a norm above ``floor`` can be listed as the largest rows.
    """

    def __init__(self, entry: TableEntry, clock: Clock, floor: float = -1.0) -> None:
        self._floor = floor
        self._entry, (self._step, self._time) = entry, clock
        self._optimizer = [slot.name for slot in entry.slots if is_optimizer_slot(slot.name)]
        self._numbers = {name: Histogram() for name in ("norms", "counts", "ages_steps", "ages_days")}
        self._not_finite: dict[str, int] = {}
        self._not_finite_ids: list[int] = []
        self._largest: list[LargeRow] = []
        self.n_rows = self._dead = self._untrained = 0

    def add_piece(self, piece: RowPiece, rows: Int64s) -> None:
        """Add some rows of a piece with all slots; ``rows`` is sorted."""
        if not len(rows):
            return
        step = max(1, _CHUNK_BYTES // sum(column.itemsize for column in piece.columns))
        firsts = np.arange(0, len(piece.ids), step)
        for first, some in zip(firsts.tolist(), np.split(rows, np.searchsorted(rows, firsts[1:])), strict=True):
            end = min(first + step, len(piece.ids))
            values = {}
            for number, slot in enumerate(self._entry.slots, start=1):
                piece.pass_to(number, end)
                values[slot.name] = numbers(piece.columns[number][first:end], slot)
            self.add(piece.ids[first:end], values, slice(None) if len(some) == end - first else some - first)

    def add(self, ids: Int64s, columns: Mapping[str, Array], rows: Rows = slice(None)) -> None:
        """Count rows of columns with all slots, each of shape (rows, values). ``rows`` should select almost all rows.

        Computes sums over all rows and then selects, which is faster than to copy the selected rows.
        """
        ids = ids[rows]
        if not len(ids):
            return
        self.n_rows += len(ids)
        for slot in self._entry.slots:
            values = columns[slot.name]
            if slot.name in (COUNT, LAST_STEP, LAST_TIME) and not slot.shape:
                tracked = values[rows, 0]
                if slot.name == COUNT:
                    self._numbers["counts"].add(np.maximum(tracked, 0).astype(np.float64))
                elif slot.name == LAST_STEP and self._step is not None:
                    self._numbers["ages_steps"].add(np.maximum(self._step - tracked, 0).astype(np.float64))
                elif slot.name == LAST_TIME and self._time is not None:
                    self._numbers["ages_days"].add(np.maximum(self._time - tracked, 0.0) / _DAY_SEC + 0.0)  # never -0.0
            elif values.dtype.kind != "f":
                continue  # integers, such as counts of ids that wait for a row, have no norms and are always finite
            elif slot.name == EMBEDDING:
                sums = squares(values)[rows]
                self._add_not_finite(EMBEDDING, ids, sums)
                norms = np.sqrt(sums, dtype=np.float64)
                self._dead += len(norms) - int(np.count_nonzero(norms))
                self._numbers["norms"].add(norms)
                self._keep_largest(ids, norms)
            elif not np.isfinite(values).all():
                self._add_not_finite(slot.name, ids, squares(values)[rows])
        if self._optimizer:
            states = [columns[name] for name in self._optimizer]
            left = np.flatnonzero(states[0][rows, 0] == 0)  # few rows: the first value already excludes most
            left = left if isinstance(rows, slice) else rows[left]
            for state in states:
                left = left[(state[left] == 0).all(axis=1)]
            self._untrained += len(left)

    def _add_not_finite(self, slot: str, ids: Int64s, sums: Array) -> None:
        if np.isnan(sums.max()):
            wrong = np.flatnonzero(np.isnan(sums))
            self._name_not_finite(slot, len(wrong), map(int, ids[wrong[:_NAMED_ROWS]]))

    def _name_not_finite(self, slot: str, n_rows: int, ids: Iterable[int]) -> None:
        self._not_finite[slot] = self._not_finite.get(slot, 0) + n_rows
        self._not_finite_ids = list(dict.fromkeys([*self._not_finite_ids, *ids]))[:_NAMED_ROWS]

    @property
    def least_named(self) -> float:
        return self._largest[-1].norm if len(self._largest) == _NAMED_ROWS else self._floor

    def _keep_largest(self, ids: Int64s, norms: Floats) -> None:
        least = self.least_named
        if norms.max() <= least:  # also False for NaN
            return
        rows = np.flatnonzero(norms > least)
        if len(rows) > _NAMED_ROWS:
            rows = rows[np.argpartition(norms[rows], -_NAMED_ROWS)[-_NAMED_ROWS:]]
        self._merge_largest([LargeRow(int(ids[row]), float(norms[row])) for row in rows])

    def _merge_largest(self, rows: list[LargeRow]) -> None:
        self._largest = sorted([*self._largest, *rows], key=lambda row: (-row.norm, row.id))[:_NAMED_ROWS]

    def merge(self, other: RowCounts) -> None:
        self.n_rows += other.n_rows
        self._dead += other._dead
        self._untrained += other._untrained
        for name, histogram in self._numbers.items():
            histogram.merge(other._numbers[name])
        for slot, n_rows in other._not_finite.items():
            self._name_not_finite(slot, n_rows, other._not_finite_ids)
        self._merge_largest(other._largest)

    def result(self, damage: Iterable[str]) -> TableHealth:
        spreads = {name: histogram.spread() for name, histogram in self._numbers.items()}
        columns = {
            name: None if spread is None else Distribution(spread, self._numbers[name].bars(_BARS))
            for name, spread in spreads.items()
        }
        norms = columns["norms"]
        median = norms.spread.quantiles.get(0.5, 0.0) if norms else 0.0
        exploding = self._numbers["norms"].n_above(EXPLODING * median) if median > 0 else 0
        return TableHealth(
            self._entry.name,
            self._entry.rows,
            self._entry.row_bytes,
            rows_read=self.n_rows,
            damage=tuple(damage),
            **columns,
            not_finite=self._not_finite,
            not_finite_ids=tuple(self._not_finite_ids),
            dead=self._dead if norms else None,
            exploding=exploding if norms else None,
            untrained=self._untrained if self._optimizer else None,
            busy=self._numbers["counts"].n_that_carry(BUSY_SHARE) if columns["counts"] else None,
            largest=tuple(self._largest),
            is_live=self._entry.live is not None,
        )
