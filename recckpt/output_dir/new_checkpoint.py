"""A full checkpoint that one process writes and commits, in an output dir that it takes over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from recckpt.errors import CommitNotDurableError, WriterFencedError
from recckpt.format import layout
from recckpt.format.manifest import Content, FileEntry, Manifest
from recckpt.output_dir import rotation
from recckpt.output_dir.checkpoint_dir import read_checked, refuse_checkpoint
from recckpt.output_dir.commit import begin, commit, time_now
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.forget_requests import FORGET_FIRST, check_none_pending
from recckpt.storage import HashingSink, Storage
from recckpt.storage.transfers import VISIBLE


@dataclass(frozen=True)
class Target:
    """The directory of a new checkpoint, and the save id that its files repeat."""

    storage: Storage
    directory: str
    save_id: str

    def write(self, name: str, data: bytes) -> FileEntry:
        """Write a small file, read it back, and return its entry; CorruptCheckpointError where it is another."""
        with self.storage.create(layout.join(self.directory, name)) as sink:
            hashing = HashingSink(sink)
            hashing.write(data)
        entry = FileEntry(name, sink.n_bytes, hashing.xxh3)
        read_checked(self.storage, self.directory, entry)
        return entry


def commit_new(
    storage: Storage, ckpt_id: str, step: int | None, write: Callable[[Target], Content]
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
    intent, seq = begin(storage, fence, ckpt_id, step=step, overwrite=False, base=None)
    try:
        content = write(Target(storage, intent.directory, intent.save_id)).content
        record = Manifest(
            ckpt_id=ckpt_id,
            save_id=intent.save_id,
            epoch=intent.epoch,
            seq=seq,
            step=step,
            time=time_now(),
            **content,
        )
        record = commit(storage, fence, intent.directory, record, VISIBLE)
    except (WriterFencedError, CommitNotDurableError):
        raise  # the directory is the new owner's to judge, or holds a checkpoint
    except BaseException:
        rotation.abandon(storage, intent.directory)
        raise
    fence.write_index()
    return intent.directory, record
