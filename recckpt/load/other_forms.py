"""Another form of a checkpoint in which reading has found damage, a delta or a compacted copy of it (no torch here).

A listing looks at manifests and sizes only, so the one that it prefers may turn out to be damaged when it is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from recckpt.errors import CorruptCheckpointError
from recckpt.load.source import LocatedCheckpoint
from recckpt.output_dir.listing import Checkpoint, Listing, chained, list_checkpoints
from recckpt.storage import Storage

log = logging.getLogger("recckpt")
_T = TypeVar("_T")
_Others = list[LocatedCheckpoint] | None


class FoundDamage:
    """The damage that was found while checkpoints were read, by output dir. Not thread-safe."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, CorruptCheckpointError]] = {}

    def note(self, storage: Storage, directory: str, error: CorruptCheckpointError) -> None:
        """Note what is wrong in a directory of an output dir."""
        self._found.setdefault(storage.url, {})[directory] = error

    def whole(self, storage: Storage) -> Listing:
        """Return the listing of an output dir without what needs anything damaged; OSError as of a listing."""
        listing = list_checkpoints(storage)
        return replace(listing, committed=chained(listing.committed, self._found.get(storage.url, {}))[0])

    def instead(self, sources: Sequence[LocatedCheckpoint], error: CorruptCheckpointError) -> _Others:
        """Return sources, other forms of those in which this may be; None where there is none of any of them.

        The error names a directory, which several output dirs may have: forms have the same rows, so any will do.
        """
        others = [self._other(source, error) for source in sources]
        return [other or source for other, source in zip(others, sources, strict=True)] if any(others) else None

    def _other(self, source: LocatedCheckpoint, error: CorruptCheckpointError) -> LocatedCheckpoint | None:
        directory = damaged_link(source.checkpoint, error)
        if directory is None:
            return None
        self.note(source.storage, directory, error)
        try:
            found = self.whole(source.storage).representation(source.checkpoint.manifest.origin)
        except OSError:  # of a bucket or directory that may be entered but not listed
            return None
        if found is None:
            return None
        other = replace(source, checkpoint=found)
        log.error("%s is damaged, reading %s instead: %s", source.label, other.label, error)
        return other


def damaged_link(checkpoint: Checkpoint, error: CorruptCheckpointError) -> str | None:
    """Return the directory in which there is damage, of a checkpoint or a link that it stands on; None if elsewhere."""
    directories = (link.directory for link in checkpoint.links)
    return next((name for name in directories if error.path.startswith(f"{name}/")), None)


def alone(work: Callable[[], _T]) -> _T:
    """Do work where no other ranks act together with this one."""
    return work()


def from_whole(
    sources: Sequence[LocatedCheckpoint],
    use: Callable[[Sequence[LocatedCheckpoint]], _T],
    on_first: Callable[[Callable[[], _Others]], _Others],
) -> _T:
    """Use sources, and where one turns out to be damaged, use another form of it in its place.

    ``use`` may be called again, and has to make up for what it has done so far. ``on_first`` does the search on one of
    the ranks that act together, and returns what it gave on all.

    Raises:
        CorruptCheckpointError: there is no other form of what is damaged.
    """
    damage = FoundDamage()
    while True:
        try:
            return use(sources)
        except CorruptCheckpointError as error:
            others = on_first(partial(damage.instead, sources, error))
            if others is None:
                raise
            sources = others
