"""One near save, from its staged state to the removal of older ones: steps 3 to 9 (docs/format.md, section 16)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from recckpt.checkpoint.attempt import Attempt, with_shards
from recckpt.format.codec import time_now
from recckpt.format.manifest import Manifest
from recckpt.format.near_seal import NearSeal
from recckpt.near.moving import copies_of, copy_files
from recckpt.near.plan import BegunNear
from recckpt.near.tier import Kept, NearTier
from recckpt.output_dir.checkpoint_dir import file_problems
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import Checkpoint
from recckpt.parallel.ranks import Meetings
from recckpt.save.commit import head_of, standing_on
from recckpt.save.decide import SavePlan
from recckpt.save.job import Destination, Job
from recckpt.save.stage import Staged
from recckpt.save.write import RankRecord, tables_of_all, totals_of, write
from recckpt.text import Progress


@dataclass(frozen=True)
class NearSave:
    begun: BegunNear
    # the checkpoints of the base's chain, newest first; known to rank 0. Rule *staged_base*: as of staging.
    links: Sequence[Checkpoint]
    plan: SavePlan
    job: Job
    to: Destination
    fence: Fence
    tier: NearTier

    def write(self, staged: Staged) -> None:
        """Write on all ranks with the writer of checkpoints, seal on all hosts, and acknowledge. Collective.

        Raises:
            SaveFailedError: a rank has failed, or is missing.
            WriterFencedError: another writer has taken over the output dir; its list of near saves may or may not
                include this one.
        """
        ranks, info, intent = self.job.ranks, self.job.info, self.begun.intent
        with closing(staged):
            if ranks.rank:  # from here on, this rank may not learn the outcome
                info.note(outcome=info.words.is_open)
            ranks.on_each(self._make)  # before any rank of a host writes there
            for join, sources in staged.joins.items():
                ranks.in_meetings(partial(join, sources))
            head = head_of(staged, self.plan, Attempt(self.to.storage, intent, self.begun.seq), self.job)
            totals: dict[str, Any] = {}
            # Rule *seal_after_all*: rank 0 composes the seal after all ranks have written.
            seal = ranks.concluded(self._written(staged), partial(self._composed, head, totals))
            kept = ranks.concluded(lambda: self.tier.seal(intent, seal), lambda _: self._acknowledged())
            self.tier.keep(kept)
        info.note(**totals)

    def _make(self) -> None:
        if self.begun.is_first_of_host(self.job.ranks.rank):
            self.tier.make(self.begun.intent, self.job.ranks.size)

    def _written(self, staged: Staged) -> Callable[[], RankRecord]:
        """Return a function that returns this rank's record, after copying files to other hosts if any. Collective."""
        if not self.begun.copies:
            return partial(self._write_own, staged)
        record = self.job.ranks.in_meetings(partial(self._write_and_copy, staged))
        return lambda: record

    def _write_and_copy(self, staged: Staged, meetings: Meetings) -> RankRecord:
        record, begun = self._write_own(staged), self.begun
        files, directory = record.shard.files, begun.intent.directory
        buffers = self.tier.copy_buffers
        copy_files(meetings, self.to.storage, directory, files, hosts=begun.hosts, copies=begun.copies, buffers=buffers)
        return record

    def _write_own(self, staged: Staged) -> RankRecord:
        """Write the files of this rank; unlike a save, log no line."""
        progress, directory = Progress("near save", staged.sparse_bytes, has_bar=False), self.begun.intent.directory
        record = write(staged, self.begun.intent, self.job, self.to, progress)
        for problem in file_problems(self.to.storage, directory, record.shard.files):
            raise problem
        return record

    def _composed(self, head: Manifest, totals: dict[str, Any], records: Sequence[RankRecord]) -> NearSeal:
        tables = tables_of_all([record.tables for record in records], self.plan.kind.replaced)
        record = with_shards(replace(head, time=time_now(), tables=tables), [each.shard for each in records])
        totals.update(totals_of(records, tables))
        # Rule *check_before_seal*: do not seal if another writer has taken over.
        self.tier.in_time(self.fence.check, self.job.ranks.size)
        hosts = self.begun.hosts
        record = standing_on(self.links, record)
        return NearSeal(record, self.tier.dir.place, hosts, copies_of(hosts, self.begun.copies))

    def _acknowledged(self) -> Kept:
        # Rule *check_after_seal*: do not acknowledge a near save that a successor has not listed.
        self.tier.in_time(self.fence.check, self.job.ranks.size)
        kept = self.tier.acknowledge()
        self.job.info.note(outcome=self.job.info.words.is_committed)
        return kept
