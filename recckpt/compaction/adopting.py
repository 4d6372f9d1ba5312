"""Adopting offers where no trainer does: the output dir is taken over, as a save would take it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from recckpt.compaction.read_again import remove_checked
from recckpt.errors import CheckpointNotFoundError
from recckpt.format import layout
from recckpt.output_dir import rotation
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.forget_requests import FORGET_FIRST, check_none_pending
from recckpt.output_dir.listing import Checkpoint, list_checkpoints
from recckpt.output_dir.near_at_takeover import PASSED_ON
from recckpt.output_dir.offers import adopt_offers
from recckpt.output_dir.why_nothing import why_nothing
from recckpt.storage import open_storage
from recckpt.storage.transfers import VISIBLE


@dataclass(frozen=True)
class Adopted:
    """What :func:`adopt` did: directories of the forms that it committed, and of the deltas that it removed."""

    forms: tuple[str, ...]
    removed: tuple[str, ...]


def adopt(path: str | os.PathLike[str]) -> Adopted:
    """Take an output dir over, adopt the offers in it, and remove the deltas that a form replaces.

    The next save of a trainer that still writes there raises WriterFencedError, and it saves no more.

    Raises:
        CheckpointNotFoundError: it is not an output dir.
        WriterFencedError: another writer took it over meanwhile.
        OSError: the storage failed.
        RecckptError: ids are yet to be forgotten there.
    """
    storage = open_storage(os.fspath(path))
    if list_checkpoints(storage).is_empty:
        raise CheckpointNotFoundError(f"{storage.url}: {why_nothing(storage)}")
    check_none_pending(storage, FORGET_FIRST)
    fence = Fence(storage, near=PASSED_ON)
    fence.hold()
    forms = adopt_offers(storage, fence, VISIBLE, rotation.THREADS)
    going = _replaced(fence.listing.committed)
    removed = remove_checked(storage, fence, going, rotation.THREADS)
    fence.check()
    fence.write_index()
    return Adopted(tuple(form.directory for form in forms), tuple(removed))


def _replaced(committed: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the deltas that have a whole form, newest first, but for copies that a person made."""
    of = {c.manifest.form_of.save_id for c in committed if c.manifest.form_of}
    ours = (c for c in reversed(committed) if layout.is_attempt(c.directory, c.ckpt_id))
    return [c for c in ours if c.manifest.kind == "delta" and c.manifest.save_id in of]
