"""Reads the rows of one table in one link, checking every byte, bucket order, and that no id repeats (no torch here).

A link names an id as a row or as a delete, once in each of its shards. A row in any shard overrides a delete in any
shard, and the newest link that names an id decides. Damage and repeated ids raise CorruptCheckpointError. For ids that
are hashed in memory in any order see :class:`recckpt.sparse.files.filler.KnownIds`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.buckets import N_BUCKETS, bucket_of, distinct, is_among, repeated
from recckpt.format.catalog import Catalog, Part, PartKind
from recckpt.format.manifest import are_disjoint, overlap
from recckpt.format.tables import TableEntry
from recckpt.sparse.files.arrow_format import ID, ID_SPEC, column_array, slot_field
from recckpt.sparse.files.catalogs import IdSet
from recckpt.sparse.files.part_reader import PartReader
from recckpt.sparse.files.pieces import IdCheck, Int64s, RowPiece, named_twice
from recckpt.storage.base import Files
from recckpt.text import nearest
from recckpt.types import SlotSpec

Damage = Callable[[str, str, str], Exception]  # takes (where, found, expected)

ABSENT, DELETED = -1, -2  # used in place of a row number
_WINDOW_ROWS = 8 << 20  # number of ids compared at once


class AskedLink(Protocol):
    def find(self, ids: Int64s) -> Int64s:
        """Return the row number of each id: ABSENT if the link does not name the id, DELETED if it deletes the id."""


_Link = TypeVar("_Link", bound=AskedLink)


def newest(links: Iterable[_Link], ids: Int64s) -> Iterator[tuple[_Link, Int64s, Int64s]]:
    """Search links, newest first, until all ids are named; yield (link, positions of ids with rows there, the rows)."""
    left = np.arange(len(ids))
    for link in links if len(ids) else ():
        rows = link.find(ids[left])
        yield link, left[rows >= 0], rows[rows >= 0]
        left = left[rows == ABSENT]
        if not len(left):
            return


def check_once(shards: Iterable[tuple[Int64s, Int64s]], damage: Damage, *, between: bool = True) -> None:
    """Raise ``damage`` if a link repeats an id: as a row and a delete of one shard, or as a row of two shards.

    ``shards`` has, for each shard, the distinct ids of rows and of deletes. ``between`` compares shards to each other.
    """
    pairs = list(shards)
    of_shards = [rows for rows, _ in pairs if len(rows)]
    compared = [("in one shard", pair) for pair in pairs if all(map(len, pair))]
    for where, ids in (*compared, *([("between shards", of_shards)] if between and len(of_shards) > 1 else [])):
        if len(twice := repeated(np.concatenate(ids))):
            raise damage(where, *named_twice(twice))


class LinkIds:
    """The ids that one link names: sorted ids of rows, and ids of deletes that have no row."""

    def __init__(self, rows: Int64s, deletes: Iterable[Int64s]) -> None:
        deleted = distinct(np.empty(0, np.int64), *deletes)
        self.rows, self.deletes = rows, deleted[~is_among(deleted, rows)]

    def find(self, ids: Int64s) -> Int64s:
        places = np.where(is_among(ids, self.deletes), DELETED, ABSENT)
        if len(self.rows):
            at = np.minimum(np.searchsorted(self.rows, ids), len(self.rows) - 1)
            places = np.where(self.rows[at] == ids, at, places)
        return places


class NamedIds:  # ids, or hashes of ids, that newer links name
    def __init__(self) -> None:
        self._ordered: npt.NDArray[Any] | None = None

    def is_new(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        return np.ones(len(ids), np.bool_) if self._ordered is None else ~is_among(ids, self._ordered)

    def add(self, *ids: npt.NDArray[Any]) -> None:
        if sum(map(len, ids)):
            self._ordered = np.sort(np.concatenate(ids if self._ordered is None else (self._ordered, *ids)))


def may_repeat(catalogs: Sequence[Catalog], table: str) -> bool:
    """Say whether two shards may share an id of a table, because both their id ranges and their buckets overlap."""
    if are_disjoint(catalog.ids[table] for catalog in catalogs if table in catalog.ids):
        return False
    spans = []
    for catalog in catalogs:
        parts = catalog.parts_of(table, "rows")
        ranges = [part.batches[number].buckets for part, numbers in parts for number in numbers]
        if ranges:
            spans.append((min(begin for begin, _ in ranges), max(end for _, end in ranges)))
    return overlap(spans)


@dataclass(frozen=True)
class TableReader:
    """Reads slots and ids of one table in one directory; of a delta, only the rows and deletes in its own files."""

    storage: Files
    directory: str
    catalogs: Sequence[Catalog]  # one per shard
    entry: TableEntry
    slots: Sequence[str]  # slots to read, in the order of the table

    @property
    def specs(self) -> tuple[SlotSpec, ...]:
        return tuple(slot for slot in self.entry.slots if slot.name in self.slots)

    @property
    def is_mapped(self) -> bool:
        """Whether all files are memory-mapped, so that keeping rows takes no memory of its own."""
        parts = (part for catalog in self.catalogs for part, _ in catalog.parts_of(self.entry.name))
        return all(self.storage.map(layout.join(self.directory, part.file)) is not None for part in parts)

    @property
    def may_repeat(self) -> bool:
        return may_repeat(self.catalogs, self.entry.name)

    def part(self, part: Part, names: Sequence[str] | None = None) -> PartReader:
        slots = self.entry.slots if part.holds == "rows" else ()
        return PartReader(self.storage, self.directory, part, slots, names)

    def all_rows(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows; if shards overlap, first check that no id is in two of them."""
        self.check_shards()
        for catalog in self.catalogs:
            for _, _, piece in self.batches(catalog, "rows", None):
                yield record_batch(self.specs, piece.columns)

    def rows_of(self, ids: Int64s) -> Iterator[pa.RecordBatch]:
        """Yield the rows of sorted, distinct ids; skip batches whose buckets or id range exclude all of these ids."""
        sought, is_found = IdSet(ids), np.zeros(len(ids), np.bool_)
        for catalog in self.catalogs:
            for _, _, piece in self.batches(catalog, "rows", sought):
                rows = np.flatnonzero(is_among(piece.ids, ids))
                places = np.searchsorted(ids, piece.ids[rows])
                if len(twice := ids[np.sort(places[is_found[places]])]):
                    raise table_damage(self, "between shards", *named_twice(twice))
                is_found[places] = True
                if len(rows):
                    yield record_batch(self.specs, [column.take(rows) for column in piece.columns])

    def check_shards(self) -> None:
        """Raise if an id is in two shards."""
        for problem in self.repeats():
            raise problem

    def repeats(self) -> Iterator[CorruptCheckpointError]:
        """Yield an error for each range of buckets with an id in two shards; read files only if shards overlap.

        The caller must check that ids lie in the buckets and id ranges of their batches.
        """
        if not self.may_repeat:
            return
        n_rows = sum(catalog.counts("rows").get(self.entry.name, 0) for catalog in self.catalogs)
        width = max(1, N_BUCKETS * _WINDOW_ROWS // max(n_rows, _WINDOW_ROWS))  # number of buckets compared at once
        for begin in range(0, N_BUCKETS, width):
            shards = [distinct(self._ids_in(catalog, begin, begin + width)) for catalog in self.catalogs]
            if len(twice := repeated(np.concatenate(shards))):
                yield table_damage(self, "between shards", *named_twice(twice))

    def _ids_in(self, catalog: Catalog, begin: int, end: int) -> Int64s:
        pieces: list[Int64s] = [np.empty(0, np.int64)]
        for part, numbers in catalog.parts_of(self.entry.name, "rows"):
            spans = [(number, part.batches[number].buckets) for number in numbers]
            met = [number for number, span in spans if span[0] < end and begin < span[1]]
            if not met:
                continue
            reader = self.part(part, ())
            for number in met:
                ids = np.frombuffer(reader.read(number)[ID], np.int64)
                buckets = bucket_of(ids)
                pieces.append(ids[(begin <= buckets) & (buckets < end)])
        return np.concatenate(pieces)

    def batches(self, catalog: Catalog, kind: PartKind, ids: IdSet | None) -> Iterator[tuple[Part, int, RowPiece]]:
        """Yield (part, number, rows) of a shard's batches that may have rows or deletes of ``ids``; None for all."""
        order = IdCheck()
        for part, numbers in catalog.parts_of(self.entry.name, kind):
            batches = ((number, part.batches[number]) for number in numbers)
            met = [number for number, batch in batches if ids is None or ids.meets(batch.buckets, batch.ids)]
            if not met:
                continue
            reader = self.part(part, self.slots if kind == "rows" else ())
            for number in met:
                yield part, number, order.piece(reader, number, is_whole=True)


def table_damage(table: TableReader, where: str, found: str, expected: str) -> CorruptCheckpointError:
    """Return the error for damage of a table that cannot be attributed to one file."""
    path, name = layout.join(table.directory, layout.SPARSE_DIR), f"table {table.entry.name!r}"
    return CorruptCheckpointError(path, f"{name}, {where}" if where else name, found=found, expected=expected)


def asked_slots(table: str, slots: Sequence[SlotSpec], columns: Collection[str] | None) -> list[SlotSpec]:
    """Return the slots that ``columns`` names (None: all), in table order. Raises KeyError for an unknown slot."""
    if isinstance(columns, str):
        raise TypeError(f"columns must be a list of slots, found {columns!r}; pass [{columns!r}]")
    names = [slot.name for slot in slots]
    for column in columns or ():
        if column not in (*names, ID):
            raise KeyError(f"table {table!r} has no slot {column!r}; it has {names}{nearest(column, names)}")
    return [slot for slot in slots if columns is None or slot.name in columns]


def record_batch(slots: Sequence[SlotSpec], columns: Sequence[npt.NDArray[Any]]) -> pa.RecordBatch:
    """Return rows of one table as an Arrow batch, without a copy."""
    specs, n_rows = (ID_SPEC, *slots), columns[0].size
    arrays = [column_array(spec, pa.py_buffer(c), n_rows) for spec, c in zip(specs, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=table_schema(slots))


def table_schema(slots: Iterable[SlotSpec]) -> pa.Schema:
    return pa.schema([slot_field(slot) for slot in (ID_SPEC, *slots)])
