"""Which shards a query of Arrow may have rows in, by the ranges of their ids (no torch here)."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow.fs import LocalFileSystem

from recckpt.format.catalog import Catalog
from recckpt.format.shards import IdRange
from recckpt.sparse.files.arrow_format import ID


def with_ids_in(ids: IdRange) -> ds.Expression:
    """Return what holds for rows whose ids are in a range."""
    return (ds.field(ID) >= ids[0]) & (ds.field(ID) <= ids[1])


def shards_that_meet(
    shards: Sequence[Catalog], table: str, schema: pa.Schema, condition: ds.Expression | None
) -> Sequence[Catalog]:
    """Return the shards that may have rows of a table for which a condition on columns of a schema holds.

    Arrow decides that, as it does for partitions of a dataset, without a look at any file.
    """
    of_table = [(str(number), shard.ids[table]) for number, shard in enumerate(shards) if table in shard.ids]
    if condition is None or len(of_table) < 2:
        return shards
    file_format, files = ds.IpcFileFormat(), LocalFileSystem()
    fragments = [file_format.make_fragment(name, files, with_ids_in(ids)) for name, ids in of_table]
    try:
        met = ds.FileSystemDataset(fragments, schema, file_format, files).get_fragments(condition)
        return [shards[int(fragment.path)] for fragment in met]
    except pa.ArrowException:  # of numbers that ids do not convert to: the query itself is to say so
        return shards
