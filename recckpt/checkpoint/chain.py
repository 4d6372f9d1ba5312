"""A checkpoint opened for reading (no torch here)."""

from __future__ import annotations

from recckpt.output_dir.listing import Checkpoint
from recckpt.output_dir.open_files import HeldFiles
from recckpt.sparse.files.chain_table import OpenLink
from recckpt.storage import Storage


def open_link(storage: Storage, checkpoint: Checkpoint) -> OpenLink:
    """Open one checkpoint by itself and read its catalogs; CorruptCheckpointError where one is damaged."""
    sizes = {file.name: file.n_bytes for file in checkpoint.manifest.files}
    link = OpenLink(checkpoint, HeldFiles(storage, checkpoint.directory, sizes, first=()))
    _ = link.catalogs
    return link
