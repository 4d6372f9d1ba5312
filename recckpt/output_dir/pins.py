"""Checkpoints that rotation leaves alone until they are unpinned: one small file each, so that any process may pin."""

from __future__ import annotations

from contextlib import suppress

from recckpt.format import layout
from recckpt.output_dir.listing import locate
from recckpt.storage import Storage


def pin(storage: Storage, ckpt_id: str) -> None:
    """Keep a checkpoint, whatever the policy says; pinning twice is once.

    Raises:
        CheckpointNotFoundError: there is no committed checkpoint of this id, or rotation has just removed it.
    """
    locate(storage, ckpt_id)
    for directory in (layout.OWN_DIR, layout.PINS_DIR):
        with suppress(FileExistsError):
            storage.make_dir(directory)
    with suppress(FileExistsError):
        storage.put_if_absent(layout.pin(ckpt_id), b"{}\n")
    locate(storage, ckpt_id)


def unpin(storage: Storage, ckpt_id: str) -> None:
    """Let rotation have a checkpoint again, at the next save; unpinning what is not pinned is no error."""
    storage.remove(layout.pin(ckpt_id))


def pinned_ids(storage: Storage) -> set[str]:
    """Return the ids that are pinned, of checkpoints that are gone, it may be."""
    names = map(layout.parse_pin, storage.list_files(layout.PINS_DIR))
    return {ckpt_id for ckpt_id in names if ckpt_id is not None}
