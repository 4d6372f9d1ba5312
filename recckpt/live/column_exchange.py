"""How ranks that have columns of the same rows send them to each other, so that each saves some of the rows whole.

Of W ranks each saves a W-th of the rows. What it lacks comes in windows, at meetings of all ranks, so that a rank that
fails ends the exchange for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from recckpt.errors import LiveTableError
from recckpt.live.column_rows import ColumnRows
from recckpt.parallel.meetings import Meetings
from recckpt.types import Box, SlotSpec

Bytes = npt.NDArray[np.uint8]
WINDOW_BYTES = 16 << 20  # that a rank sends at a meeting, about


@dataclass(frozen=True)
class Head:
    """What other ranks have to know of the part of a table that a rank has."""

    box: Box
    slots: tuple[SlotSpec, ...]
    is_delta: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the part."""
        return sum(spec.row_bytes for spec in self.slots)


@dataclass(frozen=True)
class Holders:
    """Who has which part of the rows of which this rank has one, by rank."""

    source: ColumnRows
    heads: Mapping[int, Head]


@dataclass(frozen=True)
class Piece:
    """Rows [begin, end) of those that a part saves of a table."""

    table: int
    begin: int
    end: int


def join_columns(sources: Sequence[ColumnRows], meetings: Meetings, *, window_bytes: int | None = None) -> None:
    """Make whole rows of what the ranks have of tables; all have the same tables, in one order. Collective.

    The rows of a delta are those that have changed on any of the ranks that have columns of them.

    Args:
        sources: of this rank.
        meetings: where the ranks meet.
        window_bytes: that a rank sends at a meeting, about; None for ``WINDOW_BYTES``.

    Raises:
        LiveTableError: what the ranks have is not all parts of the rows, or something has written to a table unseen.
        RecckptError: another rank has failed.
    """
    exchange = _Exchange(sources, meetings, window_bytes or WINDOW_BYTES)
    exchange.agree()
    exchange.send_all()
    for source in sources:
        source.end()


class _Exchange:
    """One exchange of columns."""

    def __init__(self, sources: Sequence[ColumnRows], meetings: Meetings, window_bytes: int) -> None:
        self._sources, self._meetings = sources, meetings
        of_ranks = meetings.gather([Head(each.box, each.parts, each.is_delta) for each in sources])
        self._tables = [
            Holders(source, holders_of(source.name, number, of_ranks, meetings.rank))
            for number, source in enumerate(sources)
        ]
        self._is_delta = any(head.is_delta for heads in of_ranks for head in heads)
        widest = max((len(head.box.columns) for heads in of_ranks for head in heads), default=1)
        self._limit = window_bytes // max(1, widest - 1)  # of what one rank sends another at a time

    def agree(self) -> None:
        """Agree on the rows that have changed."""
        own = [source.bits() for source in self._sources]
        if self._is_delta:
            parcels = [_joined(own[n] for n in self._shared(rank)) for rank in range(self._meetings.size)]
            union = [bits.copy() for bits in own]
            for rank, parcel in enumerate(self._meetings.exchange(parcels)):
                for n, bits in zip(self._shared(rank), self._cut(parcel, own, rank), strict=True):
                    union[n] |= bits
            own = union
        for source, bits in zip(self._sources, own, strict=True):
            source.begin(bits)

    def send_all(self) -> None:
        """Send the columns of this rank to those that save the rows, and take theirs, window by window."""
        size, rank = self._meetings.size, self._meetings.rank
        sent = [self._windows(to, rank) for to in range(size)]
        taken = [self._windows(rank, sender) for sender in range(size)]
        n_needed = max((len(each) for to, each in enumerate(sent) if to != rank), default=0)
        n_windows = max(self._meetings.gather(n_needed))
        for number in range(n_windows):
            parcels = [self._packed(_nth(sent[to], number), to) for to in range(size)]
            for sender, parcel in enumerate(self._meetings.exchange(parcels)):
                if sender != rank:
                    self._unpack(_nth(taken[sender], number), sender, parcel)
        for piece in (piece for window in taken[rank] for piece in window):
            source = self._sources[piece.table]
            part = source.box.part
            source.take(part, piece.begin, piece.end, source.send(part, piece.begin, piece.end))

    def _shared(self, rank: int) -> list[int]:
        """Return the tables of which a rank, another than this one, has columns of the same rows as this one."""
        is_other = rank != self._meetings.rank
        return [n for n, table in enumerate(self._tables) if is_other and rank in table.heads]

    def _cut(self, parcel: Bytes, own: Sequence[Bytes], rank: int) -> Iterator[Bytes]:
        at = 0
        for n in self._shared(rank):
            yield parcel[at : at + len(own[n])]
            at += len(own[n])

    def _windows(self, to: int, sender: int) -> list[list[Piece]]:
        """Return what one rank sends another, or takes of its own, window by window; both know it alike."""
        sizes = {
            n: (table.source.n_chosen(table.heads[to].box.part), table.heads[sender].row_bytes)
            for n, table in enumerate(self._tables)
            if to in table.heads and sender in table.heads
        }
        return windows(sizes, self._limit)

    def _packed(self, window: Sequence[Piece], to: int) -> Bytes:
        if to == self._meetings.rank:
            return np.empty(0, np.uint8)
        tables = self._tables
        return _joined(
            values
            for piece in window
            for values in tables[piece.table].source.send(
                tables[piece.table].heads[to].box.part, piece.begin, piece.end
            )
        )

    def _unpack(self, window: Sequence[Piece], sender: int, parcel: Bytes) -> None:
        at = 0
        for piece in window:
            table, values = self._tables[piece.table], []
            head = table.heads[sender]
            for spec in head.slots:
                n_bytes = (piece.end - piece.begin) * spec.row_bytes
                values.append(parcel[at : at + n_bytes])
                at += n_bytes
            table.source.take(head.box.part, piece.begin, piece.end, values)


def holders_of(name: str, number: int, of_ranks: Sequence[Sequence[Head]], rank: int) -> dict[int, Head]:
    """Return who has columns of the rows of which a rank has some, each with what it has.

    Raises:
        LiveTableError: they do not have all parts, each once and of the same slots.
    """
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
            f"{len(own.box.columns)} once, with the same slots: call live_tables on each rank once the model is sharded"
        )
    return heads


def windows(sizes: Mapping[int, tuple[int, int]], limit: int) -> list[list[Piece]]:
    """Return windows of about ``limit`` bytes; ``sizes`` are (rows, bytes of a row) by table; pure."""
    made: list[list[Piece]] = []
    left = 0
    for table, (n_rows, row_bytes) in sizes.items():
        at = 0
        while at < n_rows:
            if left < row_bytes:
                made.append([])
                left = max(limit, row_bytes)
            end = min(n_rows, at + left // row_bytes)
            made[-1].append(Piece(table, at, end))
            left -= (end - at) * row_bytes
            at = end
    return made


def _nth(some: Sequence[Sequence[Piece]], number: int) -> Sequence[Piece]:
    return some[number] if number < len(some) else ()


def _joined(pieces: Iterator[Bytes]) -> Bytes:
    return np.concatenate([np.empty(0, np.uint8), *pieces])
