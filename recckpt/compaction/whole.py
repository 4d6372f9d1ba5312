"""Writes a chain as one whole: merged rows in parts, and the other files as they are in its newest link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

from recckpt.checkpoint.attempt import Attempt
from recckpt.checkpoint.copied_files import copied_bytes, copy_others
from recckpt.checkpoint.shard_writer import with_shards
from recckpt.compaction.chain import ChainName, opened
from recckpt.compaction.part_task import CompactionTask, write_task
from recckpt.compaction.plan import PlannedPart, plan_of_chain
from recckpt.format import layout
from recckpt.format.catalog import Part
from recckpt.format.manifest import Content, FileEntry
from recckpt.output_dir.listing import Checkpoint
from recckpt.parallel.executor import run_on
from recckpt.sparse.files.catalogs import count_error
from recckpt.storage import Storage
from recckpt.text import Progress

LEAST_BUDGET_BYTES = 8 << 20  # of a worker: with less it would read a batch again for every bucket in it


@dataclass(frozen=True)
class Means:
    """What a compaction may use.

    Attributes:
        executor: does the work on the parts; None for threads of this process, which with one is the caller.
        threads: how many, and how many files are copied at once.
        budget_bytes: memory: of this process without an executor, else of each of its workers.
        is_stopped: asked now and then whether to give up.
        has_bar: whether a long one shows a bar.
    """

    executor: Executor | None
    threads: int
    budget_bytes: int
    is_stopped: Callable[[], bool] = lambda: False
    has_bar: bool = True


def write_whole(storage: Storage, checkpoint: Checkpoint, to: Attempt, means: Means) -> Content:
    """Write all files of a full checkpoint with the content of one that may be a delta, synced and read once more.

    Raises:
        CheckpointRemovedError: a link was removed meanwhile.
        CorruptCheckpointError: the chain is damaged, or what was written is not what the chain holds.
        OSError: the storage failed.
        StoppedError: the caller asked to stop.
    """
    name = ChainName(storage.url, tuple((link.directory, link.manifest.xxh3) for link in checkpoint.links))
    chain = opened(name)
    try:
        plan, workers = plan_of_chain(chain), means.threads if means.executor is None else 1
        budget_bytes = max(LEAST_BUDGET_BYTES, means.budget_bytes // workers)
        tasks = [CompactionTask(name, to.storage.url, to.directory, part, budget_bytes) for part in plan]
        total = sum(part.n_bytes for part in plan) + copied_bytes(checkpoint)
        with Progress(f"compacting {checkpoint.ckpt_id}", total, has_bar=means.has_bar) as progress:
            progress.n_rows = sum(table.rows for table in chain.manifest.tables)
            with _executor(means) as executor:
                parts = run_on(
                    executor,
                    write_task,
                    tasks,
                    on_done=lambda task: progress.advance(task.part.n_bytes),
                    is_stopped=means.is_stopped,
                )
            files = copy_others(storage, checkpoint, to, progress.advance, means.threads)
        return _finished(checkpoint, to, list(zip(plan, parts, strict=True)), files)
    finally:
        opened.cache_clear()


@contextmanager
def _executor(means: Means) -> Iterator[Executor | None]:
    if means.executor is not None or means.threads == 1:
        yield means.executor
        return
    with ThreadPoolExecutor(means.threads, thread_name_prefix="recckpt-compact") as threads:
        yield threads


def _finished(
    checkpoint: Checkpoint, to: Attempt, written: Sequence[tuple[PlannedPart, Part | None]], files: list[FileEntry]
) -> Content:
    """Write the catalogs of the parts, and return what lies there beside the other files."""
    count, records, rows = len(checkpoint.manifest.shards), [], Counter[str]()
    tables = tuple(replace(table, delta=None) for table in checkpoint.manifest.tables)
    for number in range(count):
        shard = to.shard(number, count)
        shard.add(part for planned, part in written if planned.shard == number)
        records.append(shard.record())
        rows.update(shard.catalog.rows)
    for table in tables:
        if rows[table.name] != table.rows:
            raise count_error(checkpoint.directory, table.name, table.rows, rows[table.name])
    of = Content(**checkpoint.manifest.content)
    content = with_shards(replace(of, tables=tables, files=tuple(files)), records)
    _remove_lost(to, content.files)
    for subdirectory in layout.subdirectories(file.name for file in content.files):
        to.storage.sync_dir(layout.join(to.directory, subdirectory))
    to.storage.sync_dir("")
    return content


def _remove_lost(to: Attempt, files: Sequence[FileEntry]) -> None:
    """Remove parts that workers wrote which were lost, and which others wrote again."""
    listed = {file.name for file in files}
    for name in to.storage.list_files(to.directory):
        if layout.is_part(name) and name not in listed:
            to.storage.remove(layout.join(to.directory, name))
