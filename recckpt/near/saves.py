"""Near saves: changes since the newest checkpoint, written to a near dir by the writer of checkpoints.

The steps are those of docs/format.md, section 16. Training waits only for the first two.
"""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from recckpt.dense.state_copy import DenseBuffers, RankDigests
from recckpt.errors import RecckptError, WriterFencedError
from recckpt.load.loader import Loader
from recckpt.near.changes import PeekedChanges
from recckpt.near.counts import NearCounts, NearMetrics, NearTally
from recckpt.near.one_save import NearSave
from recckpt.near.plan import NearPlan, NearProposal, NearStand, decide_near
from recckpt.near.tier import NearTier
from recckpt.output_dir.commit import chain_of
from recckpt.output_dir.listing import list_checkpoints
from recckpt.parallel.ranks import Ranks, RanksNow, outcome_of
from recckpt.parallel.threads import Latch, Worker
from recckpt.save.background import SaveRunner
from recckpt.save.decide import SavePlan
from recckpt.save.deltas import Changes
from recckpt.save.forgetting import end_pending
from recckpt.save.job import Destination, Job, Live, SparseSaver, State
from recckpt.save.propose import propose
from recckpt.save.save_info import OutcomeWords, SaveInfo
from recckpt.save.stage import Staged
from recckpt.storage.transfers import Transport

log = logging.getLogger("recckpt")
_WORDS = OutcomeWords(
    failed="no near save was made; training goes on",
    lost="no near save was made",
    is_open="it counts only if all hosts have sealed it, which a restarted job will check",
    is_committed="the near save was made nevertheless",
)


class LeftOutNear:
    """Makes all ranks skip the same near saves while one is running.

    A near save ends at a different time on each rank, when the ranks are at different steps. Therefore the ranks meet
    once after the work: each rank sends the number of near saves it has skipped, and all ranks skip as many as the rank
    with the most. So ranks need not communicate when a near save is due.
    """

    def __init__(self) -> None:
        self._lock, self._is_counted = threading.Lock(), False
        self._n_left_out = self._n_of_all = 0
        self._over = Latch()

    def leaves_out(self) -> bool:
        """Return whether to skip the near save due now. Called by the training thread; waits while the ranks meet."""
        with self._lock:
            if not self._is_counted:
                self._n_left_out += 1
                return True
        self._over.wait()
        is_left_out = self._n_left_out < self._n_of_all
        self._n_left_out += is_left_out
        return is_left_out

    def agree(self, ranks: Ranks) -> None:
        """Agree on the number of near saves to skip. Collective.

        Raises RecckptError if a rank is missing.
        """
        self._count()
        self._n_of_all = max(ranks.on_all(lambda: self._n_left_out))

    def end(self) -> None:
        """Stop skipping at the agreed number; without an agreement, stop immediately."""
        self._count()
        self._over.set()

    def _count(self) -> None:
        with self._lock:
            self._is_counted = True


