"""One link of a chain to tables: read only what is wanted, check it, and hand it to those who fill them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.buckets import bucket_of
from recckpt.format.catalog import Batch, Part
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.arrow_format import ID, column_buffer
from recckpt.sparse.files.link_deletes import LinkDeletes
from recckpt.sparse.files.load_target import TableLoad
from recckpt.sparse.files.part_reader import PartReader
from recckpt.sparse.files.table_fill import Filler
from recckpt.sparse.table.kernels import first_outside
from recckpt.storage.base import Files
from recckpt.types import SlotSpec

_RUN_BATCHES = 16  # batches that one thread reads before it takes the next run

Take = Callable[[Filler, Mapping[str, pa.Array], str], None]


@dataclass(frozen=True)
class LinkLoad:
    """What is taken of the link in ``directory``; a table of it may fill several.

    The links of a chain have the same :class:`TableLoad` for a table, as far as they count.
    """

    tables: Sequence[TableLoad]
    parts: Sequence[Sequence[Part]]  # by shard, those that may hold their rows or deletes
    storage: Files
    directory: str

    @property
    def n_bytes(self) -> int:
        """Bytes of the rows that are read, in the columns that are read."""
        return sum(
            batch.rows * load.row_bytes
            for part in self._parts()
            for batch in part.batches
            for load in self.takers(batch)
            if part.holds == "rows"
        )

    def takers(self, batch: Batch) -> list[TableLoad]:
        """Return the loads that may take something of a batch."""
        return [load for load in self.tables if load.entry.name == batch.table and load.wants(batch)]

    def wanted_files(self) -> Iterator[str]:
        """Yield the files that have something for the tables, by their slices."""
        for part in self._parts():
            if any(map(self.takers, part.batches)):
                yield layout.join(self.directory, part.file)

    def _parts(self) -> Iterator[Part]:
        return (part for parts in self.parts for part in parts)


class LinkPass:
    """The tables that one link fills at one go."""

    def __init__(self, link: LinkLoad, with_rows: bool, by_load: Mapping[int, Filler]) -> None:
        self._link = link
        self._fillers: dict[str, list[Filler]] = {}
        for load in link.tables:
            if load.with_rows == with_rows:
                self._fillers.setdefault(load.entry.name, []).append(by_load[id(load)])
        runs = [run for shard, parts in enumerate(link.parts) for run in self._runs(shard, parts)]
        self._rows = [run for run in runs if run.part.holds == "rows"]
        self._deletes = [run for run in runs if run.part.holds == "deletes"]
        parts = [part for parts in link.parts for part in parts]
        self._whole_parts = [part for part in parts if part.batches and all(map(self._takers, part.batches))]
        rows = Counter[str]()
        for run in self._rows:
            for number in run.numbers:
                rows[run.part.batches[number].table] += run.part.batches[number].rows
        for filler in self._every:
            filler.expect(link.directory, rows[filler.load.entry.name])

    @property
    def _every(self) -> list[Filler]:
        return [filler for some in self._fillers.values() for filler in some]

    def start(self) -> None:
        """Make room in the tables."""
        for filler in self._every:
            filler.start()

    def run(self, take: Take, concurrency: int) -> int:
        """Read what is wanted and have each filler take it; return the bytes that were read."""
        storage, deletes = self._link.storage, LinkDeletes()
        threads = storage.threads(concurrency)
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

    def _read_deletes(self, run: _Run, deletes: LinkDeletes) -> int:
        n_bytes = 0
        for batch, columns, path in run.read(self._link, self._slots(run.part)):
            ids = np.frombuffer(column_buffer(columns[ID]), np.int64)
            _refuse(deletes.add(batch.table, run.shard, ids), batch, path)
            n_bytes += ids.nbytes
        return n_bytes

    def _read_rows(self, run: _Run, deletes: LinkDeletes, take: Take) -> int:
        n_bytes = 0
        for batch, columns, path in run.read(self._link, self._slots(run.part)):
            ids = np.frombuffer(column_buffer(columns[ID]), np.int64)
            _refuse(deletes.repeated(batch.table, run.shard, ids), batch, path)
            for filler in self._fillers[batch.table]:
                take(filler, columns, path)
            n_bytes += sum(array.nbytes for array in columns.values())
        return n_bytes

    def _check_frame(self, part: Part) -> int:
        """Check what lies between the values of a part that is read as a whole, and return the bytes of values read."""
        storage, directory = self._link.storage, self._link.directory
        mapped = storage.map(layout.join(directory, part.file))
        if mapped is not None:  # without a map it would all have to be read again
            PartReader(storage, directory, part, self._slots(part), mapped=mapped).check_frame()
        return 0

    def _slots(self, part: Part) -> Sequence[SlotSpec]:
        """Return the slots of all tables in a part that has rows for somebody."""
        if part.holds == "deletes":
            return ()
        return next(filler for batch in part.batches for filler in self._takers(batch)).load.entry.slots

    def _takers(self, batch: Batch) -> list[Filler]:
        return [filler for filler in self._fillers.get(batch.table, ()) if filler.load.wants(batch)]

    def _runs(self, shard: int, parts: Sequence[Part]) -> Iterator[_Run]:
        for part in parts:
            wanted: dict[frozenset[str], list[int]] = {}
            for number, batch in enumerate(part.batches):
                takers = self._takers(batch)
                if takers:
                    columns = frozenset[str]().union(*(filler.load.columns for filler in takers))
                    wanted.setdefault(columns, []).append(number)
            for columns, numbers in wanted.items():
                for begin in range(0, len(numbers), _RUN_BATCHES):
                    yield _Run(shard, part, columns, numbers[begin : begin + _RUN_BATCHES])


@dataclass(frozen=True)
class _Run:
    """Some wanted batches of one part, read by one thread."""

    shard: int
    part: Part
    columns: frozenset[str]
    numbers: list[int]

    def read(self, link: LinkLoad, slots: Sequence[SlotSpec]) -> Iterator[tuple[Batch, Mapping[str, pa.Array], str]]:
        """Yield (batch, checked columns, path of the file)."""
        reader = PartReader(link.storage, link.directory, self.part, slots, self.columns)
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


def _refuse(repeated: Iterator[int], batch: Batch, path: str) -> None:
    """Refuse an id that is twice in one shard."""
    for id_ in repeated:
        raise CorruptCheckpointError(path, f"table {batch.table!r}", found=f"id {id_} twice", expected="every id once")
