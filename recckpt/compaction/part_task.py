"""The work of writing one part: its rows merged from the chain, written, and held against the chain once more.

A task travels to any worker: it is names and numbers, and its result is what a catalog says of the part. One that is
done again, because its worker was lost, takes another part number, since the lost one may still be writing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain as chained

import numpy as np

from recckpt.compaction.chain import ChainName, opened
from recckpt.compaction.plan import PlannedPart
from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.buckets import bucket_of
from recckpt.format.catalog import Part
from recckpt.sparse.files.arrow_format import ID, ID_SPEC, ColumnBytes, PartWriter, column_buffer
from recckpt.sparse.files.merged_rows import merged_range
from recckpt.sparse.files.table_reader import TableReader
from recckpt.sparse.files.verifier import check_part
from recckpt.storage import Sink, Storage, open_storage

TRIES = 8  # part numbers that are kept for each part

Links = Mapping[str, Sequence[TableReader]]  # of each table, newest first
_Batch = tuple[str, tuple[int, int], Sequence[ColumnBytes]]  # table, buckets, columns


@dataclass(frozen=True)
class PartTask:
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


def write_part(task: PartTask) -> Part | None:
    """Write the part and return its catalog entry, None where it would have no rows.

    Raises:
        CheckpointRemovedError: a link was removed meanwhile.
        CorruptCheckpointError: the chain is damaged, or what was written is not what the chain holds.
        OSError: the storage failed.
    """
    chain, storage = opened(task.chain), open_storage(task.url)
    with chain.reading(_buckets(task.part)) as links:
        written = _write(task, links, storage)
    if written is not None:
        for error in check_part(storage, task.directory, chain.newest.tables, written, lambda n_bytes: None).errors:
            raise error
    return written


def _buckets(part: PlannedPart) -> dict[str, list[tuple[int, int]]]:
    buckets: dict[str, list[tuple[int, int]]] = {}
    for cut in part.ranges:
        buckets.setdefault(cut.table, []).append((cut.begin, cut.end))
    return buckets


def _write(task: PartTask, links: Links, storage: Storage) -> Part | None:
    """Write the part, and compare it with one that is made once more and written nowhere."""
    batches = _batches(task, links)
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
        written = _written(file, task.part, chained([first], batches), sink)
    if _written(file, task.part, _batches(task, links), _Nowhere()) != written:
        path, found = layout.join(task.directory, file), "other rows when the chain was read again"
        raise CorruptCheckpointError(path, "", found=found, expected="the same")
    return written


def _names(part: PlannedPart) -> Iterator[str]:
    """Yield the names that the part may get; those of the next one come behind them."""
    for attempt in range(TRIES):
        yield layout.part(part.shard, part.shards, part.group, part.number * TRIES + attempt)


def _batches(task: PartTask, links: Links) -> Iterator[_Batch]:
    specs = (ID_SPEC, *task.part.slots)
    for cut in task.part.ranges:
        for batch in merged_range(links[cut.table], (cut.begin, cut.end), task.budget_bytes):
            values = [np.frombuffer(column_buffer(batch.column(spec.name)), np.uint8) for spec in specs]
            ids = np.frombuffer(column_buffer(batch.column(ID)), np.int64)
            first, last = bucket_of(ids[[0, -1]])
            columns = [ColumnBytes(spec, column) for spec, column in zip(specs, values, strict=True)]
            yield cut.table, (int(first), int(last) + 1), columns


def _written(file: str, part: PlannedPart, batches: Iterator[_Batch], sink: Sink) -> Part:
    tables = list(dict.fromkeys(cut.table for cut in part.ranges))
    writer = PartWriter(sink, file, tables, part.slots)
    for table, buckets, columns in batches:
        writer.write(table, buckets, columns)
    return writer.finish()


class _Nowhere(Sink):
    """Counts what it is given, and drops it."""

    def write(self, data: object) -> int:
        n_bytes = memoryview(data).nbytes  # type: ignore[arg-type]
        self.n_bytes += n_bytes
        return n_bytes

    def close(self) -> None:
        pass

    def discard(self) -> None:
        pass
