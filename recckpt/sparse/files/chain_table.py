"""One table of a checkpoint, whatever links of a chain its rows lie in (no torch here)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa

from recckpt.sparse.files.arrow_format import ids_in
from recckpt.sparse.files.merged_rows import merged_rows
from recckpt.sparse.files.once import Int64s, LinkIds, check_once, newest
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
        return (batch for link, _, _ in newest(map(AskedTable, self.links), ids) for batch in link.batches)

    def with_slots(self, slots: Sequence[str]) -> ChainTable:
        """Return the reader of other slots of the table."""
        return ChainTable([replace(link, slots=slots) for link in self.links])


class AskedTable:
    """What one link has of the ids that it was asked for.

    Attributes:
        batches: their rows.
    """

    def __init__(self, link: TableReader) -> None:
        self._link = link
        self.batches: list[pa.RecordBatch] = []

    def find(self, ids: Int64s) -> Int64s:
        """Read the rows of ids, which are sorted, and say which of them are there, and which are deleted."""
        shards = []
        for shard in (self._link.of_shards(catalog) for catalog in self._link.catalogs):
            batches = list(shard.rows_of(ids))
            shards.append((_ids(batches), shard.deletes_of(ids)))
            self.batches += batches
        check_once(shards, partial(table_damage, self._link), between=self._link.may_repeat)
        return LinkIds(np.sort(_ids(self.batches)), (deletes for _, deletes in shards)).find(ids)


def _ids(batches: Iterable[pa.RecordBatch]) -> Int64s:
    return np.concatenate([np.empty(0, np.int64), *(ids_in(batch) for batch in batches)])
