"""Which checkpoints go where one is deleted by hand, or why it stays: the rules of rotation, but for the policy."""

from __future__ import annotations

from collections.abc import Collection

from recckpt.errors import CheckpointInUseError
from recckpt.format import layout
from recckpt.output_dir.listing import Checkpoint, Listing
from recckpt.output_dir.rotation import in_order


def chosen(
    listing: Listing, ckpt_id: str, pinned: Collection[str], place: str, near_bases: Collection[str] = ()
) -> list[Checkpoint]:
    """Return all that is committed under an id, in the order of removal: what it superseded must not come back.

    Args:
        listing: what is there.
        ckpt_id: the id, of a checkpoint that is committed.
        pinned: ids.
        place: the output dir, for messages.
        near_bases: save ids of what near saves stand on that may be restored.

    Raises:
        CheckpointInUseError: it stays, and why.
    """
    victims = [checkpoint for checkpoint in listing.committed if checkpoint.ckpt_id == ckpt_id]
    reason = _reason(listing, victims, ckpt_id, pinned)
    if reason is None and not {victim.manifest.origin for victim in victims}.isdisjoint(near_bases):
        reason = "near saves stand on it; save once more, and delete it then"
    if reason is not None:
        raise CheckpointInUseError(f"{place}: {ckpt_id!r} is not deleted: {reason}")
    return in_order(victims, listing)


def _reason(listing: Listing, victims: Collection[Checkpoint], ckpt_id: str, pinned: Collection[str]) -> str | None:
    """Say why an id stays, and what to do; None where it may go."""
    directories = {victim.directory for victim in victims}
    others = [checkpoint for checkpoint in listing.committed if checkpoint.ckpt_id != ckpt_id]
    standing = [c.ckpt_id for c in others if directories & {link.directory for link in c.below}]
    if standing:
        first, n_more = repr(standing[-1]), len(set(standing)) - 1
        deltas = f"{first} is a delta that is" if not n_more else f"{first} and {n_more} more are deltas that are"
        return (
            f"{deltas} read from it; delete what stands on it first, the newest first, or leave it to max_keep, which "
            "removes a chain once nothing of it is to be kept"
        )
    if ckpt_id in pinned:
        return "it is pinned; manager.unpin(step) first, or remove its file in .recckpt/pins"
    if not others:
        return "it is the only checkpoint; save another one first"
    copied = [victim.directory for victim in victims if not layout.is_attempt(victim.directory, ckpt_id)]
    if copied:
        return f"it lies in {copied[0]}/, a name that recckpt did not give; remove that directory by hand"
    return None
