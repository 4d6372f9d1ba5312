"""One part of a revision: copied as it is, or written again without the rows, or deletes, of some ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from recckpt.checkpoint.attempt import Attempt
from recckpt.checkpoint.link import OpenLink
from recckpt.errors import CorruptCheckpointError
from recckpt.forgetting.ids_in_files import Ids
from recckpt.format import layout
from recckpt.format.catalog import Part
from recckpt.format.distinct import is_among
from recckpt.sparse.files.arrow_format import ID_SPEC, column_buffer, ids_in
from recckpt.sparse.files.link_cursors import row_of
from recckpt.sparse.files.part_reader import PartReader
from recckpt.sparse.files.part_writer import ColumnBytes, RowBatch, write_part
from recckpt.sparse.files.row_sums import RowSums
from recckpt.sparse.files.verifier import check_part
from recckpt.storage import Sink
from recckpt.types import SlotSpec

_STEP_BYTES = 8 << 20


@dataclass(frozen=True)
class OmittedRows:
    """What is left out: ids of tables."""

    tables: tuple[str, ...]
    ids: Ids


def copy_part(link: OpenLink, part: Part, to: Attempt) -> Part:
    """Copy a part, and hold every byte of the copy against the catalog."""
    source, copy = layout.join(link.directory, part.file), layout.join(to.directory, part.file)
    with link.files.open(source) as content, to.storage.create(copy) as sink:
        while data := content.read(_STEP_BYTES):
            sink.write(data)
    _check(to, link, part, None)
    return part


def revise_part(link: OpenLink, part: Part, to: Attempt, erasure: OmittedRows) -> Part | None:
    """Write a part without some ids and return its catalog entry, None where nothing is left of it.

    All other rows keep their bytes and their order; what was written is read back and compared with the source.

    Raises:
        CorruptCheckpointError: the source is damaged, or what was written is not the same.
        OSError: the storage failed.
    """
    slots = _slots(link, part)
    reader = PartReader(link.files, link.directory, part, slots)
    sums = RowSums()

    def create() -> tuple[str, Sink]:
        return part.file, to.storage.create(layout.join(to.directory, part.file))

    written = write_part(create, part.tables, slots, _kept(reader, slots, erasure, sums), holds=part.holds)
    if written is not None:
        _check(to, link, written, sums)
    return written


def _slots(link: OpenLink, part: Part) -> tuple[SlotSpec, ...]:
    return link.manifest.named_table(part.tables[0]).slots if part.holds == "rows" else ()


def _kept(reader: PartReader, slots: tuple[SlotSpec, ...], erasure: OmittedRows, sums: RowSums) -> Iterator[RowBatch]:
    """Yield what stays of each batch; add it up."""
    for number, batch in enumerate(reader.part.batches):
        columns = reader.read(number)
        ids = ids_in(columns)
        values = [np.frombuffer(column_buffer(columns[spec.name]), row_of(spec)) for spec in (ID_SPEC, *slots)]
        if batch.table in erasure.tables:
            stays = np.flatnonzero(~is_among(ids, erasure.ids))
            if len(stays) < len(ids):
                ids, values = ids[stays], [column[stays] for column in values]
        if len(ids):
            sums.add(batch.table, values, slice(None))
            of_slots = zip(slots, values[1:], strict=True)
            yield RowBatch(batch.table, ids, [ColumnBytes(slot, len(ids), [v.view(np.uint8)]) for slot, v in of_slots])


def _check(to: Attempt, link: OpenLink, written: Part, of_source: RowSums | None) -> None:
    """Read a part that was written; where its rows were added up, add them up once more."""
    sums = RowSums()
    specs = (ID_SPEC, *_slots(link, written))
    seen = partial(sums.add_batch, specs) if of_source is not None else lambda batch, values: None
    for error in check_part(to.storage, to.directory, link.manifest.tables, written, seen).errors:
        raise error
    if of_source is not None and sums != of_source:
        path = layout.join(to.directory, written.file)
        raise CorruptCheckpointError(path, "", found="other rows than those that stay", expected="the same")
