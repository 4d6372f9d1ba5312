"""The work of writing one part: its rows merged from the chain, written, read back and compared with the chain.

A task travels to any worker: it is names and numbers, and its result is what a catalog says of the part. One that is
done again, because its worker was lost, takes another part number, since the lost one may still be writing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain as chained

import numpy as np

from recckpt.checkpoint.chain import OpenChain
from recckpt.compaction.chain import ChainName, opened
from recckpt.compaction.plan import PlannedPart
from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.buckets import bucket_of
from recckpt.format.catalog import Part
from recckpt.format.tables import TableEntry
from recckpt.sparse.files.arrow_format import ID, ID_SPEC, column_buffer
from recckpt.sparse.files.merged_rows import merged_range
from recckpt.sparse.files.part_writer import ColumnBytes, PartWriter
from recckpt.sparse.files.row_sums import RowSums
from recckpt.sparse.files.verifier import check_part
from recckpt.storage import Sink, Storage, open_storage

TRIES = 8  # part numbers that are kept for each part

_Batch = tuple[str, tuple[int, int], Sequence[ColumnBytes]]  # table, buckets, columns


@dataclass(frozen=True)
class CompactionTask:
    """One part to be written.

    Attributes:
        chain: what is read.
        url: the output dir that is written to.
        directory: of the new checkpoint in it, where nobody else writes.
        part: what of the chain.
        budget_bytes: memory for merging, about.
    """

    chain: ChainName
    url: str
    directory: str
    part: PlannedPart
    budget_bytes: int


def write_part(task: CompactionTask) -> Part | None:
    """Write the part and return its catalog entry, None where it would have no rows.

    Raises:
        CheckpointRemovedError: a link was removed meanwhile.
        CorruptCheckpointError: the chain is damaged, or what was written is not what the chain holds.
        OSError: the storage failed.
    """
    named, storage = opened(task.chain), open_storage(task.url)
    of_chain, of_file = RowSums(), RowSums()
    with named.mapped(_buckets(task.part)) as chain:
        written = _write(task, chain, storage, of_chain)
    if written is not None:
        _check(task, storage, named.manifest.tables, written, of_file)
    if of_file != of_chain:
        file = "no rows" if written is None else layout.join(task.directory, written.file)
        raise CorruptCheckpointError(file, "", found="other rows than its chain has", expected="the same")
    return written


def _buckets(part: PlannedPart) -> dict[str, list[tuple[int, int]]]:
    buckets: dict[str, list[tuple[int, int]]] = {}
    for cut in part.ranges:
        buckets.setdefault(cut.table, []).append((cut.begin, cut.end))
    return buckets


def _write(task: CompactionTask, chain: OpenChain, storage: Storage, sums: RowSums) -> Part | None:
    """Write the part; add up the rows of the chain that are to be in it."""
    batches = _batches(task, chain, sums)
    first = next(batches, None)
    if first is None:
        return None
    for file in _names(task.part):
        with suppress(FileExistsError):
            sink = storage.create(layout.join(task.directory, file))
            break
    else:
        path = layout.join(task.directory, file)
        raise CorruptCheckpointError(path, "", found=f"{TRIES} files of this part", expected="a name that is free")
    with sink:
        return _written(file, task.part, chained([first], batches), sink)


def _check(task: CompactionTask, storage: Storage, tables: Sequence[TableEntry], written: Part, sums: RowSums) -> None:
    """Read the part; add up the rows that are in it."""
    add = partial(sums.add_batch, (ID_SPEC, *task.part.slots))
    for error in check_part(storage, task.directory, tables, written, add).errors:
        raise error


def _names(part: PlannedPart) -> Iterator[str]:
    """Yield the names that the part may get; those of the next one come behind them."""
    for attempt in range(TRIES):
        yield layout.part(part.shard, part.shards, part.group, part.number * TRIES + attempt)


def _batches(task: CompactionTask, chain: OpenChain, sums: RowSums) -> Iterator[_Batch]:
    specs = (ID_SPEC, *task.part.slots)
    for cut in task.part.ranges:
        used, table = partial(sums.add, cut.table), chain.table(cut.table, [slot.name for slot in task.part.slots])
        for batch in merged_range(table.links, (cut.begin, cut.end), task.budget_bytes, used):
            values = [np.frombuffer(column_buffer(batch.column(spec.name)), np.uint8) for spec in specs]
            ids = np.frombuffer(column_buffer(batch.column(ID)), np.int64)
            first, last = bucket_of(ids[[0, -1]])
            columns = [ColumnBytes(spec, len(ids), [value]) for spec, value in zip(specs, values, strict=True)]
            yield cut.table, (int(first), int(last) + 1), columns


def _written(file: str, part: PlannedPart, batches: Iterator[_Batch], sink: Sink) -> Part:
    tables = list(dict.fromkeys(cut.table for cut in part.ranges))
    writer = PartWriter(sink, file, tables, part.slots)
    for table, buckets, columns in batches:
        writer.write(table, buckets, columns)
    return writer.finish()
