"""Compares part files with their catalogs, counts the ids of links, and compares rows by sums (no torch here)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from recckpt.errors import CheckpointRemovedError, CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.buckets import N_BUCKETS, mix64, random_odds
from recckpt.format.catalog import Batch, Part, PartKind
from recckpt.format.tables import TableEntry
from recckpt.sparse.files.arrow_format import ID, TABLE
from recckpt.sparse.files.merged_rows import LinkCursor, bucket_ranges
from recckpt.sparse.files.part_reader import PartReader
from recckpt.sparse.files.pieces import IdCheck, RowPiece, ids_of
from recckpt.sparse.files.table_reader import LinkIds, TableReader, newest
from recckpt.storage import NOT_READABLE, missing, open_storage
from recckpt.storage.base import Files
from recckpt.storage.local_files import mapped
from recckpt.storage.retry import check_twice

Visit = Callable[[Batch, RowPiece], Callable[[], object]]  # inspects rows, and returns a function that counts them
Unreadable = CorruptCheckpointError | CheckpointRemovedError | OSError
_LARGEST = 1 << 64
_WORD_BYTES = 4


@dataclass
class PartCheck:
    path: str
    errors: list[CorruptCheckpointError] = field(default_factory=list)
    ids: dict[tuple[PartKind, str], IdCheck] = field(default_factory=dict)  # by kind and table, for ``between_parts``


@dataclass(frozen=True)
class VerifyTask:
    url: str
    directory: str
    tables: tuple[TableEntry, ...]  # the manifest's entries of the part's tables
    part: Part


def check_part_anywhere(task: VerifyTask) -> PartCheck:
    return check_part(open_storage(task.url), task.directory, task.tables, task.part)


def check_part(
    storage: Files, directory: str, tables: Sequence[TableEntry], part: Part, visit: Visit | None = None
) -> PartCheck:
    """Compare all bytes of a part with its catalog entry; call each intact batch's function that ``visit`` returned."""
    path, passed = layout.join(directory, part.file), set[int]()  # numbers of batches already visited
    try:
        return check_twice(
            storage,
            path,
            lambda: check_bytes(mapped(storage, path), storage, directory, tables, part, visit=visit, passed=passed),
            lambda done: done.errors,
        )
    except NOT_READABLE as error:
        return PartCheck(path, [missing(path, error, "a file that can be read")])
    except OSError as error:
        found = f"an error: {error}"
        return PartCheck(path, [CorruptCheckpointError(path, "", found=found, expected="a file that can be read")])


def check_bytes(
    data: memoryview,
    storage: Files,
    directory: str,
    tables: Sequence[TableEntry],
    part: Part,
    *,
    visit: Visit | None = None,
    passed: set[int] | None = None,
) -> PartCheck:
    """Check a part whose bytes the caller has read; add to ``passed`` the numbers of the batches visited."""
    passed = set() if passed is None else passed
    done = PartCheck(layout.join(directory, part.file))
    named = set(part.tables)
    slots = {table.slots if part.holds == "rows" else () for table in tables if table.name in named}
    if len(slots) != 1:
        found, expected = f"tables with {len(slots)} different lists of slots", "tables with equal slots"
        done.errors.append(CorruptCheckpointError(done.path, "its tables", found=found, expected=expected))
        return done
    try:
        reader = PartReader(storage, directory, part, slots.pop(), mapped=data)
    except CorruptCheckpointError as error:
        done.errors.append(error)
        return done
    is_readable = True
    for number, batch in enumerate(part.batches):
        try:
            columns = reader.unchecked(number)
        except CorruptCheckpointError as error:
            is_readable = False
            done.errors.append(error)
            continue
        head = {name: reader.column_problem(number, columns[name], name) for name in (TABLE, ID)}
        piece, wrong, take = RowPiece.of(reader, number, columns, is_checked=False), list[tuple[str, str]](), None
        if head[ID] is None:
            order = done.ids.setdefault((part.holds, batch.table), IdCheck())
            wrong = list(order.check(piece, batch))
            if visit is not None and head[TABLE] is None and not wrong and number not in passed:
                take = visit(batch, piece)
        errors = [problem for problem in head.values() if problem] + list(piece.problems())
        errors += [reader.damage(number, found, expected) for found, expected in wrong]
        done.errors += errors
        if take is not None and not errors:
            passed.add(number)
            take()
    if is_readable:
        try:
            reader.check_frame()
        except CorruptCheckpointError as error:
            done.errors.append(error)
    return done


