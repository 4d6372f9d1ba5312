"""A full checkpoint that one process writes and commits, in an output dir that it takes over."""

from __future__ import annotations

from collections.abc import Callable

from recckpt.checkpoint.attempt import Attempt
from recckpt.format.manifest import Content, Manifest
from recckpt.format.moments import time_now
from recckpt.output_dir.checkpoint_dir import refuse_checkpoint
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.forget_requests import FORGET_FIRST, check_none_pending
from recckpt.storage import Storage


def commit_new(
    storage: Storage, ckpt_id: str, step: int | None, write: Callable[[Attempt], Content]
) -> tuple[str, Manifest]:
    """Have the files of a checkpoint written, and commit it; return its directory and its manifest.

    Raises:
        ValueError: the output dir is the directory of a checkpoint.
        CheckpointExistsError: the id is committed there already.
        RecckptError: ids are yet to be forgotten there.
        WriterFencedError: another writer took the output dir over.
        OSError: the storage failed; nothing is committed.
        CommitNotDurableError: the manifest is there, or may yet be, so all files stay.
        Exception: what ``write`` raised; what it wrote is removed.
    """
    storage.prepare()
    refuse_checkpoint(storage)
    check_none_pending(storage, FORGET_FIRST)
    fence = Fence(storage)
    attempt = Attempt.begin(storage, fence, ckpt_id, step=step)
    with attempt.abandoned_on_error():
        content, intent = write(attempt).content, attempt.intent
        record = Manifest(
            ckpt_id=ckpt_id,
            save_id=intent.save_id,
            epoch=intent.epoch,
            seq=attempt.seq,
            step=step,
            time=time_now(),
            **content,
        )
        record = attempt.commit(fence, record)
    fence.write_index()
    return attempt.directory, record
