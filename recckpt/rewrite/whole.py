"""Writes a chain as one full checkpoint. Each worker merges, writes and reads back a part: a range of buckets.

A task consists of names and numbers, so that it can be sent to a worker; its result is the catalog entry of the part. A
task that is repeated after its worker was lost uses another part number, because the lost worker may still be writing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import lru_cache

from recckpt.checkpoint.attempt import Attempt, copied_bytes, copy_others, with_shards
from recckpt.checkpoint.chain import OpenChain
from recckpt.errors import CheckpointRemovedError, CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.buckets import N_BUCKETS, gen_slice
from recckpt.format.catalog import Part
from recckpt.format.manifest import Content, FileEntry
from recckpt.output_dir.checkpoint_dir import read_manifest
from recckpt.output_dir.listing import Checkpoint
from recckpt.parallel.threads import run_on
from recckpt.sparse.files.catalogs import count_error
from recckpt.sparse.files.merged_rows import bytes_up_to, merged_range
from recckpt.sparse.files.part_writer import (
    PART_BYTES,
    PartPlan,
    RowBatch,
    TableBytes,
    plan_parts,
    planned_batches,
    write_part,
)
from recckpt.sparse.files.pieces import Int64s, RowPiece
from recckpt.sparse.files.table_reader import TableReader
from recckpt.sparse.files.verifier import RowSums
from recckpt.storage import Sink, Storage, open_storage
from recckpt.text import Progress

FRACTIONS = N_BUCKETS  # sizes are counted in this fraction of a byte, so no bucket that may have rows has size 0
LEAST_PART_BYTES = 128 << 20
_MANY = 64  # parts are made as small as ``LEAST_PART_BYTES`` until there are this many, to keep many workers busy
TRIES = 8  # part numbers reserved for each part
LEAST_BUDGET_BYTES = 8 << 20  # per worker; with less, a worker would read a batch again for every bucket in it


@dataclass(frozen=True)
class ChainName:
    """The directories of a chain's links, newest first, with the checksums of their manifests."""

    url: str  # URL of the output dir
    links: tuple[tuple[str, int], ...]


@lru_cache(maxsize=1)
def opened(name: ChainName) -> OpenChain:
    """Return a chain; a process reads its catalogs once, for all the parts that the process writes.

    Raises CheckpointRemovedError, or CorruptCheckpointError if the manifest of a link has changed since the chain was
    named.
    """
    storage = open_storage(name.url)
    newest, *below = (_named(storage, directory, xxh3) for directory, xxh3 in name.links)
    chain = OpenChain.of(storage, Checkpoint(newest.directory, newest.manifest, tuple(below)))
    for link in chain.links:
        _ = link.catalogs
    return chain


def _named(storage: Storage, directory: str, xxh3: int) -> Checkpoint:
    manifest = read_manifest(storage, directory)
    if manifest is None:
        raise CheckpointRemovedError(storage.url_of(directory))
    if manifest.xxh3 != xxh3:
        path, found = layout.join(directory, layout.MANIFEST), f"the checksum {manifest.xxh3:016x}"
        raise CorruptCheckpointError(path, "", found=found, expected=f"{xxh3:016x}, as when the chain was found")
    return Checkpoint(directory, manifest)


@dataclass(frozen=True)
class ChainRows:
    """The merged rows of a table in a chain; ``used`` is called with each batch read and its rows that are used."""

    links: Sequence[TableReader]  # newest first
    budget_bytes: int = 0
    used: Callable[[RowPiece, Int64s], object] = lambda piece, rows: None

    @property
    def size(self) -> TableBytes:
        entry, up_to = self.links[0].entry, bytes_up_to(self.links, 0)
        return TableBytes(entry.name, entry.slots, int(up_to[-1]), lambda: up_to)

    def batches(self, begin: int, end: int) -> Iterator[RowBatch]:
        return merged_range(self.links, (begin, end), self.budget_bytes, self.used, is_reused=True)


@dataclass(frozen=True)
class CompactionTask:
    chain: ChainName  # the chain to read
    url: str  # the output dir to write to
    directory: str  # directory of the new checkpoint; nothing else writes there
    budget_bytes: int  # approximate memory for merging
    shard: int
    shards: int
    plan: PartPlan
    n_bytes: int  # approximate bytes of its rows in all links


def tasks_of(name: ChainName, chain: OpenChain, url: str, directory: str, budget_bytes: int) -> list[CompactionTask]:
    """Divide the rows of a chain into as many shards as the newest link has, and into parts of about equal bytes.

    Shards get equal slices of the hashed ids, as ranks do; their parts are in catalog order.
    """
    newest, tasks = chain.manifest, []
    names = {table.name: [slot.name for slot in table.slots] for table in newest.tables}
    sizes = {table: ChainRows(chain.table(table, slots).links).size for table, slots in names.items()}
    for shard in range(len(newest.shards)):
        own = gen_slice(shard, len(newest.shards))
        plans = plan_parts(
            list(sizes.values()),
            _MANY,
            least_bytes=LEAST_PART_BYTES * FRACTIONS,
            part_bytes=PART_BYTES * FRACTIONS,
            buckets=(own.begin, own.end),
        )
        for plan in plans:
            n_bytes = sum(sizes[cut.table].within(cut.begin, cut.end) for cut in plan.ranges) // FRACTIONS
            of_shard = shard, len(newest.shards)
            tasks.append(CompactionTask(name, url, directory, budget_bytes, *of_shard, plan, n_bytes))
    return tasks


