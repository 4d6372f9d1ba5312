"""The tables of one rank, written by several threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from recckpt.checkpoint.shard_writer import BATCH_BYTES, ShardWriter
from recckpt.sparse.files.ordered_rows import OrderedRows, PieceBuffers
from recckpt.sparse.files.table_rows import TableSource, deleted_from

ORDER_BYTES = 128 << 20  # all threads together
_ORDER_ITEM = 4


class SparseSaver:
    """Writes the tables of one shard with several threads, each of which keeps one buffer from save to save.

    Memory beyond the tables: a buffer of ``PIECE_BYTES`` a thread, and ``order_bytes`` for the order of the rows;
    larger tables are ordered in passes.
    """

    def __init__(self, concurrency: int, *, batch_bytes: int = BATCH_BYTES, order_bytes: int = ORDER_BYTES) -> None:
        self._concurrency = concurrency
        self._batch_bytes = batch_bytes
        self._order_rows = max(1, order_bytes // concurrency // _ORDER_ITEM)
        self._buffers = PieceBuffers()

    def save(self, tables: Sequence[TableSource], shard: ShardWriter, advance: Callable[[int], object]) -> None:
        """Write the rows of tables, and the ids that a delta has to name as deleted.

        ``advance`` is called with the bytes of each batch once it is written, from several threads.

        Raises:
            StateMismatchError: a table has an id twice.
            OSError: the storage failed; other files of the shard may be there, without a catalog.
        """
        rows, deleted = self._ordered(tables), self._ordered([deleted_from(table) for table in tables])
        shard.rows(rows, self._concurrency, advance, least_bytes=self._batch_bytes)
        shard.rows(deleted, self._concurrency, advance, least_bytes=self._batch_bytes, holds="deletes")

    def _ordered(self, sources: Sequence[TableSource]) -> list[OrderedRows]:
        return [OrderedRows(source, self._batch_bytes, self._order_rows, self._buffers) for source in sources]
