"""Which rows go into which part: decided from row counts alone, before a byte is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from recckpt.types import SlotSpec

BATCH_BYTES = 8 << 20
PART_BYTES = 1 << 30
_MAX_TABLES = 32_767  # part of the format: the table column counts in int16
_ID_BYTES = 8 + 2  # the id and table columns


@dataclass(frozen=True)
class Chunk:
    """Rows [begin, end) of one table, counted in bucket order."""

    table: int
    begin: int
    end: int


@dataclass(frozen=True)
class PartPlan:
    """One part to write.

    Attributes:
        group: number of the schema group.
        number: number of the part in its group.
        slots: the slots of all its tables.
        chunks: what it holds, in file order; different tables.
    """

    group: int
    number: int
    slots: tuple[SlotSpec, ...]
    chunks: tuple[Chunk, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in all columns."""
        return row_bytes(self.slots)


def row_bytes(slots: Sequence[SlotSpec]) -> int:
    """Return the bytes of one row in all columns."""
    return _ID_BYTES + sum(slot.row_bytes for slot in slots)


def plan_parts(
    tables: Sequence[tuple[int, tuple[SlotSpec, ...]]],
    concurrency: int,
    part_bytes: int = PART_BYTES,
    least_bytes: int = 1,
) -> list[PartPlan]:
    """Divide tables over parts of about equal bytes.

    Args:
        tables: rows and slots of each table; the number in this list stands for the table.
        concurrency: number of writers; one large table is spread over as many parts.
        part_bytes: size at which parts roll.
        least_bytes: size below which another part is not worth its file.

    Returns:
        Parts in the order of group and number. Their count is at most groups + concurrency +
        total bytes / part_bytes, whatever the number of tables, and one more for every 32,767 tables.
        A group has the same number on all ranks that have the same tables, with rows or without.
    """
    groups: dict[tuple[SlotSpec, ...], list[tuple[int, int]]] = {}
    for table, (rows, slots) in enumerate(tables):
        groups.setdefault(slots, []).append((table, rows))
    total = sum(rows * row_bytes(slots) for rows, slots in tables)
    target = max(least_bytes, min(part_bytes, -(-total // concurrency)))
    return [
        PartPlan(group, number, slots, chunks)
        for group, slots in enumerate(sorted(groups))
        for number, chunks in enumerate(_roll(groups[slots], target, row_bytes(slots)))
    ]


def _roll(tables: Sequence[tuple[int, int]], target_bytes: int, row_bytes: int) -> Iterator[tuple[Chunk, ...]]:
    """Cut the rows of (table, rows) pairs, laid end to end, into parts of equal size near the target."""
    n_rows = sum(rows for _, rows in tables)
    n_parts = max(1, min(n_rows, round(n_rows * row_bytes / target_bytes)))
    part_rows = -(-n_rows // n_parts)
    chunks: list[Chunk] = []
    room = part_rows
    for table, rows in tables:
        begin = 0
        while begin < rows:
            if room == 0 or len(chunks) == _MAX_TABLES:
                yield tuple(chunks)
                chunks, room = [], part_rows
            end = min(rows, begin + room)
            chunks.append(Chunk(table, begin, end))
            room -= end - begin
            begin = end
    if chunks:
        yield tuple(chunks)
