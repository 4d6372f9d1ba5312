"""The top level of a save: propose, decide, write, commit, rotate, report."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from recckpt.checkpoint.attempt import Attempt
from recckpt.errors import CommitNotDurableError, RecckptError
from recckpt.format.manifest import Manifest
from recckpt.output_dir.checkpoint_dir import Intent
from recckpt.output_dir.commit import begin
from recckpt.parallel.ranks import Ranks
from recckpt.parallel.threads import collected_rarely
from recckpt.save.background import SaveHandle, SaveRunner
from recckpt.save.commit import commit, head_of, rotate
from recckpt.save.decide import Phase, SavePlan, decide
from recckpt.save.forgetting import end_pending
from recckpt.save.job import Destination, Job, Live
from recckpt.save.propose import propose
from recckpt.save.save_info import SaveInfo
from recckpt.save.stage import Staged
from recckpt.save.write import RankRecord, write
from recckpt.storage import Storage
from recckpt.telemetry import Operation
from recckpt.text import Progress

log = logging.getLogger("recckpt")


def span_of(info: SaveInfo, ranks: Ranks, run: str, storage: Storage) -> Operation:
    attributes: dict[str, str | int] = {"id": info.ckpt_id}
    if info.step is not None:
        attributes["step"] = info.step
    return Operation("save", attributes, run=run, retries=lambda: storage.n_retries, is_reported=ranks.rank == 0)


@contextmanager
def failure_reported(job: Job, to: Destination) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _report(job, to, error)
        raise


def _report(job: Job, to: Destination, error: Exception | None = None) -> None:
    """Report a save to OpenTelemetry, a failed one to the timeline, and call ``on_save``."""
    info, storage = job.info, to.storage
    flags = {"background": info.background, "ephemeral": info.ephemeral}
    attributes: dict[str, str | int] = {"kind": info.kind, "links": info.n_links, **flags}
    measured: dict[str, float] = {"save.pause": info.max_blocked_sec}
    if error is None:
        attributes |= {"bytes": info.n_bytes, "rows": info.n_rows}
        measured |= {"save.bytes": info.n_bytes, "save.rows": info.n_upserts}
        measured |= {"chain.length": info.n_links, "last_save.time": time.time()}
        with suppress(OSError):
            free = storage.free_bytes() if storage.asking_is_free else None
            measured |= {} if free is None else {"storage.free": free}
    else:
        info.note_failure(error)
    job.span.end(error, attributes=attributes, measured=measured)
    if error is not None and job.ranks.rank == 0:
        to.timeline.add_failure(storage, to.fence, info)
    if to.on_save is not None:
        try:
            to.on_save(info)
        except Exception:
            how = "is saved, but" if error is None else "has failed, and"
            log.exception("%s %s on_save=%r failed", info.ckpt_id, how, to.on_save)


def save(live: Live, job: Job, to: Destination, runner: SaveRunner) -> SaveHandle:
    """Agree with all ranks on what is saved; then write and commit in the thread that the runner chooses. Collective.

    Raises:
        RecckptError: the previous save has failed, and its error has not been raised yet.
        Exception: the state of this rank cannot be saved.
        SaveFailedError: the state of another rank cannot be saved, a rank is missing, or the ranks are not at the same
            save.
    """
    handle, ranks = SaveHandle(job.info), job.ranks
    with job.span, collected_rarely(), ExitStack() as closed_on_error:
        for guest in to.guests:
            with failure_reported(job, to):
                guest.hold_together(ranks, partial(to.fence.hold_once, is_resumed=job.is_resumed))
        own = propose(live, job, to, runner.settle, closed_on_error)
        with failure_reported(job, to):
            plan = ranks.concluded(lambda: own.proposal, decide)
            if plan.refusal is None or plan.refusal.phase is not Phase.SETTLE:
                own.raise_refusal(plan, job)
        own.raise_refusal(plan, job)  # the error of the previous save; it is not a failure of this save
        staged = own.planned(plan)
        _note_kind(plan, job, to)
        closed_on_error.pop_all()
        cut = max((guest.next_cut() for guest in to.guests), default=None)
        work = partial(write_and_commit, staged, plan, replace(job, ranks=ranks.background, cut=cut), to)
        return runner.run(work, handle, ranks.rank, staged.close)


def _note_kind(plan: SavePlan, job: Job, to: Destination) -> None:
    info, kind = job.info, plan.kind
    info.note(kind=kind.name, why_full=kind.why_full, n_links=kind.n_links)
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
    """Write, commit and rotate. Collective: all ranks return the manifest, or all raise the same error.

    Raises:
        CheckpointExistsError: the id is committed already, and ``overwrite`` is not set.
        SaveFailedError: a rank failed, and nothing was committed; or a rank is missing, and the message says whether
            the save may have been committed.
        CommitNotDurableError: the save was committed, but the storage failed before the commit was certainly durable.
        WriterFencedError: another writer has taken the output dir over.
    """
    info, ranks = job.info, job.ranks
    with job.span, collected_rarely(), failure_reported(job, to), closing(staged):
        attempt = Attempt(to.storage, *ranks.on_first(lambda: _begin(staged, job, to)))
        with attempt.abandoned_on_error(lambda error: _is_idle(error, ranks)):
            if ranks.rank:  # from now on, this rank may not learn the outcome of the save
                info.note(outcome=info.words.is_open)
            for join, sources in staged.joins.items():
                ranks.in_meetings(partial(join, sources))
            record = _commit(staged, head_of(staged, plan, attempt, job), attempt, job, to)
        if to.changes is not None and not record.ephemeral:
            staged.committed(record.save_id)
            to.changes.committed(record)
        if ranks.rank == 0:
            rotate(job, to)
            if to.changes is not None and (due := to.changes.due_compaction(to.fence)):
                for compactor in to.compactors:
                    compactor.begin(to.storage, to.fence.listing, *due)
    info.note_unblocked()
    _report(job, to)
    return record


def _commit(staged: Staged, head: Manifest, attempt: Attempt, job: Job, to: Destination) -> Manifest:
    """Write on all ranks, and commit on rank 0 what they wrote. Collective.

    Rank 0 returns the whole manifest; any other rank returns a manifest of its own files only.
    """
    info, ranks, begin = job.info, job.ranks, time.perf_counter()
    own, of_first = list[RankRecord](), list[Manifest]()

    def write_own() -> RankRecord:
        what = f"saving {info.ckpt_id}" if staged.kind.base is None else f"saving {info.ckpt_id} as a delta"
        with Progress(what, staged.sparse_bytes, has_bar=ranks.rank == 0) as progress:
            progress.n_rows = sum(table.n_rows for table in staged.tables)
            own.append(write(staged, attempt.intent, job, to, progress))
        return own[0]

    def commit_all(records: list[RankRecord]) -> tuple[Manifest, dict[str, Any]]:
        manifest, totals = commit(records, head, job, to, attempt=attempt, kind=staged.kind)
        of_first.append(manifest)
        return replace(manifest, shards=(), files=()), totals  # the size does not depend on the number of ranks

    path = to.storage.url_of(attempt.directory)
    try:
        manifest, totals = ranks.concluded(write_own, commit_all)
    except CommitNotDurableError as error:
        info.note(path=path if error.is_in_place else "")
        raise
    agree_sec = time.perf_counter() - begin - own[0].write_sec - totals["commit_sec"]
    info.note(**totals, path=path, agree_sec=max(0.0, agree_sec))
    info.note_committed(manifest)
    shard = own[0].shard
    return of_first[0] if of_first else replace(manifest, shards=(shard.shard,), files=shard.files)


def _begin(staged: Staged, job: Job, to: Destination) -> tuple[Intent, int]:
    info, base = job.info, staged.kind.base
    to.fence.hold_once(is_resumed=job.is_resumed)
    end_pending(to)
    return begin(to.storage, to.fence, info.ckpt_id, step=info.step, overwrite=job.overwrite, base=base)


def _is_idle(error: BaseException, ranks: Ranks) -> bool:
    """Return whether this is rank 0 and every rank knows of the error, so that no rank is still writing."""
    return isinstance(error, RecckptError) and ranks.rank == 0 and not ranks.has_lost
