"""The output dirs in a directory of runs, each looked at as by itself (no torch here)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from recckpt.format import layout
from recckpt.inspect.watch.look import Watcher
from recckpt.inspect.watch.shown import Mood
from recckpt.inspect.watch.status import Status
from recckpt.output_dir.checkpoint_dir import has_manifest
from recckpt.parallel.threads import run_all
from recckpt.storage import Storage, open_storage
from recckpt.text import duration, one_line, plural

_THREADS = 8


@dataclass(frozen=True)
class RunStatus:
    """One run.

    Attributes:
        name: of its output dir in the directory of runs.
        status: what is known of it; None where the last look failed.
        trouble: why it failed, "" where it has not.
    """

    name: str
    status: Status | None
    trouble: str = ""

    @property
    def health(self) -> tuple[str, Mood]:
        """How it is, in a few words: the worst of what is known."""
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
        """For how long the next save has been missed, "-" where it is not."""
        last, overdue_sec = None if self.status is None else self.status.last, self.status and self.status.overdue_sec
        if self.status is None or not self.status.is_overdue or last is None:
            return "-"
        return duration((last.age_sec or 0.0) - (overdue_sec or 0.0))

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        health, mood = self.health
        head = {"run": self.name, "health": health, "good": mood == "good"}
        return {**head, "error": self.trouble} if self.status is None else {**head, **self.status.to_dict()}


@dataclass(frozen=True)
class RunsStatus:
    """All runs of a directory at one moment.

    Attributes:
        url: the directory.
        time: of the look.
        runs: by name.
    """

    url: str
    time: datetime
    runs: Sequence[RunStatus]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        time = self.time.isoformat(timespec="seconds").replace("+00:00", "Z")
        return {"runs_dir": self.url, "time": time, "runs": [run.to_dict() for run in self.runs]}


class RunsWatcher:
    """Looks at the output dirs in a directory, new ones too. Not thread-safe.

    Args:
        storage: the directory of runs.
        overdue_sec: the age of a newest checkpoint from which on the next save is missed; None to go by the usual.
        give_up_sec: when requests of a look are given up; None for as long as the storage tries.
    """

    def __init__(self, storage: Storage, overdue_sec: float | None = None, give_up_sec: float | None = None) -> None:
        self._storage, self._overdue_sec, self._give_up_sec = storage, overdue_sec, give_up_sec
        self._watchers: dict[str, Watcher] = {}

    def look(self) -> RunsStatus:
        """Return what is known of each run now; a run that cannot be looked at hides no other.

        Raises:
            OSError: the directory itself cannot be listed; the next look may work.
        """
        names = sorted(name for name in self._storage.list_dirs() if not layout.is_own(name))
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
        except OSError:  # nobody can say yet whether it is a run
            return None

    def _look(self, name: str) -> RunStatus:
        try:
            return RunStatus(name, self._watchers[name].look())
        except OSError as error:
            return RunStatus(name, None, one_line(str(error)))


def is_output_dir(storage: Storage) -> bool:
    """Say whether a place is an output dir: somebody has saved there, or copied a checkpoint there."""
    directories = storage.list_dirs()
    return layout.OWN_DIR in directories or any(has_manifest(storage, directory) for directory in directories)
