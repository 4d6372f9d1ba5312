"""The checkpoint that a path or URL means."""

from __future__ import annotations

import re

from recckpt.errors import CheckpointNotFoundError
from recckpt.format import layout
from recckpt.output_dir.checkpoint_dir import file_problems, read_manifest
from recckpt.output_dir.claims import last_takeover
from recckpt.output_dir.listing import Checkpoint, attempt_dirs, newest
from recckpt.storage import Storage, open_parent, open_storage


def read_checkpoint(storage: Storage, directory: str) -> Checkpoint | None:
    """Return the committed checkpoint in a directory, None where there is no manifest.

    Raises CheckpointNotFoundError where a writer committed it after it had lost the output dir, CorruptCheckpointError
    where it is damaged or a file is missing, FormatVersionError where a newer format wrote it.
    """
    found = read_manifest(storage, directory)
    if found is None:
        return None
    reason = last_takeover(storage).excludes(found)
    if reason is not None:
        raise CheckpointNotFoundError(f"{storage.url}/{directory}: {reason}")
    for problem in file_problems(storage, directory, found):
        if read_manifest(storage, directory) is None:  # its writer has just removed it
            return None
        raise problem
    return Checkpoint(directory, found)


def open_checkpoint(path: str) -> tuple[Storage, Checkpoint]:
    """Return the storage around a checkpoint's own path or URL, and it; errors as of ``read_checkpoint``."""
    storage, directory = open_parent(path)
    checkpoint = read_checkpoint(storage, directory)
    if checkpoint is None:
        what = open_storage(path).why_empty() or f"found no {layout.MANIFEST}"
        raise CheckpointNotFoundError(
            f"{path}: {what}, expected a committed checkpoint; name the checkpoint's own directory"
        )
    return storage, checkpoint


def locate_path(path: str) -> tuple[Storage, Checkpoint]:
    """Return the checkpoint at ``path``, or the newest one where ``path`` is an output dir.

    Raises CheckpointNotFoundError where there is none, CorruptCheckpointError where there are only damaged ones,
    FormatVersionError where there are only such as a newer recckpt wrote.
    """
    storage, directory = open_parent(path)
    checkpoint = read_checkpoint(storage, directory)
    if checkpoint is not None:
        return storage, checkpoint
    inside = open_storage(path)
    try:
        return inside, newest(inside)
    except CheckpointNotFoundError:
        checkpoint = _later_attempt(storage, directory)
        if checkpoint is None:
            raise
    return storage, checkpoint


def _later_attempt(storage: Storage, directory: str) -> Checkpoint | None:
    """Return the newest checkpoint in ``<directory>.<epoch>``, where the id of a crashed attempt lives on."""
    attempt = re.compile(re.escape(directory) + r"(\.[1-9]\d*){1,2}")
    try:
        names = [name for name in attempt_dirs(storage) if attempt.fullmatch(name)]
    except OSError:  # of a bucket or directory that may be entered but not listed
        return None
    found = [checkpoint for name in names if (checkpoint := read_checkpoint(storage, name))]
    return max(found, key=lambda checkpoint: checkpoint.manifest.place, default=None)
