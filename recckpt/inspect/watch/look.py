"""Looks at an output dir again and again, and reads what it has not read yet."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timezone

from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.format.manifest import Manifest
from recckpt.inspect.watch.history import History, history_of
from recckpt.inspect.watch.status import Status, status_of
from recckpt.near.here import NearHere, counting_here
from recckpt.near.options import Near
from recckpt.output_dir.checkpoint_dir import Intent, Manifests, listed_files, read_intent, read_manifest, unlisted
from recckpt.output_dir.claims import Claim, claimed_epochs, read_claim
from recckpt.output_dir.listing import Listing, look_around
from recckpt.output_dir.timeline import read_timeline
from recckpt.storage import NOT_READABLE, Listed, Storage


class ReadOnce(Manifests):
    """Manifests that are read once, as are the sizes of their files: later damage is for ``recckpt verify`` to find.

    So a look lists no directory, which may hold any number of files of others.
    """

    def read(self, storage: Storage, directory: str) -> tuple[Manifest | None, dict[str, Listed]]:
        """Return a manifest, and the files that it lists as they were when it was new."""
        path = layout.join(directory, layout.MANIFEST)
        try:
            stamp = Listed(0, str(storage.modified(path) or storage.size(path)))
        except NOT_READABLE:
            return read_manifest(storage, directory), {}  # None, or the error that says what is there
        known = self._known.get(directory)
        if known is not None and known[0] == stamp:
            return known[1], {file.name: Listed(file.n_bytes) for file in known[1].files}
        record = read_manifest(storage, directory)
        listed = listed_files(storage, directory) if record is not None else {}
        if record is not None and not unlisted(record, listed):
            self._known[directory] = stamp, record
        return record, listed


class Watcher:
    """Looks at one output dir. A manifest is read once, and the timeline when it has grown. Not thread-safe.

    Args:
        storage: the output dir.
        overdue_sec: the age of the newest checkpoint from which on the next save is missed; None to go by the usual.
        near: where near saves lie on this host; None where they are not looked at.
    """

    def __init__(self, storage: Storage, overdue_sec: float | None = None, near: Near | None = None) -> None:
        self._storage, self._known, self._overdue_sec, self._near = storage, ReadOnce(), overdue_sec, near
        self._intents: dict[str, Intent] = {}
        self._writer: Claim | None = None
        self._timeline: tuple[object, History] = (None, history_of([]))

    def look(self) -> Status:
        """Return what is known of the run now.

        Raises:
            OSError: the storage failed; the next look may work.
        """
        listing = look_around(self._storage, self._known)
        return status_of(
            self._storage.url,
            datetime.now(timezone.utc),
            listing,
            self._history(listing),
            writer=self._owner(),
            intents=self._attempts(listing),
            why_empty=self._storage.why_empty(),
            overdue_sec=self._overdue_sec,
            near_saves=self._near_saves(listing),
        )

    def _near_saves(self, listing: Listing) -> list[NearHere] | None:
        if self._near is None:
            return None
        try:
            return counting_here(self._storage, listing, self._near)
        except (CorruptCheckpointError, FormatVersionError):  # which is among the problems of the listing
            return []

    def _history(self, listing: Listing) -> History:
        """Return the timeline; one of the same size is not another, unless there is a new checkpoint."""
        try:
            n_bytes = self._storage.size(layout.TIMELINE)
        except NOT_READABLE:
            return history_of([])
        stamp = n_bytes, listing.newest_place
        if stamp != self._timeline[0]:
            self._timeline = stamp, history_of(read_timeline(self._storage))
        return self._timeline[1]

    def _owner(self) -> Claim | None:
        epoch = max(claimed_epochs(self._storage), default=0)
        if self._writer is None or self._writer.epoch != epoch:
            self._writer = None
            with suppress(OSError, CorruptCheckpointError, FormatVersionError):
                self._writer = read_claim(self._storage, epoch) if epoch else None
        return self._writer

    def _attempts(self, listing: Listing) -> list[Intent]:
        names = [name for name in listing.uncommitted if not layout.is_offer_dir(name)]
        intents = {name: self._intents.get(name) or self._intent(name) for name in names}
        self._intents = {name: intent for name, intent in intents.items() if intent is not None}
        return list(self._intents.values())

    def _intent(self, directory: str) -> Intent | None:
        with suppress(OSError, CorruptCheckpointError):
            return read_intent(self._storage, directory)
        return None
