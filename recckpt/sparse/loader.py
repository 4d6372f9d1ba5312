"""Arrow parts to tables: read only what is wanted, check it, find the rows once, copy the slots."""

from __future__ import annotations

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
class CheckpointLoad:
    """What is taken of one checkpoint.

    Attributes:
        tables: what to fill; a table of the checkpoint may fill several.
        parts: the parts of all shards that may hold their rows.
        storage: where the checkpoint lies.
        directory: the checkpoint's directory in it.
    """

    tables: Sequence[TableLoad]
    parts: Sequence[Part]
    storage: Storage
    directory: str

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows in the columns that are read."""
        return sum(load.n_bytes for load in self.tables)


@dataclass(frozen=True)
class Loaded:
    """What a load did, by table of the model.

    Attributes:
        rows_taken: rows that were loaded.
        rows_filtered: rows that a filter left out.
        bytes_read: bytes of column values that were read and checked.
    """

    rows_taken: Mapping[str, int] = field(default_factory=dict)
    rows_filtered: Mapping[str, int] = field(default_factory=dict)
    bytes_read: int = 0


def load_tables(checkpoints: Sequence[CheckpointLoad], *, concurrency: int, advance: Callable[[int], object]) -> Loaded:
    """Fill tables with the rows of checkpoints that their slices own.

    Rows come first, then slots that come from elsewhere for the rows that are there. Each table is made large enough
    before several threads fill it; there is never a second copy of it. Where a table has rows to lose, everything is
    read and checked before any table changes.

    Args:
        checkpoints: what to fill from where.
        concurrency: number of reader threads.
        advance: called with the bytes of each batch and table; from several threads.

    Raises:
        CorruptCheckpointError: a file is damaged. The tables are as they were.
    """

    def fill(filler: Filler, columns: Mapping[str, pa.Array], path: str) -> None:
        filler.fill(columns, path)
        advance(len(columns[ID]) * filler.load.row_bytes)

    passes = [_Pass(checkpoint, with_rows) for with_rows in (True, False) for checkpoint in checkpoints]
    fillers = [filler for one in passes for filler in one.every]
    bytes_read = 0
    if any(len(filler.load.table) for filler in fillers):
        bytes_read += sum(one.run(Filler.check, concurrency) for one in passes)
    try:
        for one in passes:
            one.start()
            bytes_read += one.run(fill, concurrency)
    except BaseException:
        for filler in fillers:
            filler.undo()
        raise
    taken, filtered = Counter[str](), Counter[str]()
    for filler in fillers:  # rows whose slots come from several checkpoints count once
        name = filler.load.table.name
        taken[name] = max(taken[name], filler.n_rows)
        filtered[name] = max(filtered[name], filler.n_filtered)
    return Loaded(dict(taken), dict(filtered), bytes_read)


class _Pass:
    """The tables that one checkpoint fills at one go."""

    def __init__(self, checkpoint: CheckpointLoad, with_rows: bool) -> None:
        self._checkpoint = checkpoint
        self._fillers: dict[str, list[Filler]] = {}
        for load in checkpoint.tables:
            if load.with_rows == with_rows:
                self._fillers.setdefault(load.entry.name, []).append(Filler(load))
        self._runs = list(_runs(checkpoint.parts, self._fillers))

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

        return sum(run_all(read, self._runs, self._checkpoint.storage.threads(concurrency)))


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
