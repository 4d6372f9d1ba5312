"""Why checkpoints that a policy may not want are kept, by what stands on what; pure (no torch here)."""

from __future__ import annotations

from recckpt.output_dir.listing import Checkpoint, Listing

SECOND_CHAIN = "second chain"  # the newest that does not need the full checkpoint which the newest of all needs


def needed_by(listing: Listing) -> dict[str, list[Checkpoint]]:
    """Return for each directory the current checkpoints that are read from it beside their own, oldest first."""
    needed: dict[str, list[Checkpoint]] = {}
    for checkpoint in listing.current:
        for link in checkpoint.below:
            needed.setdefault(link.directory, []).append(checkpoint)
    return needed


def second_chain(listing: Listing) -> Checkpoint | None:
    """Return the newest checkpoint apart from the chain of the newest one; None where that is not a delta.

    Rotation keeps it, so that damage in one full checkpoint does not take all there is.
    """
    regular = [checkpoint for checkpoint in listing.current if not checkpoint.manifest.ephemeral]
    if not regular or not regular[-1].below:
        return None
    base = regular[-1].links[-1].directory
    return next((each for each in reversed(regular) if each.links[-1].directory != base), None)
