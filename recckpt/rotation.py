"""Which checkpoints go, and how they go: the manifest first, so that a crash leaves nothing that anybody trusts."""

from __future__ import annotations

import logging

from recckpt import layout
from recckpt.listing import Checkpoint, Listing
from recckpt.storage import Storage

log = logging.getLogger("recckpt")


def expired(listing: Listing, max_keep: int | None) -> list[Checkpoint]:
    """Return the committed checkpoints that the policy does not want: superseded ones, and all but the newest.

    Damaged checkpoints neither count nor go.
    """
    current = listing.current
    newest = current if max_keep is None else current[-max_keep:]
    kept = {checkpoint.directory for checkpoint in (*newest, *(c for c in current if c.manifest.pinned))}
    return [checkpoint for checkpoint in listing.committed if checkpoint.directory not in kept]


def remove(storage: Storage, checkpoint: Checkpoint) -> None:
    """Remove what recckpt wrote of a checkpoint; a failure is logged and never fails a save."""
    directory = checkpoint.directory
    try:
        storage.remove(layout.join(directory, layout.MANIFEST))  # first: a crash now leaves what nobody trusts
        storage.sync_dir(directory)
        listed = {file.name for file in checkpoint.manifest.files}
        for name in storage.list_files(directory):
            if name in listed or layout.is_ours(name):
                storage.remove(layout.join(directory, name))
        storage.remove_empty_dirs(directory)
    except OSError as error:
        log.warning("could not remove all of %s/%s: %s", storage.url, directory, error)


def abandon(storage: Storage, directory: str) -> None:
    """Remove what a failed attempt wrote, so that it takes no room; a failure is logged.

    INTENT stays: the directory is never used again.
    """
    try:
        storage.remove(layout.join(directory, layout.MANIFEST))  # first: the commit may have failed after its link
        for name in storage.list_files(directory):
            if layout.is_ours(name) and name != layout.INTENT:
                storage.remove(layout.join(directory, name))
    except OSError as error:
        log.warning("could not remove all of the failed attempt %s/%s: %s", storage.url, directory, error)
