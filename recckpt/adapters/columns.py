"""Saves a table that is sharded by columns: ranks exchange columns, and each rank saves some whole rows.

Each of W ranks saves 1/W of the rows. It receives its missing columns in windows, one window per collective exchange,
so that a failing rank ends the exchange on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from recckpt.errors import LiveTableError
from recckpt.live.attached import AttachedTable
from recckpt.live.boxes import place_in_row, whole_spec
from recckpt.live.store import RowRange
from recckpt.parallel.ranks import Meetings
from recckpt.sparse.files.table_rows import RowsInParts, StillTable, TableSource
from recckpt.sparse.table.column import Column, aligned_bytes
from recckpt.sparse.table.snapshot import Snapshot
from recckpt.sparse.table.store import Ids, marked_rows
from recckpt.types import Box, SlotSpec

Bytes = npt.NDArray[np.uint8]
WINDOW_BYTES = 16 << 20  # about how many bytes a rank sends per collective exchange
Int64s = npt.NDArray[np.int64]
_ID_SPEC = SlotSpec("id", "int64", ())


@dataclass(frozen=True)
class Head:
    box: Box
    slots: tuple[SlotSpec, ...]
    is_delta: bool


Piece = tuple[int, int, int]  # table, and the range [begin, end) of its rows that one part saves


def join_columns(sources: Sequence[ColumnRows], meetings: Meetings, *, window_bytes: int | None = None) -> None:
    """Exchange columns so that each rank has whole rows; all ranks have the same tables in the same order. Collective.

    A row belongs to a delta if it changed on any rank that has columns of it. A rank sends about ``window_bytes`` per
    collective exchange. LiveTableError if parts of rows are missing, or a table was changed without a notification;
    RecckptError if another rank failed.
    """
    exchange = _Exchange(sources, meetings, window_bytes or WINDOW_BYTES)
    exchange.agree()
    exchange.send_all()
    for source in sources:
        source.end()


class _Exchange:
    """One exchange of columns: for each table, this rank's source, and the ranks with other columns of its rows."""

    def __init__(self, sources: Sequence[ColumnRows], meetings: Meetings, window_bytes: int) -> None:
        self._meetings = meetings
        of_ranks = meetings.gather([Head(each.box, each.parts, each.is_delta) for each in sources])
        self._tables = [
            (source, holders_of(source.name, number, of_ranks, meetings.rank)) for number, source in enumerate(sources)
        ]
        self._is_delta = any(head.is_delta for heads in of_ranks for head in heads)
        widest = max((len(head.box.columns) for heads in of_ranks for head in heads), default=1)
        self._limit = window_bytes // max(1, widest - 1)  # bytes that one rank sends to another at a time

    def agree(self) -> None:
        own = [source.bits() for source, _ in self._tables]
        union = [bits.copy() for bits in own]
        if self._is_delta:
            size, here = self._meetings.size, self._meetings.rank
            # For each rank: the tables of which it has columns for the same rows as this rank.
            shared = [
                [n for n, (_, heads) in enumerate(self._tables) if rank != here and rank in heads]
                for rank in range(size)
            ]
            parcels = self._meetings.exchange([_joined(own[n] for n in tables) for tables in shared])
            for tables, parcel in zip(shared, parcels, strict=True):
                at = 0
                for n in tables:
                    union[n] |= parcel[at : at + len(own[n])]
                    at += len(own[n])
        for (source, _), bits in zip(self._tables, union, strict=True):
            source.begin(bits)

    def send_all(self) -> None:
        """Send this rank's columns to the ranks that save the rows, and receive columns for this rank's own rows."""
        size, rank = self._meetings.size, self._meetings.rank
        sent = [self._windows(to, rank) for to in range(size)]
        taken = [self._windows(rank, sender) for sender in range(size)]
        n_needed = max((len(each) for to, each in enumerate(sent) if to != rank), default=0)
        n_windows = max(self._meetings.gather(n_needed))
        for number in range(n_windows):
            parcels = [self._packed(sent[to][number : number + 1], to) for to in range(size)]
            for sender, parcel in enumerate(self._meetings.exchange(parcels)):
                if sender != rank:
                    self._unpack(taken[sender][number : number + 1], sender, parcel)
        for table, begin, end in (piece for window in taken[rank] for piece in window):
            source, _ = self._tables[table]
            source.take(source.box.part, begin, end, source.send(source.box.part, begin, end))

    def _windows(self, to: int, sender: int) -> list[list[Piece]]:
        """Return the pieces that ``sender`` sends to rank ``to``, window by window; both ranks compute the same."""
        sizes = {
            n: (source.n_chosen(heads[to].box.part), sum(spec.row_bytes for spec in heads[sender].slots))
            for n, (source, heads) in enumerate(self._tables)
            if to in heads and sender in heads
        }
        return windows(sizes, self._limit)

    def _packed(self, some: Sequence[Sequence[Piece]], to: int) -> Bytes:
        values: list[Bytes] = []
        for table, begin, end in (piece for window in some for piece in window if to != self._meetings.rank):
            source, heads = self._tables[table]
            values += source.send(heads[to].box.part, begin, end)
        return _joined(values)

    def _unpack(self, some: Sequence[Sequence[Piece]], sender: int, parcel: Bytes) -> None:
        at = 0
        for table, begin, end in (piece for window in some for piece in window):
            source, heads = self._tables[table]
            values = []
            for spec in heads[sender].slots:
                n_bytes = (end - begin) * spec.row_bytes
                values.append(parcel[at : at + n_bytes])
                at += n_bytes
            source.take(heads[sender].box.part, begin, end, values)