def write_task(task: CompactionTask) -> Part | None:
    """Write the part and return its catalog entry; return None if it would have no rows.

    Raises CheckpointRemovedError, or CorruptCheckpointError if the written rows differ from those of the chain.
    """
    named, storage = opened(task.chain), open_storage(task.url)
    sums = RowSums()
    buckets: dict[str, list[tuple[int, int]]] = {}
    for cut in task.plan.ranges:
        buckets.setdefault(cut.table, []).append((cut.begin, cut.end))
    with named.mapped(buckets) as chain:
        written = _write(task, chain, storage, sums)
    sums.check_written(storage, task.directory, named.manifest.tables, written)
    return written


def _write(task: CompactionTask, chain: OpenChain, storage: Storage, sums: RowSums) -> Part | None:
    plan = task.plan

    def create() -> tuple[str, Sink]:
        for attempt in range(TRIES):  # the names reserved for this part; those of the next part follow
            file = layout.part(task.shard, task.shards, plan.group, plan.number * TRIES + attempt)
            with suppress(FileExistsError):
                return file, storage.create(layout.join(task.directory, file))
        path = layout.join(task.directory, file)
        raise CorruptCheckpointError(path, "", found=f"{TRIES} files of this part", expected="an unused name")

    slots = [slot.name for slot in plan.slots]
    sources = {
        table: ChainRows(
            chain.table(table, slots).links,
            task.budget_bytes,
            lambda piece, rows, table=table: sums.add(table, piece.columns, rows),  # type: ignore[misc]
        )
        for table in plan.tables
    }
    batches = planned_batches(plan, sources, lambda n_bytes: None)
    return write_part(create, plan.tables, plan.slots, batches)


@dataclass(frozen=True)
class Means:
    # writes the parts; None for threads of this process (if ``threads`` is 1, the caller's)
    executor: Executor | None
    threads: int  # number of threads that write parts and copy files
    budget_bytes: int  # memory of this process without an executor, otherwise of each worker
    is_stopped: Callable[[], bool] = lambda: False  # called at intervals; True stops the work
    has_bar: bool = True  # whether long work shows a progress bar


def write_whole(storage: Storage, checkpoint: Checkpoint, to: Attempt, means: Means) -> Content:
    """Write a checkpoint, which may be a delta, as the files of a full one; sync the files and read them back.

    Raises the errors of :func:`write_task`, or StoppedError if the caller asks to stop.
    """
    name = ChainName(storage.url, tuple((link.directory, link.manifest.xxh3) for link in checkpoint.links))
    chain = opened(name)
    try:
        workers = means.threads if means.executor is None else 1
        budget_bytes = max(LEAST_BUDGET_BYTES, means.budget_bytes // workers)
        tasks = tasks_of(name, chain, to.storage.url, to.directory, budget_bytes)
        total = sum(task.n_bytes for task in tasks) + copied_bytes(checkpoint)
        with Progress(f"compacting {checkpoint.ckpt_id}", total, has_bar=means.has_bar) as progress:
            progress.n_rows = sum(table.rows for table in chain.manifest.tables)
            own: ThreadPoolExecutor | None = None
            if means.executor is None and means.threads > 1:
                own = ThreadPoolExecutor(means.threads, thread_name_prefix="recckpt-compact")
            with own or nullcontext(means.executor) as executor:
                parts = run_on(
                    executor,
                    write_task,
                    tasks,
                    on_done=lambda task: progress.advance(task.n_bytes),
                    is_stopped=means.is_stopped,
                )
            files = copy_others(storage, checkpoint, to, progress.advance, means.threads)
        return _finished(checkpoint, to, list(zip(tasks, parts, strict=True)), files)
    finally:
        opened.cache_clear()


def _finished(
    checkpoint: Checkpoint, to: Attempt, written: Sequence[tuple[CompactionTask, Part | None]], files: list[FileEntry]
) -> Content:
    count, records, rows = len(checkpoint.manifest.shards), [], Counter[str]()
    tables = tuple(table.but(delta=None) for table in checkpoint.manifest.tables)
    for number in range(count):
        shard = to.shard(number, count)
        shard.add(part for task, part in written if task.shard == number)
        records.append(shard.record())
        rows.update(shard.catalog.counts("rows"))
    for table in tables:
        if rows[table.name] != table.rows:
            raise count_error(checkpoint.directory, table.name, table.rows, rows[table.name])
    of = Content(**checkpoint.manifest.content)
    content = with_shards(replace(of, tables=tables, files=tuple(files)), records)
    listed = {file.name for file in content.files}
    for name in to.storage.list_files(to.directory):
        if layout.is_part(name) and name not in listed:
            to.storage.remove(layout.join(to.directory, name))
    for subdirectory in layout.subdirectories(file.name for file in content.files):
        to.storage.sync_dir(layout.join(to.directory, subdirectory))
    to.storage.sync_dir("")
    return content
