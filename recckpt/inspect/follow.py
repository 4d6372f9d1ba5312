"""``recckpt.follow``: yields the checkpoints of a run as they are committed, for a process beside the trainer."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from operator import index
from time import monotonic, sleep

from recckpt.checkpoint.chain import OpenChain
from recckpt.errors import CheckpointNotFoundError, CheckpointRemovedError, CorruptCheckpointError, FormatVersionError
from recckpt.format.manifest import Manifest
from recckpt.inspect.find import Place, refuse_checkpoint
from recckpt.inspect.reader import CheckpointReader, reader_of
from recckpt.inspect.watch import ReadOnce
from recckpt.output_dir.index_file import why_nothing
from recckpt.output_dir.listing import Checkpoint, look_around
from recckpt.storage import Storage, absolute, open_storage
from recckpt.types import flag, positive_number

log = logging.getLogger("recckpt")


def follow(
    run: Place,
    *,
    timeout_sec: float | None = None,
    every_sec: float = 1.0,
    after: int | None = None,
    newest: bool = False,
    ephemeral: bool = False,
) -> Iterator[CheckpointReader]:
    """Yield each committed checkpoint of a run once, in order of commit, and wait for more. Needs no torch.

    Existing checkpoints come first. A checkpoint that rotation removes before it was yielded is skipped. A step that is
    saved again is yielded again; a step that is compacted is not. After an error of the storage, ``follow`` logs it
    once and retries. Each result is a reader with open files, which on a local file system stay readable after rotation
    removes the checkpoint. Pass the reader in place of a path to :func:`recckpt.load_into`,
    :meth:`recckpt.Standby.load` or :func:`recckpt.diff`. Writes nothing.

    Args:
        run: an output dir, which need not exist yet; any fsspec URL.
        timeout_sec: end when no checkpoint came for this long; 0 ends after the existing checkpoints; None never ends.
        every_sec: seconds between two polls.
        after: skip existing checkpoints up to this step, such as the last one evaluated.
        newest: if several are waiting, because the caller is slower than the run, skip all but the newest.
        ephemeral: whether to yield ephemeral checkpoints too.

    Raises:
        TypeError, ValueError: an argument is invalid; raised by the call itself.
        CheckpointNotFoundError: ``run`` is a checkpoint; raised by the call itself.
        FormatVersionError: a newer recckpt writes there.
    """
    if not isinstance(run, str | os.PathLike):
        raise TypeError(f"run must be a path or URL of an output dir, found {run!r:.200}")
    every_sec = positive_number("every_sec", every_sec)
    if timeout_sec is not None and timeout_sec != 0:
        positive_number("timeout_sec", timeout_sec)
    skipped_to = -1 if after is None else index(after)
    follower = RunFollower(
        open_storage(absolute(os.fspath(run))),
        after=skipped_to,
        only_newest=flag("newest", newest),
        with_ephemeral=flag("ephemeral", ephemeral),
    )
    try:
        refuse_checkpoint(run)
    except CheckpointNotFoundError:
        raise
    except OSError:  # the storage does not answer now, but may later
        pass
    return follower.each(every_sec, math.inf if timeout_sec is None else timeout_sec)


class RunFollower:  # not thread-safe
    def __init__(self, storage: Storage, *, after: int, only_newest: bool, with_ephemeral: bool) -> None:
        self._storage, self._known = storage, ReadOnce()
        self._after, self._only_newest, self._with_ephemeral = after, only_newest, with_ephemeral
        self._saves, self._places = set[str](), set[tuple[int, int]]()  # of checkpoints that were returned or skipped
        self._damaged = set[str]()  # directories already logged as damaged
        self._last: OpenChain | None = None
        self._is_away = False

    def each(self, every_sec: float, timeout_sec: float) -> Iterator[CheckpointReader]:
        begin = monotonic()
        while True:
            checkpoint = self._look()
            if checkpoint is not None:
                yield checkpoint
                begin = monotonic()  # excludes the time that the caller takes
                continue
            seconds_left = begin + timeout_sec - monotonic()
            if seconds_left <= 0:
                break
            sleep(min(every_sec, seconds_left))
        if not self._saves:  # the path may be mistyped
            with suppress(OSError):
                log.warning("%s: nothing came: %s", self._storage.url, why_nothing(self._storage))

    def _look(self) -> CheckpointReader | None:
        """Return the oldest new checkpoint, open; None if there is none, or the storage does not answer."""
        try:
            checkpoints = self._new()
            self._is_away = False
            return next(filter(None, map(self._opened, checkpoints)), None)
        except OSError as error:
            if not self._is_away:
                log.warning("%s cannot be read; retrying: %s", self._storage.url, error)
            self._is_away = True
            return None

    def _new(self) -> list[Checkpoint]:
        listing = look_around(self._storage, self._known)
        for directory, error in listing.damaged.items():
            if isinstance(error, FormatVersionError):
                raise error
            self._log_damage(directory, error)
        current = [each for each in listing.current if self._with_ephemeral or not each.manifest.ephemeral]
        new = []  # unseen checkpoints, except rewritten forms of seen ones
        for each in current:
            record = each.manifest
            is_anew = record.supersedes is not None and record.place in self._places
            if record.name not in self._saves and not is_anew:
                new.append(each)
        waiting = [each for each in new if each.manifest.step is None or each.manifest.step > self._after]
        chosen = waiting[-1:] if self._only_newest else waiting
        for each in new:
            if not any(each is one for one in chosen):
                self._note(each.manifest)
        self._after = -1
        return chosen

    def _opened(self, checkpoint: Checkpoint) -> CheckpointReader | None:
        """Open a checkpoint, sharing the open links of the previous one; None if it is gone or damaged."""
        try:
            chain = OpenChain.open(self._storage, checkpoint, self._last)
        except (CheckpointRemovedError, CheckpointNotFoundError) as error:
            log.info("%s: %s was removed before it was yielded: %s", self._storage.url, checkpoint.ckpt_id, error)
            return None
        except CorruptCheckpointError as error:
            self._log_damage(checkpoint.directory, error)
            return None
        self._note(checkpoint.manifest)
        self._last = chain
        return reader_of(chain)

    def _log_damage(self, directory: str, error: CorruptCheckpointError) -> None:
        if directory not in self._damaged:
            log.error("%s is damaged and passed over: %s", self._storage.url_of(directory), error)
        self._damaged.add(directory)

    def _note(self, record: Manifest) -> None:
        self._saves.add(record.name)
        self._places.add(record.place)
