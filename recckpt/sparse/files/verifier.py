"""Every byte and every id of the sparse files, held against the catalogs (no torch here)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.catalog import Batch, Part, PartKind
from recckpt.format.tables import TableEntry
from recckpt.sparse.files.arrow_format import ID, column_buffer
from recckpt.sparse.files.id_check import IdCheck
from recckpt.sparse.files.part_reader import PartReader
from recckpt.storage import NOT_READABLE, missing, open_storage
from recckpt.storage.base import Files
from recckpt.storage.local_files import mapped
from recckpt.storage.read_again import check_twice

Seen = Callable[[Batch, pa.RecordBatch], object]


@dataclass
class PartCheck:
    """What came of looking at one part."""

    path: str
    errors: list[CorruptCheckpointError] = field(default_factory=list)
    ids: dict[tuple[PartKind, str], IdCheck] = field(default_factory=dict)  # by kind and table: for the next to fit to


@dataclass(frozen=True)
class VerifyTask:
    """A part to check, by whoever reaches the URL."""

    url: str
    directory: str
    tables: tuple[TableEntry, ...]  # those that the part names, as far as the manifest lists them
    part: Part

    @property
    def n_bytes(self) -> int:
        """Bytes of the file."""
        return self.part.n_bytes


def check_part_anywhere(task: VerifyTask) -> PartCheck:
    """Do a task, as a worker of an executor does."""
    return check_part(open_storage(task.url), task.directory, task.tables, task.part, lambda batch, values: None)


def check_part(storage: Files, directory: str, tables: Sequence[TableEntry], part: Part, seen: Seen) -> PartCheck:
    """Hold every byte of a part against its catalog entry; ``seen`` is called once with each whole batch."""
    path, passed = layout.join(directory, part.file), set[int]()

    def see_once(batch: Batch, values: pa.RecordBatch) -> None:
        if id(batch) not in passed:
            passed.add(id(batch))
            seen(batch, values)

    try:
        return check_twice(
            storage, path, lambda: _checked(storage, directory, tables, part, see_once), lambda done: done.errors
        )
    except NOT_READABLE as error:
        return PartCheck(path, [missing(path, error, "a file that can be read")])
    except OSError as error:
        found = f"an error: {error}"
        return PartCheck(path, [CorruptCheckpointError(path, "", found=found, expected="a file that can be read")])


def _checked(storage: Files, directory: str, tables: Sequence[TableEntry], part: Part, seen: Seen) -> PartCheck:
    done = PartCheck(layout.join(directory, part.file))
    named = set(part.tables)
    slots = {table.slots if part.holds == "rows" else () for table in tables if table.name in named}
    if len(slots) != 1:
        found, expected = f"tables of {len(slots)} kinds of slots", "tables that agree in their slots"
        done.errors.append(CorruptCheckpointError(done.path, "its tables", found=found, expected=expected))
        return done
    try:
        memory = mapped(storage, done.path)
        reader = PartReader(storage, directory, part, slots.pop(), mapped=memory)
    except CorruptCheckpointError as error:
        done.errors.append(error)
        return done
    readable = True
    for number in range(len(part.batches)):
        try:
            values = reader.unchecked(number)
        except CorruptCheckpointError as error:
            readable = False
            done.errors.append(error)
        else:
            errors = list(_batch_errors(reader, part, number, values, done.ids))
            done.errors += errors
            if not errors:
                seen(part.batches[number], values)
    if readable:
        try:
            reader.check_frame()
        except CorruptCheckpointError as error:
            done.errors.append(error)
    return done


def between_parts(parts: Iterable[PartCheck]) -> Iterator[CorruptCheckpointError]:
    """Yield what is wrong where a table goes on in the next part; takes the parts of a shard in their order."""
    before: dict[tuple[PartKind, str], IdCheck] = {}
    for part in parts:
        for key, ids in part.ids.items():
            if key in before:
                for found, expected in ids.follow(before[key]):
                    yield CorruptCheckpointError(part.path, f"table {key[1]!r}", found=found, expected=expected)
            before[key] = ids


def _batch_errors(
    reader: PartReader, part: Part, number: int, values: pa.RecordBatch, ids: dict[tuple[PartKind, str], IdCheck]
) -> Iterator[CorruptCheckpointError]:
    batch = part.batches[number]
    problems = {name: reader.column_problem(number, values, name) for name in values.schema.names}
    yield from (problem for problem in problems.values() if problem)
    where = f"batch {number} (table {batch.table!r})"
    if problems[ID] is None:
        found_ids = np.frombuffer(column_buffer(values.column(ID)), np.int64)
        for found, expected in ids.setdefault((part.holds, batch.table), IdCheck()).check(found_ids, batch):
            yield CorruptCheckpointError(reader.path, where, found=found, expected=expected)
