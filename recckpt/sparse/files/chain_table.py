"""One table of a checkpoint, over all links of its chain: all rows, or those of ids (no torch here).

Damage, an id twice in a link and missing rows are a CorruptCheckpointError.
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
    """Reads a table from its links, newest first; the last link holds all rows unless stated otherwise."""

    links: Sequence[TableReader]

    def all_rows(self, slots: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield all rows, in bucket order; of a single link, in bucket order within each shard."""
        links = self._links_with(slots)
        return links[0].all_rows() if len(links) == 1 else merged_rows(links, _MERGE_BYTES)

    def upserts(self, slots: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the newest row of each id in these links; the last link need not be a full."""
        links = self._links_with(slots)
        return map(in_arrow, merged_range(links, (0, N_BUCKETS), _MERGE_BYTES)) if links else iter(())

    def deletes(self) -> Iterator[Int64s]:
        """Yield the ids that these links delete; none if a link is whole, since then nothing older counts."""
        is_whole = any(link.entry.is_whole for link in self.links)
        return iter(()) if is_whole else deleted_ids(self._links_with(()), _MERGE_BYTES)

    def rows_of(self, ids: Int64s) -> Iterator[pa.RecordBatch]:
        """Yield the rows of ids, which are sorted and distinct; batches that cannot hold them are not read."""
        if len(self.links) == 1:
            return self.links[0].rows_of(ids)
        return (batch for link, _, _ in newest(map(AskedTable, self.links), ids) for batch in link.batches)

    def _links_with(self, slots: Sequence[str] | None) -> Sequence[TableReader]:
        return self.links if slots is None else [replace(link, slots=slots) for link in self.links]


class AskedTable:
    """One link of a table, asked for ids; ``batches`` are the rows found so far."""

    def __init__(self, link: TableReader) -> None:
        self._link = link
        self.batches: list[pa.RecordBatch] = []

    def find(self, ids: Int64s) -> Int64s:
        """Read the rows of sorted ids; return the place of each, ABSENT or DELETED."""
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
    """The sorted ids of one link of a table; takes 16 bytes a row. Thread-safe.

    All ids are read and checked at once, values when they are first needed. A batch is checked once if the storage has
    maps, otherwise at each read.
    """

    def __init__(self, table: TableReader) -> None:
        self._table, self._readers = table, LinkBatches(table.storage, table.directory)
        # Batches of rows, each with the columns of it that have been checked, as far as they can be kept.
        self._batches: list[tuple[Part, int, dict[str, npt.NDArray[Any]]]] = []
        shards = []  # the ids of the rows of each, in the order of its batches, and its deletes
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
        """Return the row of each id; ABSENT if the link does not name it, DELETED if it deletes it."""
        rows = self._named.find(ids)
        has_row = rows >= 0
        rows[has_row] = self._places[rows[has_row]]
        return rows

    def values(self, rows: Int64s, slot: SlotSpec) -> npt.NDArray[Any]:
        """Return a slot of some rows, shape (n, *slot_shape); bfloat16 as its bits in uint16.

        Without maps it raises CheckpointRemovedError if the writer has removed the file.
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
    """One row for each id that was asked for.

    Attributes:
        values: shape (ids, *slot_shape).
        found: shape (ids,): which ids the table has.
    """

    values: npt.NDArray[Any]
    found: npt.NDArray[np.bool_]


def aligned_rows(links: Iterable[RowIndex], table: str, ids: Int64s, slot: SlotSpec, default: Any) -> AlignedRows:
    """Return a slot of the rows of ids, in their order. A link is asked only for ids that no newer link names.

    Raises ValueError if ``default`` is not a value or a row of the slot; otherwise as :meth:`RowIndex.values`.
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
    with np.errstate(over="ignore"):  # refused below
        converted = row.astype(dtype)
    if dtype.kind == "f" and (np.isinf(converted) & np.isfinite(row)).any():
        raise ValueError(f"beyond {slot.dtype}")
    return converted


def as_ids(ids: Any) -> Int64s:
    """Return ids as an array; TypeError for floats, strings and booleans, which numpy would convert."""
    if isinstance(ids, np.ndarray) and ids.dtype == np.int64 and ids.ndim == 1:
        return ids
    try:
        numbers = ids if isinstance(ids, list) else list(ids)
        if bool in set(map(type, numbers)) or str(getattr(ids, "dtype", "")) in ("bool", "torch.bool"):
            raise TypeError("True and False are no ids")
        return np.fromiter(map(index, numbers), np.int64, len(numbers))
    except (TypeError, OverflowError) as error:
        raise TypeError(f"ids must be a sequence of int64 numbers, found {reprlib.repr(ids)}: {error}") from error
