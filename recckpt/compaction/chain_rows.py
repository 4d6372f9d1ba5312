"""The rows of a table in a chain as a source of parts (no torch here)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from recckpt.format.buckets import N_BUCKETS
from recckpt.sparse.files.arrow_format import ID, column_buffer
from recckpt.sparse.files.link_cursors import Piece, bytes_up_to
from recckpt.sparse.files.merged_rows import merged_range
from recckpt.sparse.files.once import Int64s
from recckpt.sparse.files.part_plan import TableBytes
from recckpt.sparse.files.part_writer import ColumnBytes, RowBatch
from recckpt.sparse.files.table_reader import TableReader

FRACTIONS = N_BUCKETS  # of a byte, in which sizes are counted: so no bucket that may have rows has the size 0


def size_of(links: Sequence[TableReader]) -> TableBytes:
    """Return about how large the rows of a table are in all links of a chain, newest first, in fractions of a byte."""
    entry, up_to = links[0].entry, bytes_up_to(links, 0)
    return TableBytes(entry.name, entry.slots, int(up_to[-1]), lambda: up_to)


@dataclass(frozen=True)
class ChainRows:
    """The rows of a table in a chain, merged; ``used`` is called with those of each batch that is read."""

    links: Sequence[TableReader]  # newest first
    budget_bytes: int
    used: Callable[[Piece, Int64s], object]

    def batches(self, begin: int, end: int) -> Iterator[RowBatch]:
        """Yield the rows in buckets [begin, end)."""
        entry = self.links[0].entry
        for batch in merged_range(self.links, (begin, end), self.budget_bytes, self.used, is_reused=True):
            ids = np.frombuffer(column_buffer(batch.column(ID)), np.int64)
            values = ((slot, np.frombuffer(column_buffer(batch.column(slot.name)), np.uint8)) for slot in entry.slots)
            yield RowBatch(entry.name, ids, [ColumnBytes(slot, len(ids), [value]) for slot, value in values])
