"""Arrow parts to tables: read only what is wanted, check it, find the rows once, copy the slots."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from recckpt.background import run_all
from recckpt.sparse.catalog import Batch, Part
from recckpt.sparse.codec import ID, PartReader
from recckpt.sparse.filler import Filler, TableLoad
from recckpt.storage import Storage

_RUN_BATCHES = 16  # batches that one thread reads before it takes the next run


@dataclass(frozen=True)
class Loaded:
    """What a load did, by table of the model.

    Attributes:
        rows_taken: rows that were loaded.
        rows_filtered: rows that a filter left out.
        bytes_read: bytes of column values that were read and checked.
    """

    rows_taken: Counter[str] = field(default_factory=Counter)
    rows_filtered: Counter[str] = field(default_factory=Counter)
    bytes_read: int = 0

    def __add__(self, other: Loaded) -> Loaded:
        return Loaded(
            self.rows_taken + other.rows_taken,
            self.rows_filtered + other.rows_filtered,
            self.bytes_read + other.bytes_read,
        )


def load_tables(
    loads: Sequence[TableLoad],
    parts: Sequence[Part],
    storage: Storage,
    directory: str,
    *,
    concurrency: int,
    advance: Callable[[int], object],
) -> Loaded:
    """Fill tables with the rows of a checkpoint that their slices own.

    Each table is made large enough first, then filled by several threads; there is never a second copy of it. Where
    a table has rows to lose, everything is read and checked before any table changes.

    Args:
        loads: what to fill; a table of the checkpoint may fill several.
        parts: the parts of all shards that may hold their rows.
        storage: where the checkpoint lies.
        directory: the checkpoint's directory in it.
        concurrency: number of reader threads.
        advance: called with the bytes of each batch and table; from several threads.

    Raises:
        CorruptCheckpointError: a file is damaged. The tables are as they were.
    """
    fillers: dict[str, list[Filler]] = {}
    for load in loads:
        fillers.setdefault(load.entry.name, []).append(Filler(load))
    runs = list(_runs(parts, fillers))
    bytes_read, lock = 0, threading.Lock()

    def read(run: _Run, take: Callable[[Filler, Mapping[str, pa.Array], str], None]) -> None:
        nonlocal bytes_read
        for batch, columns, path in run.read(storage, directory, fillers):
            for filler in fillers[batch.table]:
                take(filler, columns, path)
            with lock:
                bytes_read += sum(array.nbytes for array in columns.values())

    def fill(filler: Filler, columns: Mapping[str, pa.Array], path: str) -> None:
        filler.fill(columns, path)
        advance(len(columns[ID]) * filler.load.row_bytes)

    if any(len(load.table) for load in loads):
        run_all(lambda run: read(run, Filler.check), runs, concurrency)
    rows = Counter[str]()
    for run in runs:
        for number in run.numbers:
            rows[run.part.batches[number].table] += run.part.batches[number].rows
    every = [filler for some in fillers.values() for filler in some]
    for filler in every:
        filler.start(rows[filler.load.entry.name])
    try:
        run_all(lambda run: read(run, fill), runs, concurrency)
    except BaseException:
        for filler in every:
            filler.undo()
        raise
    return Loaded(
        Counter({filler.load.table.name: filler.n_rows for filler in every}),
        Counter({filler.load.table.name: filler.n_filtered for filler in every}),
        bytes_read,
    )


@dataclass(frozen=True)
class _Run:
    """Some wanted batches of one part, read by one thread."""

    part: Part
    columns: frozenset[str]
    numbers: list[int]

    def read(
        self, storage: Storage, directory: str, fillers: Mapping[str, list[Filler]]
    ) -> Iterator[tuple[Batch, Mapping[str, pa.Array], str]]:
        """Yield (batch, checked columns, path of the file)."""
        slots = fillers[self.part.batches[self.numbers[0]].table][0].load.entry.slots
        reader = PartReader(storage, directory, self.part, slots, self.columns)
        for number in self.numbers:
            yield self.part.batches[number], reader.read(number), reader.path


def _runs(parts: Sequence[Part], fillers: Mapping[str, list[Filler]]) -> Iterator[_Run]:
    for part in parts:
        wanted: dict[frozenset[str], list[int]] = {}
        for number, batch in enumerate(part.batches):
            takers = [filler.load for filler in fillers.get(batch.table, []) if filler.wants(batch)]
            if takers:
                columns = frozenset[str]().union(*(load.columns for load in takers))
                wanted.setdefault(columns, []).append(number)
        for columns, numbers in wanted.items():
            for begin in range(0, len(numbers), _RUN_BATCHES):
                yield _Run(part, columns, numbers[begin : begin + _RUN_BATCHES])
