"""A checkpoint and its open files, which a reader reads from until it moves on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from recckpt.dense.tensors import DenseTensors
from recckpt.format import layout
from recckpt.format.manifest import Manifest
from recckpt.output_dir.listing import Checkpoint
from recckpt.output_dir.open_files import HeldFiles
from recckpt.sparse.files.aligned_rows import index_tables
from recckpt.sparse.files.chain_table import OpenLink
from recckpt.storage import Storage

if TYPE_CHECKING:
    from typing_extensions import Self


class OpenCheckpoint:
    """A checkpoint whose files are opened all at once, at the latest when one of them is read. It never changes."""

    def __init__(self, storage: Storage, checkpoint: Checkpoint) -> None:
        self.storage, self.checkpoint = storage, checkpoint
        self._before: dict[tuple[str, str], OpenLink] = {}

    def opened(self, before: OpenCheckpoint | None = None) -> Self:
        """Open the files, but those of links that another has open, and index the tables that it has indexed."""
        links = before.links if before is not None else ()
        self._before = {_key(link.checkpoint): link for link in links}
        _ = self.links, self.others
        self._before = {}
        indexed = {table for link in links for table in list(link.indexes)}  # other threads add to them meanwhile
        index_tables(self.links, sorted(indexed))
        return self

    @property
    def manifest(self) -> Manifest:
        """What is known without opening other files."""
        return self.checkpoint.manifest

    @cached_property
    def links(self) -> Sequence[OpenLink]:
        """Each with the files of its rows, newest first."""
        known = self._before
        return [known.get(_key(link)) or OpenLink(link, self._held(link, rows=True)) for link in self.checkpoint.links]

    @cached_property
    def others(self) -> HeldFiles:
        """All files but those with rows."""
        return self._held(self.checkpoint, rows=False)

    @cached_property
    def tensors(self) -> DenseTensors:
        """The dense tensors."""
        return DenseTensors(self.others, self.checkpoint.directory, self.manifest)

    def _held(self, checkpoint: Checkpoint, *, rows: bool) -> HeldFiles:
        files = (file for file in checkpoint.manifest.files if layout.has_rows(file.name) == rows)
        sizes = {file.name: file.n_bytes for file in files}
        return HeldFiles(self.storage, checkpoint.directory, sizes, sizes, len(self.checkpoint.links))


def _key(link: Checkpoint) -> tuple[str, str]:
    return link.directory, link.manifest.save_id
