"""One table of a checkpoint, whatever links of a chain its rows lie in (no torch here)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from recckpt.format.distinct import distinct, is_among
from recckpt.sparse.files.arrow_format import ID
from recckpt.sparse.files.id_check import Int64s, repeats
from recckpt.sparse.files.merged_rows import merged_rows
from recckpt.sparse.files.table_reader import TableReader, table_damage

_MERGE_BYTES = 128 << 20


@dataclass(frozen=True)
class ChainTable:
    """Reads one table of a checkpoint by what its links hold of it, newest first, of which the last holds all."""

    links: Sequence[TableReader]

    @property
    def schema(self) -> pa.Schema:
        """The schema of the batches: ``id`` and one column a slot."""
        return self.links[0].schema

    def all_rows(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows, of a single link in bucket order within each shard, of several over all.

        Raises:
            CorruptCheckpointError: a file is damaged, an id is twice in one link, or rows are missing.
        """
        return self.links[0].all_rows() if len(self.links) == 1 else merged_rows(self.links, _MERGE_BYTES)

    def rows_of(self, ids: Int64s) -> Iterator[pa.RecordBatch]:
        """Yield the rows of ids, which are sorted, each once; batches that cannot hold them are not read.

        Raises:
            CorruptCheckpointError: a file is damaged, or one of the ids is twice in one link.
        """
        if len(self.links) == 1:
            return self.links[0].rows_of(ids)
        return self._newest_of(ids)

    def _newest_of(self, left: Int64s) -> Iterator[pa.RecordBatch]:
        """Ask each link for the ids of which no newer one knows."""
        for link in self.links:
            if not len(left):
                return
            batches, deleted = _rows_and_deletes(link, left)
            yield from batches
            known = [batch.column(ID).to_numpy() for batch in batches]
            left = left[~is_among(left, distinct(deleted, *known))]

    def with_slots(self, slots: Sequence[str]) -> ChainTable:
        """Return the reader of other slots of the table."""
        return ChainTable([replace(link, slots=slots) for link in self.links])


def _rows_and_deletes(link: TableReader, ids: Int64s) -> tuple[list[pa.RecordBatch], Int64s]:
    """Return the rows of ids that one link has, and the ids that it deletes, some of which may be rows as well."""
    batches: list[pa.RecordBatch] = []
    deleted = [np.empty(0, np.int64)]
    for catalog in link.catalogs:
        shard = link.of_shards(catalog)
        upserted = list(shard.rows_of(ids))
        deleted.append(shard.deletes_of(ids))
        _refuse_repeats(link, "in one shard", [_ids(upserted), deleted[-1]])
        batches += upserted
    _refuse_repeats(link, "between shards", [_ids(batches)])
    return batches, distinct(*deleted)


def _refuse_repeats(link: TableReader, where: str, ids: Sequence[Int64s]) -> None:
    for found, expected in repeats(np.concatenate(ids)):
        raise table_damage(link, where, found, expected)


def _ids(batches: Iterable[pa.RecordBatch]) -> Int64s:
    return np.concatenate([np.empty(0, np.int64), *(batch.column(ID).to_numpy() for batch in batches)])