def holders_of(name: str, number: int, of_ranks: Sequence[Sequence[Head]], rank: int) -> dict[int, Head]:
    """Return the ranks with columns of the same rows as ``rank``; LiveTableError if a part is missing or repeated."""
    own = of_ranks[rank][number]
    if own.box.rows[0] == own.box.rows[1]:
        return {}
    heads = {other: heads[number] for other, heads in enumerate(of_ranks) if heads[number].box.rows == own.box.rows}
    parts = [head.box.part for head in heads.values()]
    is_alike = all(
        (head.box.columns, head.is_delta, [spec.name for spec in head.slots])
        == (own.box.columns, own.is_delta, [spec.name for spec in own.slots])
        for head in heads.values()
    )
    if sorted(parts) != list(range(len(own.box.columns))) or not is_alike:
        raise LiveTableError(
            f"table {name!r}: found the parts {parts} of its columns on the ranks {list(heads)}, expected each of "
            f"{len(own.box.columns)} once, with the same slots: call live_tables on each rank after sharding"
        )
    return heads


def windows(sizes: Mapping[int, tuple[int, int]], limit: int) -> list[list[Piece]]:
    """Return windows of about ``limit`` bytes; ``sizes`` maps each table to (rows, bytes per row). Pure."""
    made: list[list[Piece]] = []
    left = 0
    for table, (n_rows, row_bytes) in sizes.items():
        at = 0
        while at < n_rows:
            if left < row_bytes:
                made.append([])
                left = max(limit, row_bytes)
            end = min(n_rows, at + left // row_bytes)
            made[-1].append((table, at, end))
            left -= (end - at) * row_bytes
            at = end
    return made


def _joined(pieces: Iterable[Bytes]) -> Bytes:
    return np.concatenate([np.empty(0, np.uint8), *pieces])


class ColumnRows(RowsInParts):
    """Rows of a table sharded by columns: a source of whole rows once the ranks have exchanged columns.

    ``snapshot`` has this rank's columns of all rows of ``box``. ``changed`` returns one bit per row, 1 if the row
    belongs to the delta; without ``changed`` all rows are saved, and only then is their number known before the
    exchange. Each value is read once.
    """

    join = staticmethod(join_columns)

    def __init__(self, snapshot: Snapshot, box: Box, changed: Callable[[], Bytes] | None = None) -> None:
        self.name, self.box, self.parts = snapshot.name, box, snapshot.slots
        self.slots = tuple(whole_spec(spec, box) for spec in snapshot.slots)
        self._snapshot, self._changed = snapshot, changed
        # The saved rows of the box, None for all; and slot -> whole rows of this rank's share, with the shape
        # (rows, bytes of a row).
        self._joining: tuple[Int64s | None, Mapping[str, Bytes]] | None = None
        self._whole: StillTable | None = None

    @property
    def is_delta(self) -> bool:
        return self._changed is not None

    def since(self, changed: Callable[[], Bytes]) -> ColumnRows:
        return ColumnRows(self._snapshot, self.box, changed)

    def share_of(self, n_changed: int) -> int:
        """Return about how many of ``n_changed`` changed rows this rank saves."""
        part, n_parts = self.box.part, len(self.box.columns)
        return n_changed * (part + 1) // n_parts - n_changed * part // n_parts

    def bits(self) -> Bytes:
        """Return one bit per row of the box, 1 if the row changed on this rank, padded to a multiple of 8 bytes."""
        bits = b"" if self._changed is None else self._changed()
        return np.frombuffer(bits, np.uint8)[: 8 * -(-self._snapshot.n_rows // 64)]

    def begin(self, bits: Bytes) -> None:
        """Choose the rows to save by the union of all parts' bits; the bits are ignored if all rows are saved."""
        rows = None
        if self.is_delta:
            self._snapshot.narrow(bits)
            rows = marked_rows(bits, self._snapshot.n_rows)
        begin, end = self._share(rows, self.box.part)
        sizes = {spec.name: spec.row_bytes for spec in self.slots}
        memory = {name: aligned_bytes((end - begin) * size) for name, size in sizes.items()}
        values = {name: some.reshape(end - begin, sizes[name]) for name, some in memory.items()}
        self._joining = rows, values

    def n_chosen(self, part: int) -> int:
        begin, end = self._share(self._joined[0], part)
        return end - begin

    def read_slots(self, rows: npt.NDArray[Any], targets: Mapping[str, Bytes], *, is_last: bool) -> None:
        self._source.read_slots(rows, targets, is_last=is_last)

    def send(self, part: int, begin: int, end: int) -> list[Bytes]:
        """Return this rank's columns, one array per slot, of rows that ``part`` saves. Call this once for each row."""
        chosen, _ = self._joined
        first, _ = self._share(chosen, part)
        rows = np.arange(first + begin, first + end) if chosen is None else chosen[first + begin : first + end]
        targets = {spec.name: np.empty(len(rows) * spec.row_bytes, np.uint8) for spec in self.parts}
        self._snapshot.read_slots(rows, targets, is_last=True)
        return [targets[spec.name] for spec in self.parts]

    def take(self, part: int, begin: int, end: int, values: Sequence[Bytes]) -> None:
        for spec, some in zip(self.parts, values, strict=True):
            first, last = place_in_row(spec, self.box, part)
            self._joined[1][spec.name][begin:end, first:last] = some.reshape(end - begin, last - first)

    def end(self) -> None:
        """Make the whole rows readable, after all columns have been received."""
        rows, values = self._joined
        begin, end = self._share(rows, self.box.part)
        first = self.box.rows[0]
        ids: RowRange | Column = RowRange(first + begin, end - begin)
        if rows is not None:
            ids = Column.over(_ID_SPEC, torch.from_numpy(first + rows[begin:end]))
        columns = {}
        for spec in self.slots:
            tensor = torch.from_numpy(values[spec.name].reshape(-1)).view(getattr(torch, spec.dtype))
            columns[spec.name] = Column.over(spec, tensor.view(end - begin, *spec.shape))
        self._whole, self._joining = StillTable(self.name, end - begin, ids, columns, self.n_all), None

    @property
    def n_rows(self) -> int:
        return self.n_all if self._whole is None else self._whole.n_rows

    @property
    def n_all(self) -> int:
        begin, end = self.box.own_rows
        return end - begin

    @property
    def ids(self) -> Ids:
        return self._source.ids

    @property
    def n_kept(self) -> int:
        return self._snapshot.n_kept

    def deletes(self) -> Int64s:
        return np.empty(0, np.int64)

    def close(self) -> None:
        self._snapshot.close()
        self._whole = self._joining = None

    @property
    def _source(self) -> StillTable:
        if self._whole is None:
            raise RuntimeError(f"table {self.name!r}: its columns are not joined, or it is closed")
        return self._whole

    @property
    def _joined(self) -> tuple[Int64s | None, Mapping[str, Bytes]]:
        if self._joining is None:
            raise RuntimeError(f"table {self.name!r}: the exchange of its columns has not begun, or it is closed")
        return self._joining

    def _share(self, rows: Int64s | None, part: int) -> tuple[int, int]:
        """Return the range of ``rows`` that a part saves; ``rows`` None means all rows of the box."""
        begin, end = (row - self.box.rows[0] for row in self.box.shares[part])
        if rows is None:
            return begin, end
        first, last = np.searchsorted(rows, [begin, end]).tolist()
        return first, last


class AttachedColumns(AttachedTable):
    def source(self, rows: Snapshot) -> TableSource:
        return ColumnRows(rows, self.rows.box)