class NearSaves:
    """Makes the near saves of one saver, one at a time. Raises only WriterFencedError.

    Collective if there are several ranks; not thread-safe.
    """

    def __init__(
        self,
        live: Live,
        to: Destination,
        tier: NearTier,
        runner: SaveRunner,
        loader: Loader,
    ) -> None:
        assert to.changes is not None  # near= requires deltas
        self._live, self._durable, self._changes, self.tier, self.fence = live, to, to.changes, tier, to.fence
        self._runner, self._loader, self._metrics = runner, loader, NearMetrics(loader.run)
        self._to = replace(
            to,
            storage=tier.dir.storage,
            transport=Transport(),
            sparse_saver=SparseSaver(to.concurrency),  # not shared, because its buffers serve one save at a time
            min_free_bytes=0,
            buffers=DenseBuffers(),
            digests=RankDigests(),
        )
        # Separate process groups: a rank that does not answer in a near save must not fail a checkpoint.
        self.ranks, self._worker = RanksNow(tier.timeout_sec), Worker[LeftOutNear]("recckpt-near")
        self._based: Ranks | None = None  # ranks that all have a base
        self._logged = False  # whether a failure was logged since the last acknowledged near save
        self._is_off = self._has_said_fewer = False
        self._stood_in = 0  # step of the last checkpoint in place of a near save, even if that checkpoint failed
        self._fenced: WriterFencedError | None = None
        self._tally = NearTally()
        to.timeline.bring_along(self._tally.take)  # adds counts of near saves to the line of each checkpoint

    @property
    def counts(self) -> NearCounts:
        return self._tally.counts

    def go_on(self, step: int) -> None:
        self._tally.go_on(step)
        self._stood_in = 0

    def is_newest(self, order: tuple[int, int]) -> bool:
        """Return whether no checkpoint in the output dir is newer than a near save of this order. Not collective."""
        current = list_checkpoints(self._durable.storage).current
        return all(each.manifest.order < order for each in current)

    def begin(self, rank: int, size: int, step: int, state: State) -> bool:
        """Begin a near save of this step; return False if a checkpoint must be made first.

        Raises WriterFencedError if another process has taken over the output dir.
        """
        if self._is_off:
            self._check_fence()
            self._tally.note_skipped(step, "stopped")
            return True
        info = SaveInfo(f"near_{step}", step, background=True, kind="near", words=_WORDS)
        ranks = info.raising(self.ranks.of(rank, size))
        if ranks.rank == 0:
            self._metrics.due(info, self.fence.listing)
        if self._worker.task is not None and self._worker.task.leaves_out():
            self._tally.note_skipped(step, "under_way")
            return True
        self._worker.wait()  # only for the thread to end: its work is done
        try:
            return self._begin(info, ranks, state)
        except WriterFencedError:
            raise
        except Exception as error:
            self._fail(error, info, ranks)
            return True

    def settle(self, timeout_sec: float | None = None) -> bool:
        """Wait for the running near save; return whether it has ended. Not collective."""
        return self._worker.wait(timeout_sec)

    def _check_fence(self) -> None:
        if self._fenced is not None:
            raise self._fenced.with_traceback(None)

    def _begin(self, info: SaveInfo, ranks: Ranks, state: State) -> bool:
        self.tier.hold_together(ranks, self._hold)
        if (none := self._without_base(ranks)) is not None:
            return self._passed_over(none, info, ranks)
        changes, host, stand, failure = self._look(ranks, info.step)
        job = Job(info, ranks, state, overwrite=False, is_resumed=True, max_keep=None)
        to = replace(self._to, changes=changes)

        def settle() -> None:
            self._check_fence()
            if failure is not None:
                raise failure

        with ExitStack() as closed_on_error:  # Step 1: all agree whether to begin. Step 2: each stages, before that.
            own = propose(self._live, job, to, settle, closed_on_error)
            proposal = NearProposal(own.proposal, host, self._runner.is_running)
            plan = ranks.concluded(lambda: proposal, partial(decide_near, stand, self.tier.copies))
            own.raise_refusal(plan.save, job)
            if plan.begun is None:
                return self._passed_over(plan, info, ranks)
            asked = self.tier.copies
            if ranks.rank == 0 and asked is not None and asked > plan.begun.copies and not self._has_said_fewer:
                self._has_said_fewer, n_hosts = True, len(set(plan.begun.hosts))
                log.warning(
                    "near saves have %d copies, expected %d (Near(copies=...)): found %d hosts",
                    plan.begun.copies,
                    asked,
                    n_hosts,
                )
            links = stand.links if stand is not None else ()
            job = replace(job, ranks=ranks.background, cut=plan.begun.cut)
            save = NearSave(plan.begun, links, plan.save, job, to, self._durable.fence, self.tier)
            try:
                staged = own.planned(save.plan)
                closed_on_error.pop_all()
                save.job.info.note(n_links=save.plan.kind.n_links)
                save.job.info.note_unblocked()
                turn = LeftOutNear()
                self._worker.begin(turn, partial(self._run, save, staged, turn), staged.close)
            except Exception:
                self._is_off = save.job.ranks.size > 1  # the other ranks have begun, and would wait for this rank
                raise
        return True

    @property
    def _has_base(self) -> bool:
        is_settled = self.fence.is_settled or not self.fence.epoch or not self._runner.is_running
        return self._changes.base is not None and is_settled

    def _hold(self) -> int:
        """Take over the output dir, unless this was done before, and return the epoch. Called on rank 0.

        Rule *takeover_before_near*: no near save is made before the takeover's list of near saves is published.
        """
        self.fence.hold_once(is_resumed=self._loader.is_resumed)
        return self.fence.epoch

    def _look(self, ranks: Ranks, step: int | None) -> tuple[Changes, str, NearStand | None, Exception | None]:
        """Return this rank's changes, its host ("" if unknown), the NearStand (rank 0 only), and the failure or None.

        Raises nothing, and creates nothing except a host id.
        """
        host, failure = outcome_of(lambda: self._prepared(ranks))
        changes = PeekedChanges(self._changes)
        if ranks.rank or host is None:
            return changes, host or "", None, failure
        stand, failure = outcome_of(lambda: self._stand(changes, step))
        if _base_of(changes) != _base_of(self._changes):  # a commit in between: rotation may remove the old base
            return self._look(ranks, step)
        return changes, host, stand, failure

    def _prepared(self, ranks: Ranks) -> str:
        """Return the id of this host. First, rank 0 confirms the base and carries out pending requests to forget."""
        has_work = self._changes.has_candidate or not self.fence.is_settled
        if ranks.rank == 0 and self._has_base and has_work:
            self.tier.reach(ranks.size)
            if self._changes.has_candidate:
                self._changes.confirm(self._durable.storage, self.fence, is_resumed=self._loader.is_resumed)
            if not self.fence.is_settled:
                end_pending(self._durable)
        return self.tier.dir.host()

    def _stand(self, changes: Changes, step: int | None) -> NearStand | None:
        fence, base = self.fence, changes.base
        if base is None or not self._has_base:
            return None
        intent, cut = self.tier.begin(fence.epoch, fence.nonce, step, base.save_id)
        links = chain_of(fence.listing, base.save_id)
        if not links:
            return None
        if not fence.is_settled:  # an error, because a checkpoint in place of a near save would not help
            raise RecckptError(f"{self._durable.storage.url}: a request to forget ids is unfinished; the log says why")
        return NearStand(intent, cut, fence.listing.next_seq, links, self._stood_in)

    def _without_base(self, ranks: Ranks) -> NearPlan | None:
        """Return the plan to make no near save if a rank has no base; None if all have one. Collective until all have
        one.

        Called before staging, which would be useless without a base. When all ranks have a base for the first time,
        hosts also free space.
        """
        own = self.ranks.of(ranks.rank, ranks.size)
        if self._based is own:
            return None
        of_ranks = ranks.on_all(self._presence)
        if not all(has_base for has_base, _ in of_ranks):
            return NearPlan(SavePlan(), None, any(is_saving for _, is_saving in of_ranks))
        self.tier.clear_together(ranks, self._hold)
        self._based = own
        return None

    def _presence(self) -> tuple[bool, bool]:
        self._check_fence()  # ranks may notice at different times that the output dir was taken over
        self.tier.dir.host()  # raises here if a host has no near dir, before a checkpoint is made instead
        return self._has_base, self._runner.is_running

    def _passed_over(self, plan: NearPlan, info: SaveInfo, ranks: Ranks) -> bool:
        """Return True if this near save is skipped, False if a checkpoint must be made first."""
        self.tier.give_up()
        if not plan.is_too_large:
            self._based = None
        if plan.needs_checkpoint:
            self._stood_in = info.step or 0
            return False
        if plan.is_too_large:
            if ranks.rank == 0 and not self._logged:
                why = plan.save.kind.why_full
                log.warning("near saves are left out until the next checkpoint: %s; save more often", why)
            self._logged = True
        self._tally.note_skipped(info.step, "too_much_changed" if plan.is_too_large else "under_way")
        return True

    def _run(self, save: NearSave, staged: Staged, turn: LeftOutNear) -> None:
        """Do the work of a near save in its thread. Records every error as a failure of this near save."""
        info, ranks = save.job.info, save.job.ranks
        try:
            try:
                save.write(staged)
            except Exception as error:
                # A RecckptError between ranks is raised on all of them. Other errors are known to this rank only: the
                # other ranks wait for it, and it must not meet them elsewhere meanwhile.
                self._is_off = ranks.size > 1 and not isinstance(error, RecckptError)
                self._fail(error, info, ranks)
            else:
                self._logged = False
                self._tally.note_made(info, len(set(save.begun.hosts)), save.begun.copies)
                if ranks.rank == 0:
                    self._metrics.made(info)
            if not self._is_off:
                try:
                    turn.agree(ranks)
                except RecckptError as error:
                    self._fail(error, info, ranks)
        finally:
            turn.end()

    def _fail(self, error: Exception, info: SaveInfo, ranks: Ranks) -> None:
        """Record a failed near save. Of consecutive failures, only the first is logged and put in the timeline."""
        info.note_failure(error)
        self._tally.note_failed(info)
        if isinstance(error, WriterFencedError):
            self._fenced = error
            return
        self._is_off = self._is_off or ranks.has_lost
        if not self._is_off:  # otherwise another rank may still write there; the next takeover removes the files
            self.tier.give_up()
        if ranks.rank == 0:
            self._metrics.failed()
            if not self._logged:  # otherwise lines of near saves would displace lines of checkpoints
                self._durable.timeline.keep(info)
            ending = "; no more are made in this process" if self._is_off else ""
            log.log(logging.DEBUG if self._logged else logging.WARNING, "near save failed%s: %s", ending, error)
        self._logged = True


def _base_of(changes: Changes) -> str | None:
    return None if changes.base is None else changes.base.save_id
