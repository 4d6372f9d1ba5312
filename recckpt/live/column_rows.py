"""A table that lies by columns, while it is saved: what this rank has of all rows, and then its share of whole rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from recckpt.live.column_slots import place_in_row, whole_spec
from recckpt.live.row_range import RowRange
from recckpt.sparse.files.table_rows import StillTable
from recckpt.sparse.table.column import Column, aligned_bytes
from recckpt.sparse.table.mark_set import marked_rows
from recckpt.sparse.table.marks import DeltaSource, FrozenRows
from recckpt.sparse.table.snapshot import Snapshot
from recckpt.sparse.table.store import Ids
from recckpt.types import Box, SlotSpec

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
_ID_SPEC = SlotSpec("id", "int64", ())


class _Joining(NamedTuple):
    """Which rows of the box are saved, None for all; and the whole rows of the share of this rank, by slots."""

    rows: Int64s | None
    values: Mapping[str, Bytes]  # shape (rows, bytes of a row)


class ColumnRows:
    """Rows of a table that lies by columns: a source of whole rows once ranks have sent each other their columns.

    Before that, it is known how many rows it has of a full save alone. What is read of the table is read once.

    Args:
        snapshot: the columns of this rank, of all rows of the box.
        box: what this rank has.
        changed: returns a bit a row of the snapshot, 1 for those of a delta; None where all rows are saved.
    """

    def __init__(self, snapshot: Snapshot, box: Box, changed: Callable[[], Bytes] | None = None) -> None:
        self.name, self.box, self.parts = snapshot.name, box, snapshot.slots
        self.slots = tuple(whole_spec(spec, box) for spec in snapshot.slots)
        self._snapshot, self._changed = snapshot, changed
        self._joining: _Joining | None = None
        self._whole: StillTable | None = None

    @property
    def is_delta(self) -> bool:
        """Whether some of the rows are saved."""
        return self._changed is not None

    def bits(self) -> Bytes:
        """Return a bit a row of the box, 1 for those that have changed here, in whole words of 8 bytes."""
        bits = b"" if self._changed is None else self._changed()
        return np.frombuffer(bits, np.uint8)[: 8 * -(-self._snapshot.n_rows // 64)]

    def begin(self, bits: Bytes) -> None:
        """Choose the rows that are saved, by a bit a row of the box that all its parts agree on; any bits for all."""
        rows = None
        if self.is_delta:
            self._snapshot.narrow(bits)
            rows = marked_rows(bits, self._snapshot.n_rows)
        begin, end = self._share(rows, self.box.part)
        sizes = {spec.name: spec.row_bytes for spec in self.slots}
        memory = {name: aligned_bytes((end - begin) * size) for name, size in sizes.items()}
        values = {name: some.reshape(end - begin, sizes[name]) for name, some in memory.items()}
        self._joining = _Joining(rows, values)

    def n_chosen(self, part: int) -> int:
        """Return how many rows are saved of the share of a part."""
        begin, end = self._share(self._joined.rows, part)
        return end - begin

    def read(self, column: int, rows: npt.NDArray[Any], target: Bytes, *, is_last: bool) -> None:
        """Copy whole rows of the id, column 0, or of a slot."""
        self._source.read(column, rows, target, is_last=is_last)

    def send(self, part: int, begin: int, end: int) -> list[Bytes]:
        """Return the columns of this rank, slot by slot, of those rows that a part saves; they are not read again."""
        rows = self._rows(part, begin, end)
        targets = {spec.name: np.empty(len(rows) * spec.row_bytes, np.uint8) for spec in self.parts}
        self._snapshot.read_slots(rows, targets, is_last=True)
        return [targets[spec.name] for spec in self.parts]

    def take(self, part: int, begin: int, end: int, values: Sequence[Bytes]) -> None:
        """Put the columns that a part has sent, slot by slot, into rows that this rank saves."""
        for spec, some in zip(self.parts, values, strict=True):
            first, last = place_in_row(spec, self.box, part)
            self._joined.values[spec.name][begin:end, first:last] = some.reshape(end - begin, last - first)

    def end(self) -> None:
        """Be the whole rows from now on: all have been taken."""
        rows, values = self._joined
        begin, end = self._share(rows, self.box.part)
        first = self.box.rows[0]
        ids = RowRange(first + begin, end - begin) if rows is None else _ids(first + rows[begin:end])
        columns = {spec.name: Column.over(spec, _tensor(spec, values[spec.name])) for spec in self.slots}
        self._whole, self._joining = StillTable(self.name, end - begin, ids, columns, self.n_all), None

    @property
    def n_rows(self) -> int:
        """Number of rows that this rank writes."""
        return self.n_all if self._whole is None else self._whole.n_rows

    @property
    def n_all(self) -> int:
        """Rows of its share, those that have not changed included."""
        begin, end = self.box.own_rows
        return end - begin

    @property
    def ids(self) -> Ids:
        """The ids of the rows."""
        return self._source.ids

    @property
    def n_kept(self) -> int:
        """Rows that were copied aside because training changed them meanwhile."""
        return self._snapshot.n_kept

    def deletes(self) -> Int64s:
        """Return nothing: all rows are there always."""
        return np.empty(0, np.int64)

    def close(self) -> None:
        """Let the table go."""
        self._snapshot.close()
        self._whole = self._joining = None

    @property
    def _source(self) -> StillTable:
        if self._whole is None:
            raise RuntimeError(f"table {self.name!r}: its columns are not joined, or it is closed")
        return self._whole

    @property
    def _joined(self) -> _Joining:
        if self._joining is None:
            raise RuntimeError(f"table {self.name!r}: nobody has begun to join its columns, or it is closed")
        return self._joining

    def _share(self, rows: Int64s | None, part: int) -> tuple[int, int]:
        """Return where the rows that a part saves begin and end among those that are saved, None for all."""
        begin, end = (row - self.box.rows[0] for row in self.box.shares[part])
        if rows is None:
            return begin, end
        first, last = np.searchsorted(rows, [begin, end]).tolist()
        return first, last

    def _rows(self, part: int, begin: int, end: int) -> Int64s:
        rows = self._joined.rows
        first, _ = self._share(rows, part)
        return np.arange(first + begin, first + end) if rows is None else rows[first + begin : first + end]


class FrozenColumns(FrozenRows):
    """A table that lies by columns at the moment of a save, and which of its rows have changed on this rank."""

    def __init__(self, frozen: FrozenRows, box: Box) -> None:
        self.snapshot, self._frozen, self._box = frozen.snapshot, frozen, box

    def is_replaced(self, base: str) -> bool:
        """Say whether there are no marks since this base."""
        return self._frozen.is_replaced(base)

    @property
    def n_changed(self) -> int:
        """About how many rows a delta would have of the share of this rank: in all as many as have changed."""
        n, part, n_parts = self._frozen.n_changed, self._box.part, len(self._box.columns)
        return n * (part + 1) // n_parts - n * part // n_parts

    def rows_since(self, base: str) -> ColumnRows:
        """Return what has changed since this base, on any rank that has columns of it."""
        return ColumnRows(self.snapshot, self._box, lambda: self._frozen.changed_since(base))

    def delta(self, base: str) -> DeltaSource:
        """Return the columns of this rank of what has changed there."""
        return self._frozen.delta(base)

    def changes(self, base: str) -> DeltaSource:
        """Return the same, of a snapshot whose other rows can be read."""
        return self._frozen.changes(base)

    def changed_since(self, base: str) -> Bytes:
        """Return a bit a row, 1 for those that have changed on this rank."""
        return self._frozen.changed_since(base)

    def committed(self, save_id: str) -> None:
        """Make this checkpoint the base."""
        self._frozen.committed(save_id)

    def failed(self) -> None:
        """Keep the base."""
        self._frozen.failed()


def _ids(ids: Int64s) -> Column:
    return Column.over(_ID_SPEC, torch.from_numpy(ids))


def _tensor(spec: SlotSpec, values: Bytes) -> torch.Tensor:
    return torch.from_numpy(values.reshape(-1)).view(getattr(torch, spec.dtype)).view(len(values), *spec.shape)
