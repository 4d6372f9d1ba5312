"""Mirrors held against what they may be: whole at each moment, and byte for byte what their runs have."""

from __future__ import annotations

from recckpt.format import layout
from recckpt.inspect.verify import verify
from recckpt.output_dir.listing import Listing, list_checkpoints
from recckpt.storage import Storage, open_storage


def listing_of(url: object) -> Listing:
    """Return what is in an output dir."""
    return list_checkpoints(open_storage(str(url)))


def ids_of(url: object) -> list[str]:
    """Return the ids of the checkpoints in an output dir."""
    return listing_of(url).ckpt_ids


def directories_of(url: object) -> set[str]:
    """Return the directories of the checkpoints in an output dir."""
    return {checkpoint.directory for checkpoint in listing_of(url).committed}


def check_whole(url: object) -> Listing:
    """Check that all checkpoints of a mirror are whole, down to every byte, and return them."""
    listing = listing_of(url)
    assert listing.damaged == {}
    assert listing.fenced == {}
    if listing.committed:
        assert verify(str(url)) == []
    return listing


def check_same(run: object, to: object) -> None:
    """Check that a mirror is whole, and that what it has, the run has byte for byte, or had."""
    listing, there = listing_of(run), check_whole(to)
    own = {checkpoint.directory for checkpoint in listing.committed}
    source, copy = open_storage(str(run)), open_storage(str(to))
    for checkpoint in there.committed:
        if checkpoint.directory in own:
            assert content(copy, checkpoint.directory) == content(source, checkpoint.directory), checkpoint.directory


def content(storage: Storage, directory: str) -> dict[str, bytes]:
    """Return the files of a checkpoint, but what is left of an offer."""
    names = [name for name in storage.list_files(directory) if name != layout.OFFER_JSON]
    return {name: storage.read(layout.join(directory, name), 1 << 30) for name in names}
