"""Arrow parts to tables: read only what is wanted, check it, find the rows once, copy the slots."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from recckpt.errors import CheckpointRemovedError, CorruptCheckpointError, PartlyLoadedError
from recckpt.format import layout
from recckpt.format.buckets import bucket_of
from recckpt.format.catalog import Batch, Part
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.arrow_format import ID, column_buffer
from recckpt.sparse.files.part_reader import PartReader
from recckpt.sparse.files.table_fill import Filler, LoadTarget, TableLoad
from recckpt.sparse.table.kernels import first_outside
from recckpt.storage.base import Files

log = logging.getLogger("recckpt")

_RUN_BATCHES = 16  # batches that one thread reads before it takes the next run


@dataclass(frozen=True)
class CheckpointLoad:
    """What is taken of the checkpoint in ``directory``; a table of it may fill several."""

    tables: Sequence[TableLoad]
    parts: Sequence[Part]  # of all shards that may hold their rows
    storage: Files
    directory: str

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows in the columns that are read."""
        return sum(load.n_bytes for load in self.tables)

    def wanted_files(self) -> Iterator[str]:
        """Yield the files that have rows for the tables, by their slices."""
        for part in self.parts:
            loads = [(load, batch) for batch in part.batches for load in self.tables if load.entry.name == batch.table]
            if any(load.wants(batch) for load, batch in loads):
                yield layout.join(self.directory, part.file)


@dataclass(frozen=True)
class Loaded:
    """What a load did, by table of the model."""

    rows_taken: Mapping[str, int]
    rows_filtered: Mapping[str, int]  # that a filter left out
    bytes_read: int  # of column values, all checked


