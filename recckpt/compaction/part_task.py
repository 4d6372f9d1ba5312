"""The work of writing one part: its rows merged from the chain, written, read back and compared with the chain.

A task travels to any worker: it is names and numbers, and its result is what a catalog says of the part. One that is
done again, because its worker was lost, takes another part number, since the lost one may still be writing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from recckpt.checkpoint.chain import OpenChain
from recckpt.compaction.chain import ChainName, opened
from recckpt.compaction.chain_rows import ChainRows
from recckpt.compaction.plan import PlannedPart
from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.catalog import Part
from recckpt.format.tables import TableEntry
from recckpt.sparse.files.arrow_format import ID_SPEC
from recckpt.sparse.files.part_writer import planned_batches, write_part
from recckpt.sparse.files.row_sums import RowSums
from recckpt.sparse.files.verifier import check_part
from recckpt.storage import Sink, Storage, open_storage

TRIES = 8  # part numbers that are kept for each part


@dataclass(frozen=True)
class CompactionTask:
    """One part to be written.

    Attributes:
        chain: what is read.
        url: the output dir that is written to.
        directory: of the new checkpoint in it, where only this task writes.
        part: the part of the chain that is written.
        budget_bytes: memory for merging, about.
    """

    chain: ChainName
    url: str
    directory: str
    part: PlannedPart
    budget_bytes: int


def write_task(task: CompactionTask) -> Part | None:
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
    for cut in part.plan.ranges:
        buckets.setdefault(cut.table, []).append((cut.begin, cut.end))
    return buckets


def _write(task: CompactionTask, chain: OpenChain, storage: Storage, sums: RowSums) -> Part | None:
    """Write the part; add up the rows of the chain that are to be in it."""
    part = task.part

    def create() -> tuple[str, Sink]:
        for attempt in range(TRIES):  # names that the part may get; those of the next one come behind them
            file = layout.part(part.shard, part.shards, part.plan.group, part.plan.number * TRIES + attempt)
            with suppress(FileExistsError):
                return file, storage.create(layout.join(task.directory, file))
        path = layout.join(task.directory, file)
        raise CorruptCheckpointError(path, "", found=f"{TRIES} files of this part", expected="a name that is free")

    slots = [slot.name for slot in part.plan.slots]
    sources = {
        table: ChainRows(chain.table(table, slots).links, task.budget_bytes, partial(sums.add, table))
        for table in part.plan.tables
    }
    batches = planned_batches(part.plan, sources, lambda n_bytes: None)
    return write_part(create, part.plan.tables, part.plan.slots, batches)


def _check(task: CompactionTask, storage: Storage, tables: Sequence[TableEntry], written: Part, sums: RowSums) -> None:
    """Read the part; add up the rows that are in it."""
    add = partial(sums.add_batch, (ID_SPEC, *task.part.plan.slots))
    for error in check_part(storage, task.directory, tables, written, add).errors:
        raise error
