"""Which checkpoints go, and how they go: the manifest first, so that no reader trusts what a crash leaves.

Pinned ones stay, by a small file each, so that any process may pin.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress
from datetime import datetime, timezone

from recckpt.format import layout
from recckpt.output_dir.checkpoint_dir import Intent, has_manifest, read_intent
from recckpt.output_dir.listing import Checkpoint, Listing, locate
from recckpt.parallel.threads import run_all
from recckpt.policies.keep import Keep, as_keep
from recckpt.storage import Storage

log = logging.getLogger("recckpt")

THREADS = 8  # to remove files with, where the caller has no number of its own


def expired(
    listing: Listing, keep: int | Keep | None, pinned: Collection[str], now: datetime | None = None
) -> list[Checkpoint]:
    """Return the committed checkpoints that go: superseded ones, and those that the policy does not want.

    The newest of all stays whatever the policy says. So do pinned ones, and the newest that a manager made: a save by
    hand takes nothing of what a run goes on from. An ephemeral checkpoint stays only while it is the newest of all; the
    policy does not see it. Damaged and fenced checkpoints neither count nor go.
    """
    current = listing.current
    regular = [checkpoint.manifest for checkpoint in current if not checkpoint.manifest.ephemeral]
    wanted = as_keep(keep).kept(regular, now or datetime.now(timezone.utc))

    of_steps = [c for c in current if layout.parse_step(c.ckpt_id) is not None and not c.manifest.ephemeral]

    def stays(checkpoint: Checkpoint) -> bool:
        record = checkpoint.manifest
        is_newest = checkpoint is current[-1] or checkpoint in of_steps[-1:]
        return is_newest or record.ckpt_id in pinned or (record.ckpt_id in wanted and not record.ephemeral)

    kept = {checkpoint.directory for checkpoint in current if stays(checkpoint)}
    return [checkpoint for checkpoint in listing.committed if checkpoint.directory not in kept]


def pin(storage: Storage, ckpt_id: str) -> None:
    """Keep a checkpoint, whatever the policy says; CheckpointNotFoundError where it is not, or no longer, there."""
    locate(storage, ckpt_id)
    for directory in (layout.OWN_DIR, layout.PINS_DIR):
        with suppress(FileExistsError):
            storage.make_dir(directory)
    with suppress(FileExistsError):
        storage.put_if_absent(layout.pin(ckpt_id), b"{}\n")
    locate(storage, ckpt_id)


def unpin(storage: Storage, ckpt_id: str) -> None:
    """Let rotation have a checkpoint again, at the next save; it need not be pinned."""
    storage.remove(layout.pin(ckpt_id))


def pinned_ids(storage: Storage) -> set[str]:
    """Return the ids that are pinned, even of checkpoints that are gone."""
    names = map(layout.parse_pin, storage.list_files(layout.PINS_DIR))
    return {ckpt_id for ckpt_id in names if ckpt_id is not None}


def leftovers(storage: Storage, listing: Listing, epoch: int) -> list[Intent]:
    """Return the attempts that never committed or are half removed, by writers up to ``epoch``.

    Those writers must be dead, or be the caller between two saves.
    """
    intents = (read_intent(storage, directory) for directory in listing.uncommitted)
    found = [intent for intent in intents if intent is not None and intent.epoch <= epoch]
    return [intent for intent in found if not has_manifest(storage, intent.directory)]


def remove(storage: Storage, checkpoint: Checkpoint, concurrency: int) -> bool:
    """Remove what recckpt wrote of a checkpoint, with several threads, and say whether its manifest is gone.

    A failure is logged and never fails a save.
    """
    is_gone = False
    try:
        storage.remove(layout.join(checkpoint.directory, layout.MANIFEST))  # first: readers trust nothing without it
        is_gone = True
        storage.sync_dir(checkpoint.directory)
        _remove_files(storage, checkpoint.directory, {file.name for file in checkpoint.manifest.files}, concurrency)
    except OSError as error:
        log.warning("could not remove all of %s/%s: %s", storage.url, checkpoint.directory, error)
    return is_gone


def remove_leftover(storage: Storage, directory: str, concurrency: int) -> None:
    """Remove what an attempt without a manifest wrote; a failure is logged and tried again at the next save."""
    try:
        _remove_files(storage, directory, (), concurrency)
        log.info("removed %s/%s, which was never finished", storage.url, directory)
    except OSError as error:
        log.warning("could not remove all of the leftover %s/%s: %s", storage.url, directory, error)


def abandon(storage: Storage, directory: str) -> None:
    """Remove what a failed attempt wrote, so that it takes no room; a failure is logged.

    INTENT stays until the next save: all ranks must be through with the directory before its name is free.
    """
    try:
        names = storage.list_files(directory)
        for name in names if layout.MANIFEST not in names else ():
            if layout.is_ours(name) and name != layout.INTENT:
                storage.remove(layout.join(directory, name))
    except OSError as error:
        log.warning("could not remove all of the failed attempt %s/%s: %s", storage.url, directory, error)


def _remove_files(storage: Storage, directory: str, listed: Collection[str], concurrency: int) -> None:
    """Remove our files, and the directory if it is empty then; INTENT last, since it says whose leftover this is."""
    names = [name for name in storage.list_files(directory) if name in listed or layout.is_ours(name)]
    paths = [layout.join(directory, name) for name in names if name != layout.INTENT]
    run_all(storage.remove, paths, storage.threads(concurrency))  # of 1,024 ranks, 11,000 requests
    if layout.INTENT in names:
        storage.remove(layout.join(directory, layout.INTENT))
    storage.remove_empty_dirs(directory)