def load_tables(
    checkpoints: Sequence[CheckpointLoad],
    *,
    concurrency: int,
    advance: Callable[[int], object],
    when_checked: Callable[[], object],
) -> Loaded:
    """Fill tables with the rows of checkpoints that their slices own.

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

    def fill(filler: Filler, columns: Mapping[str, pa.Array], path: str) -> None:
        filler.fill(columns, path)
        advance(len(columns[ID]) * filler.load.row_bytes)

    targets = {id(load.table): LoadTarget(load.table) for checkpoint in checkpoints for load in checkpoint.tables}
    passes = [_Pass(checkpoint, with_rows, targets) for with_rows in (True, False) for checkpoint in checkpoints]
    fillers = [filler for one in passes for filler in one.every]
    has_rows, bytes_read = any(len(filler.load.table) for filler in fillers), 0
    if has_rows:
        bytes_read += sum(one.run(Filler.check, concurrency) for one in passes)
        when_checked()
    with _undone_on_error(fillers):
        for one in passes:
            one.start()
            bytes_read += one.run(fill, concurrency)
        if not has_rows:
            when_checked()
        for target in targets.values():
            target.finish()
    return _counted(fillers, bytes_read)


@contextmanager
def _undone_on_error(fillers: Sequence[Filler]) -> Iterator[None]:
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


def _counted(fillers: Sequence[Filler], bytes_read: int) -> Loaded:
    taken, filtered = Counter[str](), Counter[str]()
    for filler in fillers:  # rows whose slots come from several checkpoints count once
        name = filler.load.table.name
        taken[name] = max(taken[name], filler.n_rows)
        filtered[name] = max(filtered[name], filler.n_filtered)
    return Loaded(dict(taken), dict(filtered), bytes_read)


class _Pass:
    """The tables that one checkpoint fills at one go."""

    def __init__(self, checkpoint: CheckpointLoad, with_rows: bool, targets: Mapping[int, LoadTarget]) -> None:
        self._checkpoint = checkpoint
        self._fillers: dict[str, list[Filler]] = {}
        for load in checkpoint.tables:
            if load.with_rows == with_rows:
                self._fillers.setdefault(load.entry.name, []).append(Filler(load, targets[id(load.table)]))
        self._runs = list(_runs(checkpoint.parts, self._fillers))
        self._whole_parts = [part for part in checkpoint.parts if all(map(self._wants, part.batches))]

    @property
    def every(self) -> list[Filler]:
        """The fillers of all tables."""
        return [filler for some in self._fillers.values() for filler in some]

    def start(self) -> None:
        """Make room in the tables."""
        rows = Counter[str]()
        for run in self._runs:
            for number in run.numbers:
                rows[run.part.batches[number].table] += run.part.batches[number].rows
        for filler in self.every:
            filler.start(rows[filler.load.entry.name])

    def run(self, take: Callable[[Filler, Mapping[str, pa.Array], str], None], concurrency: int) -> int:
        """Read what is wanted and have each filler take it; return the bytes that were read."""

        def read(run: _Run) -> int:
            n_bytes = 0
            for batch, columns, path in run.read(self._checkpoint, self._fillers):
                for filler in self._fillers[batch.table]:
                    take(filler, columns, path)
                n_bytes += sum(array.nbytes for array in columns.values())
            return n_bytes

        jobs = [partial(read, run) for run in self._runs]
        jobs += [partial(self._check_frame, part) for part in self._whole_parts]  # last: they say less of what is wrong
        return sum(run_all(lambda job: job(), jobs, self._checkpoint.storage.threads(concurrency)))

    def _wants(self, batch: Batch) -> bool:
        return any(filler.load.wants(batch) for filler in self._fillers.get(batch.table, ()))

    def _check_frame(self, part: Part) -> int:
        """Check what lies between the values of a part that is read as a whole, and return the bytes of values read."""
        storage, directory = self._checkpoint.storage, self._checkpoint.directory
        mapped = storage.map(layout.join(directory, part.file))
        if mapped is not None and part.batches:  # without a map it would all have to be read again
            slots = self._fillers[part.batches[0].table][0].load.entry.slots
            PartReader(storage, directory, part, slots, mapped=mapped).check_frame()
        return 0


@dataclass(frozen=True)
class _Run:
    """Some wanted batches of one part, read by one thread."""

    part: Part
    columns: frozenset[str]
    numbers: list[int]

    def read(
        self, checkpoint: CheckpointLoad, fillers: Mapping[str, list[Filler]]
    ) -> Iterator[tuple[Batch, Mapping[str, pa.Array], str]]:
        """Yield (batch, checked columns, path of the file)."""
        slots = fillers[self.part.batches[self.numbers[0]].table][0].load.entry.slots
        reader = PartReader(checkpoint.storage, checkpoint.directory, self.part, slots, self.columns)
        for number in self.numbers:
            batch, columns = self.part.batches[number], reader.read(number)
            _check_buckets(columns[ID], batch, number, reader.path)
            yield batch, columns, reader.path


def _check_buckets(ids: pa.Array, batch: Batch, number: int, path: str) -> None:
    """Check that the ids are of the buckets by which readers choose their batches."""
    values = np.frombuffer(column_buffer(ids), np.int64)
    at = first_outside(values, *batch.buckets)
    if at >= 0:
        found = f"id {values[at]} of bucket {bucket_of(values[at : at + 1])[0]}"
        where = f"batch {number} (table {batch.table!r})"
        raise CorruptCheckpointError(path, where, found=found, expected=f"ids of buckets {list(batch.buckets)}")


def _runs(parts: Sequence[Part], fillers: Mapping[str, list[Filler]]) -> Iterator[_Run]:
    for part in parts:
        wanted: dict[frozenset[str], list[int]] = {}
        for number, batch in enumerate(part.batches):
            takers = [filler.load for filler in fillers.get(batch.table, []) if filler.load.wants(batch)]
            if takers:
                columns = frozenset[str]().union(*(load.columns for load in takers))
                wanted.setdefault(columns, []).append(number)
        for columns, numbers in wanted.items():
            for begin in range(0, len(numbers), _RUN_BATCHES):
                yield _Run(part, columns, numbers[begin : begin + _RUN_BATCHES])
