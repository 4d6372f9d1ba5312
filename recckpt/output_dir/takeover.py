"""The two files by which a writer takes an output dir over: its claim, and the list of what was committed before it.

Follows step 0 of the commit protocol (docs/format.md, section 8).
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from contextlib import suppress
from dataclasses import replace

from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.format.json_fields import COUNT_LIMIT
from recckpt.format.moments import time_now
from recckpt.output_dir.checkpoint_dir import Manifests
from recckpt.output_dir.claims import (
    NO_TAKEOVER,
    Claim,
    MirrorOf,
    Takeover,
    claimed_epochs,
    encode_claim,
    encode_takeover,
    last_takeover,
    read_claim,
)
from recckpt.output_dir.listing import Listing, list_checkpoints
from recckpt.output_dir.near_at_takeover import NearAtTakeover
from recckpt.storage import Storage

log = logging.getLogger("recckpt")


def claim_next(storage: Storage, known: Manifests, above: int, purpose: str) -> Claim:
    """Claim an output dir by the next number that no writer and no checkpoint has."""
    make_owner_dirs(storage)
    continues = _continued(storage)
    while True:
        highest = max([above, *claimed_epochs(storage), list_checkpoints(storage, known).highest_epoch])
        if highest + 1 >= COUNT_LIMIT:
            found, expected = f"a file or checkpoint of epoch {highest}", "a number that a next one can follow"
            remedy = "remove what no recckpt wrote, or give this run another output dir"
            raise CorruptCheckpointError(storage.url, layout.OWNER_DIR, found=found, expected=expected, remedy=remedy)
        claim = replace(new_claim(highest + 1, purpose), continues=continues)
        try:
            put_claim(storage, claim)
        except FileExistsError:
            continue  # another was faster
        return claim


def make_owner_dirs(storage: Storage) -> None:
    """Make the directory of claims where it is missing."""
    for directory in (layout.OWN_DIR, layout.OWNER_DIR):
        with suppress(FileExistsError):
            storage.make_dir(directory)


def new_claim(epoch: int, purpose: str) -> Claim:
    """Return a claim of this process, which no other process can make."""
    return Claim(epoch, secrets.token_hex(16), socket.gethostname(), os.getpid(), time_now(), purpose)


def put_claim(storage: Storage, claim: Claim) -> None:
    """Claim an output dir, durably; FileExistsError where another has that number."""
    storage.put_if_absent(layout.claim(claim.epoch), encode_claim(claim))
    for directory in (layout.OWN_DIR, ""):  # the process that made them may have died before it synced them
        storage.sync_dir(directory)


def _continued(storage: Storage) -> MirrorOf | None:
    """Return the run of which the output dir is a mirror up to now, or which the run in it went on with."""
    for epoch in reversed(claimed_epochs(storage)):
        with suppress(OSError, CorruptCheckpointError, FormatVersionError):  # it only says where a run came from
            last = read_claim(storage, epoch)
            if last.mirror_of is not None:
                log.warning(
                    "%s is a mirror of %s, and becomes a run of its own, which goes on from there: `recckpt mirror` "
                    "writes nothing more to it",
                    storage.url,
                    last.mirror_of.url,
                )
            return last.mirror_of or last.continues
    return None


def publish(storage: Storage, claim: Claim, listing: Listing, near: NearAtTakeover) -> Takeover:
    """Publish what is committed: from now on late commits of older writers are ignored, and late near saves."""
    names = {directory for directory in listing.directories if not layout.is_offer_dir(directory)}
    forms = (checkpoint for checkpoint in listing.committed if layout.is_offer_dir(checkpoint.directory))
    names |= {layout.encode_id(form.ckpt_id) for form in forms}  # the name that its delta may have had
    steps = {directory: layout.parse_step(directory) for directory in names}
    before = NO_TAKEOVER
    with suppress(CorruptCheckpointError):  # then the directories that the list before this one named are lost
        before = last_takeover(storage)
    takeover = Takeover(
        claim.epoch,
        listing.save_ids,
        highest_step=max([before.highest_step, *(step for step in steps.values() if step is not None)]),
        directories=before.directories.union(directory for directory, step in steps.items() if step is None),
        near=near.near_list(listing, before, claim.epoch),
    )
    storage.put_if_absent(layout.takeover(claim.epoch), encode_takeover(claim, takeover))
    if claim.epoch > 1:
        log.info("%s: taken over as epoch %d, with %d checkpoints", storage.url, claim.epoch, len(listing.committed))
    return takeover
