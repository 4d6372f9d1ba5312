"""The checkpoints of a run that can be read, oldest first (no torch here)."""

from __future__ import annotations

from recckpt.errors import CheckpointNotFoundError
from recckpt.inspect.find import is_checkpoint
from recckpt.output_dir.listing import Checkpoint, Listing
from recckpt.output_dir.why_nothing import why_nothing
from recckpt.storage import Storage


def kept(storage: Storage, listing: Listing) -> list[Checkpoint]:
    """Return the current checkpoint of each id.

    Raises:
        CheckpointNotFoundError: there is not one, or the place is a checkpoint itself.
        CorruptCheckpointError, FormatVersionError, OSError: there are only such as cannot be read.
    """
    if listing.current:
        return listing.current
    for error in (*listing.damaged.values(), *listing.unreadable.values()):
        raise error
    if is_checkpoint(storage.url):
        raise CheckpointNotFoundError(f"{storage.url}: is a checkpoint itself, expected an output dir; name its parent")
    raise CheckpointNotFoundError(f"{storage.url}: {why_nothing(storage)}")


def unusable(listing: Listing) -> dict[str, str]:
    """Return what is wrong with the checkpoints that cannot be read, by directory."""
    return {directory: str(error) for directory, error in (listing.damaged | listing.unreadable).items()}
