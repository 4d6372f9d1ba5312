"""Writes the files of a rank: its tables and dense state side by side, the catalog last."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from recckpt.checkpoint.attempt import Attempt
from recckpt.checkpoint.shard_writer import ShardRecord, ShardWriter
from recckpt.format import layout
from recckpt.format.catalog import Catalog
from recckpt.output_dir.checkpoint_dir import Intent
from recckpt.output_dir.commit import Lookout
from recckpt.output_dir.fence import check_epoch
from recckpt.parallel.threads import run_all
from recckpt.save.job import Destination, Job
from recckpt.save.save_info import RankTimes, SaveInfo
from recckpt.save.stage import Staged
from recckpt.save.written_tables import NamesAndSlots, WrittenTables
from recckpt.sparse.files.reduced_rows import ReducedSource
from recckpt.storage import NewFiles
from recckpt.storage.retry import is_transient
from recckpt.storage.staged_upload import Outbox
from recckpt.text import Progress


@dataclass(frozen=True)
class RankRecord:
    """What one rank wrote, and how that went."""

    shard: ShardRecord
    tables: WrittenTables
    times: RankTimes  # how long it took
    n_kept: int  # rows that were copied aside because training changed them meanwhile
    n_evicted: int  # rows that its tables have evicted


def write(staged: Staged, intent: Intent, job: Job, to: Destination) -> RankRecord:
    """Write the files of this rank into the directory of an attempt.

    Raises:
        OSError, WriterFencedError: as :meth:`RankWriter.write`.
    """
    rank, size = job.ranks.rank, job.ranks.size
    what = f"saving {job.info.ckpt_id}" if staged.kind.base is None else f"saving {job.info.ckpt_id} as a delta"
    with Progress(what, staged.sparse_bytes, has_bar=to.has_bar and rank == 0) as progress:
        progress.n_rows = staged.n_rows
        return RankWriter(intent, to, rank, size).write(staged, progress, job.info)


class RankWriter:
    """Writes the files of one rank into the directory of an attempt."""

    def __init__(self, intent: Intent, to: Destination, rank: int, ranks: int) -> None:
        self._intent, self._to, self._rank, self._ranks = intent, to, rank, ranks

    def write(self, staged: Staged, progress: Progress, info: SaveInfo) -> RankRecord:
        """Write dense beside sparse, and the catalog last.

        Raises:
            OSError: the storage failed.
            WriterFencedError: another writer has taken over, and may have removed what was written.
        """
        try:
            return self._write(staged, progress, info)
        except OSError as error:
            if not is_transient(error):  # or the network, which has failed for minutes, would be asked once more
                self._check_owner()
            raise

    def _check_owner(self) -> None:
        check_epoch(self._to.storage, self._intent.epoch)

    def _write(self, staged: Staged, progress: Progress, info: SaveInfo) -> RankRecord:
        begin = time.perf_counter()
        to = self._to
        if self._rank:
            Lookout(to.storage, to.transfers.visible, self._check_owner).check_intent(self._intent)
        with Outbox(to.storage, to.transfers) as outbox:
            shard = self._write_to(outbox, staged, progress)
            record, tables = shard.record(), _written_tables(staged, shard.catalog)
            staged.check_live()
            staged.release()  # what follows may take long, and training copies aside what it changes until then
            outbox.publish(to.concurrency)
        n_bytes, write_sec = sum(file.n_bytes for file in record.files), time.perf_counter() - begin
        times = RankTimes(info.stage_sec, info.blocked_sec, write_sec, n_bytes)
        return RankRecord(record, tables, times, sum(table.n_kept for table in staged.tables), staged.n_evicted)

    def _write_to(self, outbox: NewFiles, staged: Staged, progress: Progress) -> ShardWriter:
        shard = Attempt(self._to.storage, self._intent).shard(self._rank, self._ranks, outbox)
        dense = staged.dense if self._rank == 0 else None
        pieces: list[Callable[[], None]] = [
            lambda: shard.states(self._states(staged)),
            lambda: shard.tensors(dense, staged.sharded.chunks),
            lambda: self._to.sparse_saver.save(staged.tables, shard, progress.advance),
        ]
        run_all(lambda piece: piece(), pieces, self._to.concurrency)
        return shard

    def _states(self, staged: Staged) -> dict[str, Mapping[str, Any]]:
        """Return what this rank writes beside its tensors and its rows, by file."""
        states: dict[str, Mapping[str, Any]] = {
            layout.io_state(self._rank): staged.io_state,
            layout.rng(self._rank): staged.rng,
        }
        if staged.own_extra:
            states[layout.extra_of(self._rank)] = staged.own_extra
        if self._rank == 0:
            states[layout.EXTRA] = staged.extra
        return states


def _written_tables(staged: Staged, catalog: Catalog) -> WrittenTables:
    """Return what this rank has of each table."""
    tables, deletes = staged.tables, catalog.deletes
    counts = [[table.n_all for table in tables]]
    if staged.kind.base is not None:
        counts += [[table.n_rows for table in tables], [deletes.get(table.name, 0) for table in tables]]
    return WrittenTables(
        NamesAndSlots.of({table.name: table.slots for table in tables}),
        np.array(counts, np.int64),
        {table.name: table.reduced for table in tables if isinstance(table, ReducedSource)},
        {name: step for name, step in staged.evicted_to.items() if step is not None},
        {name: dates for name, dates in staged.clock.items() if dates is not None},
        staged.layouts,
    )