def between_parts(parts: Iterable[PartCheck]) -> Iterator[CorruptCheckpointError]:
    """Yield conflicts of tables that continue in the next part. ``parts`` are those of one shard, in order."""
    before: dict[tuple[PartKind, str], IdCheck] = {}
    for part in parts:
        for key, ids in part.ids.items():
            if key in before:
                for found, expected in ids.follow(before[key]):
                    yield CorruptCheckpointError(part.path, f"table {key[1]!r}", found=found, expected=expected)
            before[key] = ids


@dataclass
class Counted:
    rows: int = 0  # of the table at this link
    absent: int = 0  # deletes of ids that have no row in the base
    error: Unreadable | None = None  # why the link cannot be counted
    is_known: bool = True  # whether the link was counted

    def fail(self, error: Unreadable | None) -> None:
        """Mark the link as not counted; ``error`` is None if only its base could not be counted."""
        self.error, self.is_known = error, False

    def add(self, rows: int, absent: int = 0) -> None:
        self.rows += rows
        self.absent += absent


def count_rows(links: Sequence[tuple[TableReader, int | None]], budget_bytes: int) -> list[Counted]:
    """Return the counts of each link, reading all links' ids once, ``budget_bytes`` at a time.

    Each link, of any chain, comes with the index of its base in ``links``, or None if it holds all rows.
    """
    counted = [Counted() for _ in links]
    cursors = [LinkCursor(link, (0, N_BUCKETS)) for link, _ in links]
    for buckets in bucket_ranges([link for link, _ in links], (0, N_BUCKETS), budget_bytes):
        named: list[list[LinkIds]] = []  # for each link: its ids and those of its bases, newest first
        for (_, base), count, cursor in zip(links, counted, cursors, strict=True):
            if count.is_known and base is not None and not counted[base].is_known:
                count.fail(None)
            rows, deletes = list[RowPiece](), list[RowPiece]()
            if count.is_known:
                try:
                    rows, deletes = cursor.between(*buckets)
                except (CorruptCheckpointError, CheckpointRemovedError, OSError) as error:
                    count.fail(error)
            own = LinkIds(np.sort(ids_of(rows)), [ids_of(deletes)])
            below = [] if base is None else named[base]
            named.append([own, *below])
            n_replaced = sum(len(here) for _, here, _ in newest(below, own.rows))
            n_deleted = sum(len(here) for _, here, _ in newest(below, own.deletes))
            count.add(len(own.rows) - n_replaced - n_deleted, len(own.deletes) - n_deleted)
    for (_, base), count in zip(links, counted, strict=True):
        count.add(0 if base is None else counted[base].rows)
    return counted


class RowSums(Counter[str]):
    """A 64-bit sum for each table, over hashes of each row's id and values.

    A missing or repeated row, or a row with another id's values, changes the sum; the order of rows does not.
    """

    def add(self, table: str, columns: Sequence[npt.NDArray[Any]], rows: npt.NDArray[np.int64] | slice) -> None:
        """Add rows of these columns, ids first; an item of a column is the bytes of one row."""
        ids, *slots = columns
        hashes = mix64(ids.view(np.uint64))
        first = 0
        for column in slots:
            # Words of at most 32 bits: in a 64-bit word, flipping the top bit adds 2 ** 63 whatever its odd factor is,
            # so that two such flips would cancel out.
            word = gcd(column.dtype.itemsize, _WORD_BYTES)
            words = column.view(f"u{word}").reshape(len(column), column.dtype.itemsize // word)
            hashes += np.einsum("ij,j->i", words, random_odds(first, words.shape[1]))
            first += words.shape[1]
        self[table] = (self[table] + int(mix64(hashes)[rows].sum())) % _LARGEST

    def visit(self, batch: Batch, piece: RowPiece) -> Callable[[], object]:
        """Return a function that adds the batch; the caller calls it once the batch is known to be intact."""
        return lambda: self.add(batch.table, piece.columns, slice(None))

    def check_written(self, storage: Files, directory: str, tables: Sequence[TableEntry], part: Part | None) -> None:
        """Raise CorruptCheckpointError unless the part (None: no rows) has exactly the rows of this sum."""
        found = RowSums()
        for error in check_part(storage, directory, tables, part, found.visit).errors if part is not None else ():
            raise error
        if found != self:
            file = "no rows" if part is None else layout.join(directory, part.file)
            raise CorruptCheckpointError(file, "", found="rows that differ from the source", expected="the same rows")
