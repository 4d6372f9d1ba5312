"""Saves, of which one may be under way while training goes on."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from recckpt.fence import Fence
from recckpt.group import Group
from recckpt.keep import Keep
from recckpt.manifest import Manifest
from recckpt.save import Destination, save, stage_on_all_ranks
from recckpt.sparse.saver import SparseSaver
from recckpt.stage import Staged
from recckpt.storage import Storage
from recckpt.timeline import SaveInfo

log = logging.getLogger("recckpt")


class SaveHandle:
    """A save that was asked for.

    Attributes:
        staged: done once training may go on, which it is when ``save`` has returned.
        committed: the manifest once the checkpoint is durable; the error of a save that failed.
        info: how the save went, so far.
    """

    def __init__(self, info: SaveInfo) -> None:
        self.info = info
        self.staged: Future[None] = Future()
        self.committed: Future[Manifest] = Future()
        self.staged.set_result(None)
        self.is_reported = False  # whether somebody has been given the error

    def done(self) -> bool:
        """Say whether the save has ended, well or not."""
        return self.committed.done()

    def wait(self, timeout_sec: float | None = None) -> Manifest:
        """Return the manifest once the checkpoint is durable. Not collective.

        Raises:
            TimeoutError: that takes longer; the save goes on.
            RecckptError: the save failed; the saver does not raise this again.
        """
        try:
            return self.committed.result(timeout_sec)
        finally:
            self.is_reported = self.committed.done()


@dataclass(frozen=True)
class Groups:
    """The ranks of a save, twice: what is done in the background must not meet what is done beside it.

    Attributes:
        front: for the caller.
        back: for the thread of the save.
    """

    front: Group
    back: Group


class SaveRunner:
    """Runs the saves to one output dir, at most one at a time; an error is raised once. Not thread-safe."""

    def __init__(self, storage: Storage, concurrency: int) -> None:
        self._storage, self._concurrency = storage, concurrency
        self._fence = Fence(storage)
        self._sparse_saver = SparseSaver(concurrency)
        self._handle: SaveHandle | None = None
        self._thread: threading.Thread | None = None
        atexit.register(_report_at_exit, weakref.ref(self))  # the interpreter has waited for the thread by then

    @property
    def is_running(self) -> bool:
        """Whether a save is under way."""
        return self._handle is not None and not self._handle.done()

    def start(
        self, take: Callable[[], Staged], info: SaveInfo, ranks: Groups, *, max_keep: int | Keep | None, overwrite: bool
    ) -> SaveHandle:
        """Stage, and do the rest now or in the background, once the save before has ended. Collective.

        Args:
            take: takes the state.
            info: what to save, and whether in the background.
            ranks: that take part.
            max_keep: how many checkpoints stay.
            overwrite: supersede a committed checkpoint.

        Raises:
            Exception: whatever ``take`` raised here.
            RecckptError: it raised on another rank; or the save before failed, and nobody has been told yet.
        """
        handle = SaveHandle(info)
        with info.timed("blocked"):
            self.settle()
            staged = stage_on_all_ranks(take, info.ckpt_id, ranks.front)
            to = Destination(self._storage, self._fence, ranks.back, self._sparse_saver, self._concurrency, max_keep)
            if not info.background:
                with closing(staged):
                    handle.committed.set_result(save(staged, info, to, overwrite=overwrite))
                return handle
            self._handle = handle
            self._thread = threading.Thread(target=_run, args=(handle, staged, to, overwrite), name="recckpt-save")
            self._thread.start()
        return handle

    def settle(self, timeout_sec: float | None = None) -> bool:
        """Wait for the save that is under way, and say whether it has ended.

        Raises:
            RecckptError: it failed, and nobody has been told yet; once.
        """
        handle, thread = self._handle, self._thread
        if handle is None or thread is None:
            return True
        if timeout_sec != 0 or handle.done():
            thread.join(timeout_sec or None)
        if thread.is_alive():
            return False
        self._handle = self._thread = None
        if not handle.is_reported:
            handle.wait()
        return True

    def report(self) -> None:
        """Hand the error of a save that nobody has asked about to ``sys.excepthook``."""
        handle = self._handle
        if handle is not None and handle.done() and not handle.is_reported:
            error = handle.committed.exception()
            if error is not None:
                log.error("the last save of this process failed: %s", error)
                sys.excepthook(type(error), error, error.__traceback__)


def _run(handle: SaveHandle, staged: Staged, to: Destination, overwrite: bool) -> None:
    try:
        with closing(staged):
            record = save(staged, handle.info, to, overwrite=overwrite)
    except BaseException as error:
        handle.committed.set_exception(error)
    else:
        handle.committed.set_result(record)


def _report_at_exit(reference: weakref.ref[Any]) -> None:
    in_flight = reference()
    if in_flight is not None:
        in_flight.report()
