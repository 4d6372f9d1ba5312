"""The hallway of a save: propose, decide, write, commit, rotate."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

from recckpt.checkpoint.attempt import Attempt
from recckpt.errors import CommitNotDurableError, RecckptError
from recckpt.format.manifest import Manifest
from recckpt.live.column_exchange import join_columns
from recckpt.output_dir.checkpoint_dir import Intent
from recckpt.output_dir.commit import begin
from recckpt.parallel.ranks import Ranks
from recckpt.save.background_save import SaveHandle, SaveRunner
from recckpt.save.commit import Commit, commit, compared_names, head_of, rotate
from recckpt.save.decide import SavePlan, decide
from recckpt.save.forgetting import end_pending
from recckpt.save.job import Destination, Job, Live
from recckpt.save.propose import propose
from recckpt.save.reports import failure_reported, report_saved
from recckpt.save.stage import Staged
from recckpt.save.write import RankRecord, write

log = logging.getLogger("recckpt")


def save(live: Live, job: Job, to: Destination, runner: SaveRunner) -> SaveHandle:
    """Agree with all ranks on what is saved, and do the rest in the thread that the runner chooses. Collective.

    Raises:
        RecckptError: the save before has failed, and its error was not raised yet.
        Exception: the state of this rank cannot be saved.
        SaveFailedError: that of another cannot, or a rank is missing, or the ranks are not at the same save.
    """
    handle, ranks = SaveHandle(job.info), job.ranks
    with job.span, ExitStack() as closed_on_error:
        if to.near is not None:
            with failure_reported(job, to):
                to.near.hold_together(ranks, partial(to.fence.hold_once, is_resumed=job.is_resumed))
        own = propose(live, job, to, runner.settle, closed_on_error)
        with failure_reported(job, to):
            plan = ranks.concluded(lambda: own.proposal, decide)
            if not plan.is_unsettled:
                own.raise_refusal(plan, job)
        own.raise_refusal(plan, job)  # the error of the save before, which is no failure of this one
        staged = own.planned(plan)
        _note_kind(plan, job, to)
        closed_on_error.pop_all()
        cut = to.near.next_cut() if to.near else None
        work = partial(write_and_commit, staged, plan, replace(job, ranks=ranks.background, cut=cut), to)
        return runner.run(work, handle, ranks.rank, staged.close)


def _note_kind(plan: SavePlan, job: Job, to: Destination) -> None:
    info, kind = job.info, plan.kind
    info.note_kind(kind.name, kind.why_full, kind.n_links)
    if job.ranks.rank:
        return
    if plan.displaced is not None:
        log.warning(
            "%s: no room for %s in full, which is due (%s), so it is saved as a delta; make room: the chain grows",
            to.storage.url,
            info.ckpt_id,
            plan.displaced,
        )
    if kind.why_full is not None:
        log.info("%s is saved in full: %s", info.ckpt_id, kind.why_full)


def write_and_commit(staged: Staged, plan: SavePlan, job: Job, to: Destination) -> Manifest:
    """Write, commit and rotate. Collective: all ranks return the manifest, or all raise alike.

    Raises:
        CheckpointExistsError: the id is committed already and is not to be superseded.
        SaveFailedError: a rank failed, and nothing was committed; or one is missing: the message says what is known.
        CommitNotDurableError: committed, but the storage failed before that was surely durable.
        WriterFencedError: another writer has taken the output dir over.
    """
    info, ranks = job.info, job.ranks
    with job.span, failure_reported(job, to), closing(staged):
        attempt = Attempt(to.storage, *ranks.on_first(lambda: _begin(staged, job, to)))
        with attempt.abandoned_on_error(lambda error: _is_idle(error, ranks)):
            info.outcome.note_open(ranks.rank)
            if staged.by_columns:
                ranks.in_meetings(partial(join_columns, staged.by_columns))
            head = head_of(staged, compared_names(staged, plan, ranks), attempt, info)
            record = _commit(staged, replace(head, cut=job.cut), attempt, job, to)
        if to.changes is not None and not record.ephemeral:
            staged.committed(record.save_id)
            to.changes.committed(record)
        if ranks.rank == 0:
            rotate(job, to)
            to.offers.begin_if_due(to.storage, to.fence, to.changes)
    info.note_unblocked()
    report_saved(job, to)
    return record


def _commit(staged: Staged, head: Manifest, attempt: Attempt, job: Job, to: Destination) -> Manifest:
    """Write on all ranks, and commit on rank 0 what they wrote. Collective.

    Rank 0 returns the manifest; on another rank it lists the files of that rank only.
    """
    info, ranks, begin = job.info, job.ranks, time.perf_counter()
    own: list[RankRecord] = []
    commits: list[Commit] = []

    def write_own() -> RankRecord:
        own.append(write(staged, attempt.intent, job, to))
        return own[0]

    def commit_all(records: list[RankRecord]) -> Commit:
        commits.append(commit(records, head, job, to, attempt=attempt, kind=staged.kind))
        return commits[0].for_others

    path = to.storage.url_of(attempt.directory)
    try:
        of_others = ranks.concluded(write_own, commit_all)
    except CommitNotDurableError as error:
        info.note_path(path if error.is_in_place else "")
        raise
    [done] = commits or [of_others.with_files_of(own[0])]
    info.note_committed(done.manifest, done.totals, path)
    info.note_waiting(done.seconds, time.perf_counter() - begin - own[0].times.write_sec - done.seconds)
    return done.manifest


def _begin(staged: Staged, job: Job, to: Destination) -> tuple[Intent, int]:
    info, base = job.info, staged.kind.base
    to.fence.hold_once(is_resumed=job.is_resumed)
    end_pending(to)
    return begin(to.storage, to.fence, info.ckpt_id, step=info.step, overwrite=job.overwrite, base=base)


def _is_idle(error: BaseException, ranks: Ranks) -> bool:
    """Say whether this is rank 0, and all ranks know of an error, so that none of them is at work."""
    return isinstance(error, RecckptError) and ranks.rank == 0 and not ranks.has_lost
