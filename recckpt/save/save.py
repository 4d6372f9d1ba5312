"""The hallway of a save: check, stage, write, commit, rotate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial

from recckpt.errors import CommitNotDurableError, RecckptError, WriterFencedError
from recckpt.format.manifest import Manifest
from recckpt.output_dir import rotation
from recckpt.output_dir.checkpoint_dir import Intent
from recckpt.output_dir.commit import begin
from recckpt.parallel.ranks import Ranks
from recckpt.save.background_save import SaveHandle, SaveRunner, settle_on_all
from recckpt.save.check import check
from recckpt.save.commit import commit, rotate
from recckpt.save.forgetting import end_pending
from recckpt.save.job import Destination, Job, Live
from recckpt.save.stage import Staged, stage_on_all
from recckpt.save.telling import tell, told_of_failure
from recckpt.save.write import write
from recckpt.storage import Storage


def save(live: Live, job: Job, to: Destination, runner: SaveRunner) -> SaveHandle:
    """Check and stage, and do the rest in the thread that the runner chooses. Collective.

    Raises:
        RecckptError: the save before has failed, and its error was not raised yet.
        Exception: the state of this rank cannot be saved.
        SaveFailedError: that of another cannot, or a rank is missing, or the ranks are not at the same save.
    """
    handle = SaveHandle(job.info)
    with job.span:
        settle_on_all(runner.settle, job.ranks)
        with told_of_failure(job, to):
            staged = stage_on_all(live, check(live, job, to), job, to)
        in_thread = replace(job, ranks=job.ranks.background)
        return runner.run(partial(write_and_commit, staged, in_thread, to), handle, job.ranks.rank, staged.close)


def write_and_commit(staged: Staged, job: Job, to: Destination) -> Manifest:
    """Write, commit and rotate. Collective: all ranks return the manifest, or all raise alike.

    Raises:
        CheckpointExistsError: the id is committed already and is not to be superseded.
        SaveFailedError: a rank failed, and nothing was committed; or one is missing: the message says what is known.
        CommitNotDurableError: committed, but the storage failed before that was surely durable.
        WriterFencedError: another writer has taken the output dir over.
    """
    info, ranks = job.info, job.ranks
    with job.span, told_of_failure(job, to), closing(staged):
        intent, seq = ranks.on_first(lambda: _begin(staged, job, to))
        with _abandoned_on_error(intent, to.storage, ranks):
            info.outcome.is_open = ranks.rank != 0
            written = write(staged, intent, job, to)
            record = commit(staged, written, seq, job, to)
        if to.changes is not None and not record.ephemeral:
            staged.committed(record.save_id)
            to.changes.committed(record)
        if ranks.rank == 0:
            rotate(job, to)
            to.offers.begin_if_due(to.storage, to.fence, to.changes)
    info.let_go()
    tell(job, to)
    return record


def _begin(staged: Staged, job: Job, to: Destination) -> tuple[Intent, int]:
    info, to.fence.is_resumed = job.info, job.is_resumed
    base = staged.kind.base
    if not to.fence.epoch:
        to.fence.hold()
    end_pending(to)
    return begin(to.storage, to.fence, info.ckpt_id, step=info.step, overwrite=job.overwrite, base=base)


@contextmanager
def _abandoned_on_error(intent: Intent, storage: Storage, ranks: Ranks) -> Iterator[None]:
    """Remove what was written where the save fails, unless somebody may be at work there."""
    try:
        yield
    except (WriterFencedError, CommitNotDurableError):
        raise  # the directory is the new owner's to judge, or holds a checkpoint
    except RecckptError:
        if ranks.rank == 0 and not ranks.has_lost:  # one that is lost may write there; all others know that they failed
            rotation.abandon(storage, intent.directory)
        raise
