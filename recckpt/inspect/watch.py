"""Polls one output dir, or a directory of output dirs; each poll reads only new files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.format.manifest import Manifest
from recckpt.inspect.save_times import History, history_of
from recckpt.inspect.status import Status, status_of
from recckpt.inspect.watch_text import Mood
from recckpt.near.views import NearHere, counting_here
from recckpt.output_dir.checkpoint_dir import (
    Intent,
    Manifests,
    attempt_dirs,
    has_manifest,
    listed_files,
    read_intent,
    read_manifest,
    unlisted,
)
from recckpt.output_dir.claims import Claim, claimed_epochs, read_claim
from recckpt.output_dir.index_file import read_timeline
from recckpt.output_dir.listing import Listing, look_around
from recckpt.parallel.threads import run_all
from recckpt.policies.options import Near
from recckpt.storage import NOT_READABLE, Listed, Storage, open_storage
from recckpt.text import duration, one_line, plural

_THREADS = 8


class ReadOnce(Manifests):
    """Reads each manifest once, with the sizes of its files; ``recckpt verify`` finds later damage.

    So a poll does not list checkpoint directories, which may have many other files.
    """

    def directories(self, storage: Storage) -> list[str]:
        return attempt_dirs(storage)

    def read(self, storage: Storage, directory: str) -> tuple[Manifest | None, Mapping[str, Listed]]:
        """Return a manifest, and the state of its files at the first read."""
        path = layout.join(directory, layout.MANIFEST)
        try:
            stamp = Listed(0, str(storage.modified(path) or storage.size(path)))
        except NOT_READABLE:
            return read_manifest(storage, directory), {}  # None, or the error that describes the directory
        known = self._known.get(directory)
        if known is not None and known[0] == stamp:
            return known[1], {file.name: Listed(file.n_bytes) for file in known[1].files}
        record = read_manifest(storage, directory)
        listed = listed_files(storage, directory) if record is not None else {}
        if record is not None and not unlisted(record.files, listed):
            self._known[directory] = stamp, record
        return record, listed


class Watcher:
    """Polls one output dir. Reads each manifest once, and the timeline when it has changed. Not thread-safe.

    ``overdue_sec``: see :func:`status_of`. Without ``near``, near saves are ignored.
    """

    def __init__(self, storage: Storage, overdue_sec: float | None = None, near: Near | None = None) -> None:
        self._storage, self._known, self._overdue_sec, self._near = storage, ReadOnce(), overdue_sec, near
        self._intents: dict[str, Intent] = {}
        self._writer: Claim | None = None
        self._timeline: tuple[object, History] = (None, history_of([]))

    def look(self) -> Status:
        """Return the status of the run now. After an OSError of the storage, the next call may succeed."""
        listing = look_around(self._storage, self._known)
        intents: dict[str, Intent] = {}
        for name in (name for name in listing.uncommitted if not layout.is_offer_dir(name)):
            with suppress(OSError, CorruptCheckpointError):
                intent = self._intents.get(name) or read_intent(self._storage, name)
                if intent is not None:
                    intents[name] = intent
        self._intents = intents
        return status_of(
            self._storage.url,
            datetime.now(timezone.utc),
            listing,
            self._history(listing),
            writer=self._owner(),
            intents=list(intents.values()),
            why_empty=self._storage.why_empty(),
            overdue_sec=self._overdue_sec,
            near_saves=near_saves_of(self._storage, listing, self._near),
        )

    def _history(self, listing: Listing) -> History:
        """Return the history of the run; the timeline is read again if its size or the newest checkpoint changed."""
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


def near_saves_of(storage: Storage, listing: Listing, near: Near | None) -> list[NearHere] | None:
    """Return the valid near saves of this host, newest first; None if near saves are ignored."""
    try:
        return None if near is None else counting_here(storage, listing, near)
    except (CorruptCheckpointError, FormatVersionError):  # the listing reports this as a problem
        return []


@dataclass(frozen=True)
class RunStatus:
    name: str  # name of its output dir in the directory of runs
    status: Status | None  # None if the last poll failed
    trouble: str = ""  # why the last poll failed

    @property
    def health(self) -> tuple[str, Mood]:
        status = self.status
        if status is None:
            return f"cannot look: {self.trouble}", "bad"
        if status.failed:
            return f"{plural(len(status.failed), 'save')} failed: {one_line(status.failed[-1].error)}", "bad"
        if status.problems:
            return one_line(status.problems[0]), "bad"
        if status.last is None:
            return f"waits: {one_line(status.why_empty)}", "doubtful"
        return ("overdue", "doubtful") if status.is_overdue else ("good", "good")

    @property
    def overdue_by(self) -> str:
        status = self.status
        if status is None or not status.is_overdue or status.last is None:
            return "-"
        return duration((status.last.age_sec or 0.0) - (status.overdue_sec or 0.0))

    def to_dict(self) -> dict[str, Any]:
        health, mood = self.health
        head = {"run": self.name, "health": health, "good": mood == "good"}
        return {**head, "error": self.trouble} if self.status is None else {**head, **self.status.to_dict()}


@dataclass(frozen=True)
class RunsStatus:
    url: str  # the directory of runs
    time: datetime  # time of the poll
    runs: Sequence[RunStatus]  # sorted by name

    def to_dict(self) -> dict[str, Any]:
        time = self.time.isoformat(timespec="seconds").replace("+00:00", "Z")
        return {"runs_dir": self.url, "time": time, "runs": [run.to_dict() for run in self.runs]}


class RunsWatcher:
    """Polls all output dirs in a directory, including new ones. Not thread-safe.

    ``give_up_sec`` limits the time for the requests of one poll; None for the storage's own limit.
    """

    def __init__(self, storage: Storage, overdue_sec: float | None = None, give_up_sec: float | None = None) -> None:
        self._storage, self._overdue_sec, self._give_up_sec = storage, overdue_sec, give_up_sec
        self._watchers: dict[str, Watcher] = {}

    def look(self) -> RunsStatus:
        """Return the status of each run; errors of one run do not hide others. OSError if the runs cannot be listed."""
        names = sorted(name for name in self._storage.list_dirs() if name != layout.OWN_DIR)
        known = run_all(self._watcher, names, self._storage.threads(_THREADS))
        self._watchers = {name: watcher for name, watcher in zip(names, known, strict=True) if watcher is not None}
        looks = run_all(self._look, self._watchers, self._storage.threads(_THREADS))
        return RunsStatus(self._storage.url, datetime.now(timezone.utc), looks)

    def _watcher(self, name: str) -> Watcher | None:
        if name in self._watchers:
            return self._watchers[name]
        storage = open_storage(self._storage.url_of(name))
        if self._give_up_sec is not None:
            storage.give_up_after(self._give_up_sec)
        try:
            return Watcher(storage, self._overdue_sec) if is_output_dir(storage) else None
        except OSError:  # the next poll may find out whether this is a run
            return None

    def _look(self, name: str) -> RunStatus:
        try:
            return RunStatus(name, self._watchers[name].look())
        except OSError as error:
            return RunStatus(name, None, one_line(str(error)))


def is_output_dir(storage: Storage) -> bool:
    """Return whether a directory is an output dir: a writer has saved there, or a checkpoint was copied there."""
    directories = storage.list_dirs()
    return layout.OWN_DIR in directories or any(has_manifest(storage, directory) for directory in directories)
