"""Reads one table over all links of a checkpoint chain: all rows, or the rows of some ids (no torch here).

Damage, an id that occurs twice in a link, and missing rows raise CorruptCheckpointError.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recckpt.format.buckets import N_BUCKETS, is_among
from recckpt.format.catalog import Part
from recckpt.format.tensor_index import widened
from recckpt.sparse.files.arrow_format import ids_in, stored_dtype
from recckpt.sparse.files.catalogs import IdSet
from recckpt.sparse.files.merged_rows import deleted_ids, in_arrow, merged_range, merged_rows
from recckpt.sparse.files.part_reader import LinkBatches
from recckpt.sparse.files.pieces import Int64s
from recckpt.sparse.files.table_reader import LinkIds, TableReader, check_once, newest, table_damage
from recckpt.types import SlotSpec

_MERGE_BYTES = 128 << 20
_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True)
class ChainTable:
    """Reads a table from its links, newest first. The last link must hold all rows, except for ``upserts``."""

    links: Sequence[TableReader]

    def all_rows(self, slots: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield all rows in bucket order; with a single link, in bucket order within each shard only."""
        links = self._links_with(slots)
        return links[0].all_rows() if len(links) == 1 else merged_rows(links, _MERGE_BYTES)

    def upserts(self, slots: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the newest row of each id in these links; the last link may be a delta."""
        links = self._links_with(slots)
        return map(in_arrow, merged_range(links, (0, N_BUCKETS), _MERGE_BYTES)) if links else iter(())

    def deletes(self) -> Iterator[Int64s]:
        """Yield the ids that these links delete; none if a link is whole, because a whole link hides older ones."""
        is_whole = any(link.entry.is_whole for link in self.links)
        return iter(()) if is_whole else deleted_ids(self._links_with(()), _MERGE_BYTES)

    def rows_of(self, ids: Int64s) -> Iterator[pa.RecordBatch]:
        """Yield the rows of sorted, distinct ids; skip batches whose buckets or id range exclude all of these ids."""
        if len(self.links) == 1:
            return self.links[0].rows_of(ids)
        return (batch for link, _, _ in newest(map(AskedTable, self.links), ids) for batch in link.batches)

    def _links_with(self, slots: Sequence[str] | None) -> Sequence[TableReader]:
        return self.links if slots is None else [replace(link, slots=slots) for link in self.links]


class AskedTable:
    """One link of a table that is searched for ids; ``batches`` collects the rows that it has."""

    def __init__(self, link: TableReader) -> None:
        self._link = link
        self.batches: list[pa.RecordBatch] = []

    def find(self, ids: Int64s) -> Int64s:
        """Read the rows of sorted ids. Return the position of each id, or ABSENT or DELETED."""
        sought, shards = IdSet(ids), []
        for catalog in self._link.catalogs:
            batches = list(replace(self._link, catalogs=[catalog]).rows_of(ids))
            named = [piece.ids for _, _, piece in self._link.batches(catalog, "deletes", sought)]
            deleted = np.sort(np.concatenate([_NOTHING, *(some[is_among(some, ids)] for some in named)]))
            shards.append((np.concatenate([_NOTHING, *map(ids_in, batches)]), deleted))
            self.batches += batches
        check_once(shards, partial(table_damage, self._link), between=self._link.may_repeat)
        rows = np.concatenate([_NOTHING, *(rows for rows, _ in shards)])
        return LinkIds(np.sort(rows), (deletes for _, deletes in shards)).find(ids)


class RowIndex:
    """The sorted ids of one link of a table, in 16 bytes of memory per row. Thread-safe.

    The constructor reads and checks all ids; values are read when they are needed. A storage with memory maps checks
    the values of a batch at the first read, other storages at each read.
    """

    def __init__(self, table: TableReader) -> None:
        self._table, self._readers = table, LinkBatches(table.storage, table.directory)
        # Batches of rows, each with its checked columns; without memory maps no column is kept.
        self._batches: list[tuple[Part, int, dict[str, npt.NDArray[Any]]]] = []
        shards = []  # per shard: the ids of its rows in batch order, and its deleted ids
        only_ids = replace(table, slots=())
        for catalog in table.catalogs:
            rows = [_NOTHING]
            for part, number, piece in only_ids.batches(catalog, "rows", None):
                self._batches.append((part, number, {}))
                rows.append(piece.ids)
            deletes = [piece.ids for _, _, piece in only_ids.batches(catalog, "deletes", None)]
            shards.append((np.concatenate(rows), np.concatenate([_NOTHING, *deletes])))
        check_once(shards, partial(table_damage, table), between=table.may_repeat)
        self._firsts = np.cumsum([0, *(part.batches[number].rows for part, number, _ in self._batches)])
        ids = np.concatenate([_NOTHING, *(some for some, _ in shards)])
        self._places = np.argsort(ids)
        self._named = LinkIds(ids[self._places], (some for _, some in shards))

    def find(self, ids: Int64s) -> Int64s:
        """Return the row number of each id: ABSENT if the link does not name the id, DELETED if it deletes the id."""
        rows = self._named.find(ids)
        has_row = rows >= 0
        rows[has_row] = self._places[rows[has_row]]
        return rows

    def values(self, rows: Int64s, slot: SlotSpec) -> npt.NDArray[Any]:
        """Return a slot's values in these rows, shape (n, *slot_shape); bfloat16 as its bits in uint16.

        Raises CheckpointRemovedError on a storage without memory maps if the writer has removed the file.
        """
        out = np.empty((len(rows), *slot.shape), stored_dtype(slot))
        order = np.argsort(rows)
        ordered = rows[order]
        bounds = np.searchsorted(ordered, self._firsts)
        for number in np.flatnonzero(bounds[1:] > bounds[:-1]).tolist():
            some = slice(bounds[number], bounds[number + 1])
            out[order[some]] = self._column(number, slot)[ordered[some] - self._firsts[number]]
        return out

    def _column(self, at: int, slot: SlotSpec) -> npt.NDArray[Any]:
        part, number, checked = self._batches[at]
        values = checked.get(slot.name)
        if values is None:
            reader = self._readers.reader(part, self._table.entry.slots, frozenset([slot.name]))
            values = np.frombuffer(reader.read(number)[slot.name], stored_dtype(slot))
            values = values.reshape(-1, *slot.shape)
            if reader.mapped is not None:
                checked[slot.name] = values
        return values


class AlignedRows(NamedTuple):
    """One row per requested id.

    Attributes:
        values: shape (ids, *slot_shape).
        found: shape (ids,), True where the table has the id.
    """

    values: npt.NDArray[Any]
    found: npt.NDArray[np.bool_]


def aligned_rows(links: Iterable[RowIndex], table: str, ids: Int64s, slot: SlotSpec, default: Any) -> AlignedRows:
    """Return a slot's values for ids, in the order of ``ids``. Older links are searched only for ids still missing.

    Raises ValueError if ``default`` is neither a value nor a row of the slot, and what :meth:`RowIndex.values` raises.
    """
    values, is_known = rows_of_default(default, len(ids), table, slot), np.zeros(len(ids), np.bool_)
    for link, here, rows in newest(links, ids):
        read = link.values(rows, slot)
        values[here] = widened(read) if slot.dtype == "bfloat16" else read
        is_known[here] = True
    return AlignedRows(values, is_known)


def rows_of_default(default: Any, n_rows: int, table: str, slot: SlotSpec) -> npt.NDArray[Any]:
    dtype = np.dtype("float32" if slot.dtype == "bfloat16" else slot.dtype)
    try:
        values: npt.NDArray[Any] = np.broadcast_to(_converted(default, slot, dtype), (n_rows, *slot.shape)).copy()
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"table {table!r}, slot {slot.name!r}: found default={reprlib.repr(default)}, expected a number or a row "
            f"of {slot.dtype} {slot.shape}: {error}"
        ) from error
    return values


def _converted(default: Any, slot: SlotSpec, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    row = np.asarray(default)
    is_held = row.dtype.kind in "iuf"
    if is_held and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        is_held = bool((row == np.floor(row)).all() and (row >= limits.min).all() and (row <= limits.max).all())
    if not is_held:
        raise ValueError(f"not of {slot.dtype}")
    with np.errstate(over="ignore"):  # values that overflow are refused below
        converted = row.astype(dtype)
    if dtype.kind == "f" and (np.isinf(converted) & np.isfinite(row)).any():
        raise ValueError(f"beyond {slot.dtype}")
    return converted


def as_ids(ids: Any) -> Int64s:
    """Return ids as an array. Raises TypeError for floats, strings and booleans, which numpy would convert."""
    if isinstance(ids, np.ndarray) and ids.dtype == np.int64 and ids.ndim == 1:
        return ids
    try:
        numbers = ids if isinstance(ids, list) else list(ids)
        if bool in set(map(type, numbers)) or str(getattr(ids, "dtype", "")) in ("bool", "torch.bool"):
            raise TypeError("True and False are not ids")
        return np.fromiter(map(index, numbers), np.int64, len(numbers))
    except (TypeError, OverflowError) as error:
        raise TypeError(f"ids must be a sequence of int64 numbers, found {reprlib.repr(ids)}: {error}") from error
