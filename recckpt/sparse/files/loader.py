"""Arrow parts to tables: read only what is wanted, check it, find the rows once, copy the slots."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recckpt.errors import CheckpointRemovedError, CorruptCheckpointError, PartlyLoadedError
from recckpt.format.buckets import bucket_of
from recckpt.format.catalog import Batch, Part
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.arrow_format import ID, ids_in
from recckpt.sparse.files.id_check import check_range
from recckpt.sparse.files.known_ids import LinkDeletes
from recckpt.sparse.files.load_target import LinkLoad
from recckpt.sparse.files.once import named_twice
from recckpt.sparse.files.part_reader import PartReader
from recckpt.sparse.files.table_fill import TableFiller
from recckpt.sparse.table.kernels import first_outside
from recckpt.types import SlotSpec

log = logging.getLogger("recckpt")
_RUN_BATCHES = 16  # batches that one thread reads before it takes the next run

Take = Callable[[TableFiller, Mapping[str, pa.Array], str], None]


@dataclass(frozen=True)
class Loaded:
    """What a load did, by table of the model."""

    rows_taken: Mapping[str, int]
    rows_filtered: Mapping[str, int]  # that a filter left out
    slot_rows: Mapping[tuple[str, str], int]  # by table and slot, the ids being one: rows of which it was loaded
    bytes_read: int  # of column values, all checked


def load_tables(
    links: Sequence[LinkLoad],
    *,
    concurrency: int,
    advance: Callable[[int], object],
    when_checked: Callable[[], object],
) -> Loaded:
    """Fill tables with the rows of checkpoints that their slices own, each chain link by link, newest first.

    Rows come first, then slots that come from elsewhere for the rows that are there. Each table is made large enough
    before several threads fill it; there is never a second copy of it. Where a table has rows to lose, everything is
    read and checked before any table changes. ``when_checked`` is called once all bytes have been, while all tables can
    still be as they were; ``advance`` with the bytes of each batch and table, from several threads.

    Raises:
        Exception: what ``when_checked`` raised; the tables are as they were.
        CorruptCheckpointError: a file is damaged. The tables are as they were.
        CheckpointRemovedError: a file was removed meanwhile. Tables that were to be emptied may be empty.
        PartlyLoadedError: reading failed when tables with rows had been changed; says which.
    """

    def fill(filler: TableFiller, columns: Mapping[str, pa.Array], path: str) -> None:
        filler.fill(columns, path)
        advance(len(columns[ID]) * filler.load.row_bytes)

    loads = {id(load): load for link in links for load in link.tables}
    targets = {id(load.target): load.target for load in loads.values()}
    for target in targets.values():
        target.begin()
    by_load = {key: TableFiller(load) for key, load in loads.items()}
    passes = [LinkPass(link, with_rows, by_load) for with_rows in (True, False) for link in links]
    fillers = list(by_load.values())
    has_rows, bytes_read = any(len(filler.load.table) for filler in fillers), 0
    if has_rows:
        bytes_read += sum(one.run(TableFiller.check, concurrency) for one in passes)
        when_checked()
    try:
        with _undone_on_error(fillers):
            for one in passes:
                one.start()
                bytes_read += one.run(fill, concurrency)
            if not has_rows:
                when_checked()
            for target in targets.values():
                target.finish()
    finally:
        for filler in reversed(fillers):
            filler.end()
    return _counted(fillers, bytes_read)


@contextmanager
def _undone_on_error(fillers: Sequence[TableFiller]) -> Iterator[None]:
    """After an error, empty what was to be emptied, and say which tables are no longer what they were."""
    try:
        yield
    except BaseException as error:
        for filler in fillers:
            filler.undo()
        changed = [filler.load.table for filler in fillers if filler.is_changed]
        emptied = sorted({table.name for table in changed if not len(table)})
        mixed = sorted({table.name for table in changed if len(table)})
        if not changed:
            raise
        if isinstance(error, CheckpointRemovedError) and not mixed:
            raise CheckpointRemovedError(error.path, emptied=emptied) from error
        partly = PartlyLoadedError(f"{type(error).__name__}: {error}", emptied=emptied, mixed=mixed)
        if isinstance(error, Exception):
            raise partly from error
        log.error("%s", partly)  # an interrupt stays one
        raise


def _counted(fillers: Sequence[TableFiller], bytes_read: int) -> Loaded:
    taken, filtered = Counter[str](), Counter[str]()
    slot_rows: dict[tuple[str, str], int] = {}
    for filler in fillers:  # rows whose slots come from several checkpoints count once
        name = filler.load.table.name
        taken[name] = max(taken[name], filler.n_rows)
        filtered[name] = max(filtered[name], filler.n_filtered)
        slots = (*filler.load.slots, *([ID] if filler.load.with_rows else []))
        slot_rows |= {(name, slot): filler.n_rows for slot in slots}
    return Loaded(dict(taken), dict(filtered), slot_rows, bytes_read)


class LinkPass:
    """The tables that one link fills at one go."""

    def __init__(self, link: LinkLoad, with_rows: bool, by_load: Mapping[int, TableFiller]) -> None:
        self._link = link
        self._fillers: dict[str, list[TableFiller]] = {}
        for load in link.tables:
            if load.with_rows == with_rows:
                self._fillers.setdefault(load.entry.name, []).append(by_load[id(load)])
        runs = [run for shard, parts in enumerate(link.batches.parts) for run in self._runs(shard, parts)]
        self._rows = [run for run in runs if run.part.holds == "rows"]
        self._deletes = [run for run in runs if run.part.holds == "deletes"]
        parts = [part for parts in link.batches.parts for part in parts]
        self._whole_parts = [part for part in parts if part.batches and all(map(self._takers, part.batches))]
        rows = Counter[str]()
        for run in self._rows:
            for number in run.numbers:
                rows[run.part.batches[number].table] += run.part.batches[number].rows
        for filler in self._every:
            filler.expect(link.batches.directory, rows[filler.load.entry.name])

    @property
    def _every(self) -> list[TableFiller]:
        return [filler for some in self._fillers.values() for filler in some]

    def start(self) -> None:
        """Make room in the tables."""
        for filler in self._every:
            filler.start()

    def run(self, take: Take, concurrency: int) -> int:
        """Read what is wanted and have each filler take it; return the bytes that were read."""
        deletes, threads = LinkDeletes(), self._link.batches.files.threads(concurrency)
        for filler in self._every:
            filler.begin_link()
        n_bytes = sum(run_all(lambda run: self._read_deletes(run, deletes), self._deletes, threads))
        jobs = [partial(self._read_rows, run, deletes, take) for run in self._rows]
        jobs += [partial(self._check_frame, part) for part in self._whole_parts]  # last: they say less of what is wrong
        n_bytes += sum(run_all(lambda job: job(), jobs, threads))
        for table, fillers in self._fillers.items():
            for filler in fillers:
                filler.end_link(deletes.of(table))
        return n_bytes

    def _read_deletes(self, run: _BatchRun, deletes: LinkDeletes) -> int:
        n_bytes = 0
        for batch, columns, path in run.read(self._link, self._slots(run.part)):
            ids = ids_in(columns)
            _refuse(deletes.add(batch.table, run.shard, ids), batch, path)
            n_bytes += ids.nbytes
        return n_bytes

    def _read_rows(self, run: _BatchRun, deletes: LinkDeletes, take: Take) -> int:
        n_bytes = 0
        for batch, columns, path in run.read(self._link, self._slots(run.part)):
            ids = ids_in(columns)
            _refuse(deletes.among(batch.table, run.shard, ids), batch, path)
            for filler in self._fillers[batch.table]:
                take(filler, columns, path)
            n_bytes += sum(array.nbytes for array in columns.values())
        return n_bytes

    def _check_frame(self, part: Part) -> int:
        """Check what lies between the values of a part that is read as a whole; return 0, for it reads no values."""
        self._link.batches.check_frame(part, self._slots(part))
        return 0

    def _slots(self, part: Part) -> Sequence[SlotSpec]:
        """Return the slots of all tables in a part that has rows for somebody."""
        if part.holds == "deletes":
            return ()
        return next(filler for batch in part.batches for filler in self._takers(batch)).load.entry.slots

    def _takers(self, batch: Batch) -> list[TableFiller]:
        return [filler for filler in self._fillers.get(batch.table, ()) if filler.load.wants(batch)]

    def _runs(self, shard: int, parts: Sequence[Part]) -> Iterator[_BatchRun]:
        for part in parts:
            by_columns: dict[frozenset[str], list[int]] = {}
            for number, batch in enumerate(part.batches):
                takers = self._takers(batch)
                if takers:
                    columns = frozenset[str]().union(*(filler.load.columns for filler in takers))
                    by_columns.setdefault(columns, []).append(number)
            for columns, numbers in by_columns.items():
                for begin in range(0, len(numbers), _RUN_BATCHES):
                    yield _BatchRun(shard, part, columns, numbers[begin : begin + _RUN_BATCHES])


@dataclass(frozen=True)
class _BatchRun:
    """Some batches of one part, read by one thread."""

    shard: int
    part: Part
    columns: frozenset[str]
    numbers: list[int]

    def read(self, link: LinkLoad, slots: Sequence[SlotSpec]) -> Iterator[tuple[Batch, Mapping[str, pa.Array], str]]:
        """Yield (batch, checked columns, path of the file)."""
        for number, columns, reader in link.batches.read(self.part, self.numbers, slots, self.columns):
            _check_buckets(ids_in(columns), reader, number)
            yield self.part.batches[number], columns, reader.path


def _check_buckets(ids: npt.NDArray[np.int64], reader: PartReader, number: int) -> None:
    """Check that the ids are of the buckets, and in the range, by which readers choose their batches."""
    buckets = reader.part.batches[number].buckets
    at = first_outside(ids, *buckets)
    if at >= 0:
        stray = f"id {ids[at]} of bucket {bucket_of(ids[at : at + 1])[0]}"
        raise reader.damage(number, stray, f"ids of buckets {list(buckets)}")
    for found, expected in check_range(ids, reader.part.batches[number]):
        raise reader.damage(number, found, expected)


def _refuse(twice: npt.NDArray[np.int64], batch: Batch, path: str) -> None:
    """Refuse ids that are twice in one shard."""
    if len(twice):
        found, expected = named_twice(twice)
        raise CorruptCheckpointError(path, f"table {batch.table!r}", found=found, expected=expected)
