"""Near saves: what has changed since the newest checkpoint, written by the ordinary writer to a near dir.

The steps are those of docs/format.md, section 16. Only the first two are on the path of training.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from recckpt.dense.rank_digests import RankDigests
from recckpt.dense.state_copy import DenseBuffers
from recckpt.errors import RecckptError, WriterFencedError
from recckpt.near.ring import writers
from recckpt.near.tier import NearTier
from recckpt.output_dir.commit import chain_of
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import Checkpoint
from recckpt.parallel.ranks import Ranks, RanksNow
from recckpt.save.background_save import SaveRunner
from recckpt.save.decide import Proposal, SavePlan, decide
from recckpt.save.forgetting import end_pending
from recckpt.save.job import Destination, Job, Live, State
from recckpt.save.near_metrics import NearMetrics
from recckpt.save.near_save import BegunNear, NearSave
from recckpt.save.near_tally import NearCounts
from recckpt.save.near_thread import NearThread
from recckpt.save.propose import propose
from recckpt.save.save_info import SaveInfo
from recckpt.save.sparse_saver import SparseSaver
from recckpt.save.stage import Staged
from recckpt.storage.transfers import Transfers

log = logging.getLogger("recckpt")


@dataclass(frozen=True)
class _Presence:
    """A rank as a near save begins: whether it cannot make one now, whether it saves a checkpoint, and its host."""

    is_busy: bool
    is_saving: bool
    host: str


class Resumed(Protocol):
    """Says whether a checkpoint of the output dir was loaded, and how metrics call the job."""

    is_resumed: bool
    run: str


class NearSaves:
    """The near saves of one saver, of which one may be under way. They raise nothing but WriterFencedError.

    Collective where there are several ranks; not thread-safe.

    Args:
        live: what is saved.
        to: where checkpoints go.
        tier: where near saves go.
        runner: runs the saves of checkpoints.
        loads: says whether the run goes on from a checkpoint of the output dir, and how metrics call it.
    """

    def __init__(
        self,
        live: Live,
        to: Destination,
        tier: NearTier,
        runner: SaveRunner,
        loads: Resumed,
    ) -> None:
        self._live, self._durable, self.tier = live, to, tier
        self._runner, self._loads, self._metrics = runner, loads, NearMetrics(loads.run)
        self._to = replace(
            to,
            storage=tier.dir.storage,
            transfers=Transfers(),
            sparse_saver=SparseSaver(to.concurrency),  # its buffers are those of one save
            min_free_bytes=0,
            has_bar=False,
            buffers=DenseBuffers(),
            digests=RankDigests(),
        )
        # Groups of their own, that are no twins: a near save whose rank does not answer fails no checkpoint.
        self.ranks, self._thread = RanksNow(tier.timeout_sec), NearThread()
        self._logged = False  # what has gone wrong since the last near save that was acknowledged
        self._is_off = self._has_said_fewer = False
        self._fenced: WriterFencedError | None = None
        self._tally = to.timeline.near

    @property
    def fence(self) -> Fence:
        """The hold on the output dir."""
        return self._durable.fence

    @property
    def counts(self) -> NearCounts:
        """What became of them."""
        return self._tally.counts

    def begin(self, rank: int, size: int, step: int, state: State) -> bool:
        """Begin a near save of this step; return False where a checkpoint has to be made before there can be one.

        Raises:
            WriterFencedError: another process has taken the output dir over.
        """
        if self._is_off:
            self._check_fence()
            self._tally.note_skipped(step, "stopped")
            return True
        info = SaveInfo(f"near_{step}", step, background=True, kind="near")
        ranks = info.raising(self.ranks.of(rank, size))
        if ranks.rank == 0:
            self._metrics.due(info, self.fence.listing)
        try:
            return self._begin(info, ranks, state)
        except WriterFencedError:
            raise
        except Exception as error:
            self._check_fence()
            self._fail(error, info, ranks, is_under_way=not self._thread.is_running)
            return True

    def settle(self, timeout_sec: float | None = None) -> bool:
        """Wait for the near save that is under way, and say whether it has ended. Not collective."""
        return self._thread.settle(timeout_sec)

    def _check_fence(self) -> None:
        """Raise WriterFencedError where a near save has found that another process has taken the output dir over."""
        if self._fenced is not None:
            raise self._fenced.with_traceback(None)

    def _presence(self) -> _Presence:
        """Return what the ranks have to know of this one; they may find out one by one that they are fenced."""
        self._check_fence()
        return _Presence(self._is_busy, self._runner.is_running, self.tier.dir.host())

    def _begin(self, info: SaveInfo, ranks: Ranks, state: State) -> bool:
        # 1. All agree whether to begin.
        all_ranks = ranks.on_all(self._presence)
        if any(each.is_busy for each in all_ranks):
            self._tally.note_skipped(info.step, "under_way")
            return True
        self.tier.hold_together(ranks, self._hold)
        begun = ranks.on_first(lambda: self._prepare(info.step, tuple(each.host for each in all_ranks)))
        if begun is None:
            return False
        changes = self._durable.changes
        here = writers(begun.hosts, begun.copies)[ranks.rank]
        to = replace(self._to, changes=None if changes is None else changes.peeked, ranks=here)
        job = Job(info, ranks, state, overwrite=False, is_resumed=True, max_keep=None)
        with ExitStack() as closed_on_error:  # 2. Stage.
            own = propose(self._live, job, to, lambda: None, closed_on_error)
            plan = ranks.concluded(lambda: self._joined(begun, ranks.rank, own.proposal), decide)
            own.raise_refusal(plan, job)
            if plan.kind.base is None:
                return self._is_passed_over(plan, job, is_saving=any(each.is_saving for each in all_ranks))
            info.note_kind("near", None, plan.kind.n_links)
            job, links = replace(job, ranks=ranks.background), self._links(ranks, plan.kind.base)
            save = NearSave(begun, links, plan, job, to, self._durable.fence, self.tier)
            staged = own.planned(plan)
            closed_on_error.pop_all()
        info.note_unblocked()
        self._thread.begin(partial(self._run, save, staged), staged.close)
        return True

    @property
    def _is_busy(self) -> bool:
        """Whether a near save is under way, or the first checkpoint that one could stand on."""
        fence, changes = self._durable.fence, self._durable.changes
        has_base = changes is not None and changes.base is not None and (fence.is_settled or not fence.epoch)
        return self._thread.is_running or (self._runner.is_running and not has_base)

    def _links(self, ranks: Ranks, base: str) -> Sequence[Checkpoint]:
        return chain_of(self._durable.fence.listing, base) if ranks.rank == 0 else ()

    def _hold(self) -> None:
        if not self.fence.epoch:
            self.fence.hold(is_resumed=self._loads.is_resumed)

    def _joined(self, begun: BegunNear, rank: int, proposal: Proposal) -> Proposal:
        """Make the directory on the other hosts before anything is written."""
        if begun.is_first_of_another_host(rank):
            self.tier.join(begun.intent)
        return proposal

    def _prepare(self, step: int | None, hosts: tuple[str, ...]) -> BegunNear | None:
        """Hold the output dir, as rank 0, and make the directory; None where there is nothing to stand on.

        Rule *takeover_before_near*: no near save is made before the list of the takeover is published.
        """
        to, fence, changes = self._durable, self._durable.fence, self._durable.changes
        if changes is None or changes.base is None:
            return None
        if changes.has_candidate:
            changes.confirm(to.storage, fence, is_resumed=self._loads.is_resumed)
        if not fence.is_settled:
            end_pending(to)
        base = changes.base
        if base is None or not chain_of(fence.listing, base.save_id):
            return None
        if not fence.is_settled:  # a checkpoint in its place would not mend that
            raise RecckptError(f"{to.storage.url}: ids are yet to be forgotten there, as the log says")
        intent, cut = self.tier.begin(fence.epoch, fence.nonce, step, base.save_id)
        return BegunNear(intent, cut, fence.listing.next_seq, hosts, self._n_copies(hosts))

    def _n_copies(self, hosts: tuple[str, ...]) -> int:
        """Return how many copies there are; that there cannot be as many as are asked for is said once."""
        asked, most = self.tier.copies, len(set(hosts)) - 1
        if asked is not None and asked > most and not self._has_said_fewer:
            self._has_said_fewer = True
            log.warning(
                "near saves have %d copies, expected %d (Near(copies=...)): found %d hosts", most, asked, most + 1
            )
        return min(1 if asked is None else asked, most)

    def _is_passed_over(self, plan: SavePlan, job: Job, *, is_saving: bool) -> bool:
        """Say whether there is none because so much has changed; else a checkpoint has to be made before.

        Nor is one made while one is under way: the ranks count from it one by one.
        """
        self.tier.give_up()
        has_base = plan.kind.stand_in is not None
        if not has_base and not is_saving:
            return False
        if has_base:
            if job.ranks.rank == 0 and not self._logged:
                why = plan.kind.why_full
                log.warning("near saves are left out until the next checkpoint: %s; save more often", why)
            self._logged = True
        self._tally.note_skipped(job.info.step, "too_much_changed" if has_base else "under_way")
        return True

    def _run(self, save: NearSave, staged: Staged) -> None:
        """Be the thread of a near save: whatever goes wrong is its own failure."""
        try:
            save.write(staged)
        except Exception as error:
            self._fail(error, save.job.info, save.job.ranks, is_under_way=True)
        else:
            self._logged = False
            self._tally.note_made(save.job.info, len(set(save.begun.hosts)), save.begun.copies)
            if save.job.ranks.rank == 0:
                self._metrics.made(save.job.info)

    def _fail(self, error: Exception, info: SaveInfo, ranks: Ranks, *, is_under_way: bool) -> None:
        """Take note of a near save that has failed: of the first of several in the log, and as a line of the timeline.

        ``is_under_way`` says whether it is the one that the tier has under way, and not one that could not begin.
        """
        info.note_failure(error)
        self._tally.note_failed(info)
        if isinstance(error, WriterFencedError):
            self._fenced = error
            return
        self._is_off = self._is_off or ranks.has_lost
        if is_under_way and not ranks.has_lost:  # else another may still write there; it goes at the next takeover
            self.tier.give_up()
        if ranks.rank == 0:
            self._metrics.failed()
            if not self._logged:  # else the lines of near saves would leave no room for those of checkpoints
                self._durable.timeline.keep(info)
            ending = "; no more are made in this process" if self._is_off else ""
            log.log(logging.DEBUG if self._logged else logging.WARNING, "near save failed%s: %s", ending, error)
        self._logged = True
