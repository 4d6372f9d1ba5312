"""The parts of one table as a dataset that Arrow, polars and duckdb query by themselves (no torch here)."""

from __future__ import annotations

import pyarrow.dataset as ds

from recckpt.sparse.files.arrow_format import TABLE, part_schema
from recckpt.sparse.files.part_reader import PartReader
from recckpt.sparse.files.table_reader import TableReader


def table_dataset(table: TableReader) -> ds.Dataset:
    """Return a dataset of the rows of a table.

    Raises:
        CorruptCheckpointError: a part is missing, cut, of another schema or compressed, or an id is in two shards.
    """
    table.check_shards()
    name, file_format = table.entry.name, ds.IpcFileFormat()
    fragments, is_shared = [], False
    for part in (part for catalog in table.catalogs for part in catalog.parts):
        names = {batch.table for batch in part.batches}
        if name in names:
            reader = PartReader(table.storage, table.directory, part, table.entry.slots)
            fragments.append(file_format.make_fragment(reader.source()))
            is_shared |= len(names) > 1
    found = ds.FileSystemDataset(fragments, part_schema(table.entry.slots), file_format)
    return found.filter(ds.field(TABLE) == name) if is_shared else found  # a filter copies what it lets through
