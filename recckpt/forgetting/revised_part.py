"""One part of a revision: copied as it is, or written again without the rows, or deletes, of some ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain as chained

import numpy as np

from recckpt.checkpoint.link import OpenLink
from recckpt.errors import CorruptCheckpointError
from recckpt.forgetting.held_ids import Ids
from recckpt.format import layout
from recckpt.format.buckets import bucket_of
from recckpt.format.catalog import Part
from recckpt.format.distinct import is_among
from recckpt.output_dir.new_checkpoint import Target
from recckpt.sparse.files.arrow_format import ID_SPEC, column_buffer, ids_in
from recckpt.sparse.files.link_cursors import row_of
from recckpt.sparse.files.part_reader import PartReader
from recckpt.sparse.files.part_writer import ColumnBytes, PartWriter
from recckpt.sparse.files.row_sums import RowSums
from recckpt.sparse.files.verifier import check_part
from recckpt.types import SlotSpec

_STEP_BYTES = 8 << 20
_Batch = tuple[str, tuple[int, int], list[ColumnBytes]]  # table, buckets, columns


@dataclass(frozen=True)
class OmittedRows:
    """What is left out: ids of tables."""

    tables: tuple[str, ...]
    ids: Ids


def copy_part(link: OpenLink, part: Part, to: Target) -> Part:
    """Copy a part, and hold every byte of the copy against the catalog."""
    source, copy = layout.join(link.directory, part.file), layout.join(to.directory, part.file)
    with link.files.open(source) as content, to.storage.create(copy) as sink:
        while data := content.read(_STEP_BYTES):
            sink.write(data)
    _check(to, link, part, None)
    return part


def revise_part(link: OpenLink, part: Part, to: Target, erasure: OmittedRows) -> Part | None:
    """Write a part without some ids and return its catalog entry, None where nothing is left of it.

    All other rows keep their bytes and their order; what was written is read back and compared with the source.

    Raises:
        CorruptCheckpointError: the source is damaged, or what was written is not the same.
        OSError: the storage failed.
    """
    slots = _slots(link, part)
    reader = PartReader(link.files, link.directory, part, slots)
    sums = RowSums()
    batches = _kept(reader, (ID_SPEC, *slots), erasure, sums)
    first = next(batches, None)
    if first is None:
        return None
    with to.storage.create(layout.join(to.directory, part.file)) as sink:
        writer = PartWriter(sink, part.file, part.tables, slots)
        for table, buckets, columns in chained([first], batches):
            writer.write(table, buckets, columns)
        written = replace(writer.finish(), holds=part.holds)
    _check(to, link, written, sums)
    return written


def _slots(link: OpenLink, part: Part) -> tuple[SlotSpec, ...]:
    return link.manifest.named_table(part.tables[0]).slots if part.holds == "rows" else ()


def _kept(reader: PartReader, specs: tuple[SlotSpec, ...], erasure: OmittedRows, sums: RowSums) -> Iterator[_Batch]:
    """Yield what stays of each batch; add it up."""
    for number, batch in enumerate(reader.part.batches):
        columns = reader.read(number)
        ids = ids_in(columns)
        values = [np.frombuffer(column_buffer(columns[spec.name]), row_of(spec)) for spec in specs]
        if batch.table in erasure.tables:
            stays = np.flatnonzero(~is_among(ids, erasure.ids))
            if len(stays) < len(ids):
                ids, values = ids[stays], [column[stays] for column in values]
        if len(ids):
            sums.add(batch.table, values, slice(None))
            first, last = bucket_of(ids[[0, -1]])
            as_bytes = [ColumnBytes(spec, len(v), [v.view(np.uint8)]) for spec, v in zip(specs, values, strict=True)]
            yield batch.table, (int(first), int(last) + 1), as_bytes


def _check(to: Target, link: OpenLink, written: Part, of_source: RowSums | None) -> None:
    """Read a part that was written; where its rows were added up, add them up once more."""
    sums = RowSums()
    specs = (ID_SPEC, *_slots(link, written))
    seen = partial(sums.add_batch, specs) if of_source is not None else lambda batch, values: None
    for error in check_part(to.storage, to.directory, link.manifest.tables, written, seen).errors:
        raise error
    if of_source is not None and sums != of_source:
        path = layout.join(to.directory, written.file)
        raise CorruptCheckpointError(path, "", found="other rows than those that stay", expected="the same")
