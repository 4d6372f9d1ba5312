"""Another form of a checkpoint that turns out to be damaged: a delta or a compacted copy of it (no torch here).

A listing looks at manifests and sizes only, so the one that it prefers may turn out to be damaged when it is read.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from recckpt.errors import CorruptCheckpointError
from recckpt.load.source import LocatedBank, LocatedCheckpoint
from recckpt.output_dir.listing import Checkpoint, Listing, chained, list_checkpoints
from recckpt.storage import Storage

log = logging.getLogger("recckpt")


class KnownDamage:
    """The damage that reading has met so far, by output dir and directory. Not thread-safe."""

    def __init__(self) -> None:
        self._errors: dict[str, dict[str, CorruptCheckpointError]] = {}

    def note(self, storage: Storage, directory: str, error: CorruptCheckpointError) -> None:
        """Note what is wrong in a directory of an output dir."""
        self._errors.setdefault(storage.url, {})[directory] = error

    def whole(self, storage: Storage) -> Listing:
        """Return the listing of an output dir without what needs anything damaged; OSError as of a listing."""
        listing = list_checkpoints(storage)
        return replace(listing, committed=chained(listing.committed, self._errors.get(storage.url, {}))[0])

    def instead(self, bank: LocatedBank, error: CorruptCheckpointError) -> LocatedBank | None:
        """Return a bank with other forms of the checkpoints that an error may be about; None where none has one.

        The error names a directory, which several output dirs may have: forms have the same rows, so any will do.
        """
        others = [self.other_form(source, error) for source in bank.sources]
        sources = [other or source for other, source in zip(others, bank.sources, strict=True)]
        return replace(bank, sources=sources) if any(others) else None

    def other_form(self, source: LocatedCheckpoint, error: CorruptCheckpointError) -> LocatedCheckpoint | None:
        """Return another form of a checkpoint that an error may be about; None where there is none."""
        directory = damaged_link(source.checkpoint, error)
        if directory is None:
            return None
        self.note(source.storage, directory, error)
        try:
            form = self.whole(source.storage).representation(source.checkpoint.manifest.origin)
        except OSError:  # of a bucket or directory that may be entered but not listed
            return None
        if form is None:
            return None
        other = replace(source, checkpoint=form, opened=None)
        log.error("%s is damaged, reading %s instead: %s", source.label, other.label, error)
        return other


def damaged_link(checkpoint: Checkpoint, error: CorruptCheckpointError) -> str | None:
    """Return the directory that an error is about, of a checkpoint or a link that it stands on; None if elsewhere."""
    directories = (link.directory for link in checkpoint.links)
    return next((name for name in directories if error.path.startswith(f"{name}/")), None)
