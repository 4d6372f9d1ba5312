"""Saves, of which one may be under way while training goes on."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from contextlib import closing, contextmanager
from queue import SimpleQueue

from recckpt.errors import RecckptError
from recckpt.format.manifest import Manifest
from recckpt.output_dir.fence import Fence
from recckpt.parallel.one_process import OwnFuture
from recckpt.parallel.ranks import Ranks
from recckpt.parallel.threads import give_way
from recckpt.policies.keep import Keep
from recckpt.save.save import Destination, save, stage_on_all
from recckpt.save.save_info import SaveInfo
from recckpt.save.stage import Staged
from recckpt.sparse.files.saver import SparseSaver
from recckpt.storage import Storage
from recckpt.storage.transfers import Transfers

log = logging.getLogger("recckpt")

OnSave = Callable[[SaveInfo], object]


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
        self.committed: OwnFuture[Manifest] = OwnFuture()
        self.staged.set_result(None)
        self.committed.set_running_or_notify_cancel()  # what has begun cannot be cancelled

    def done(self) -> bool:
        """Say whether the save has ended, well or not."""
        return self.committed.done()

    def wait(self, timeout_sec: float | None = None) -> Manifest:
        """Return the manifest once the checkpoint is durable. Not collective.

        Raises:
            TimeoutError: that takes longer; the save goes on.
            RecckptError: the save failed; the saver does not raise this again.
            ForkedError: this is a forked child, in which nobody saves.
        """
        self.committed.check_process()
        futures.wait([self.committed], timeout_sec)
        if not self.done():
            raise TimeoutError(f"saving {self.info.ckpt_id!r} has not ended after {timeout_sec} s; it goes on")
        _untold.discard(self)
        return self.committed.result()


_untold: set[SaveHandle] = set()  # of saves that failed: somebody has to be told, or else the exit says it
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_untold.clear)  # they are the parent's to tell


class SaveRunner:
    """Runs the saves to one output dir, at most one at a time; an error is raised once. Not thread-safe.

    Args:
        storage: the output dir.
        transfers: how files go up to it.
        concurrency: threads that write.
        on_save: called with each save that is committed, once it is over, in its thread.
        made_at: where in the caller's program its saver was made.
    """

    def __init__(
        self,
        storage: Storage,
        transfers: Transfers,
        concurrency: int,
        on_save: OnSave | None = None,
        made_at: str | None = None,
    ) -> None:
        self._storage, self._transfers = storage, transfers
        self._concurrency, self._on_save = concurrency, on_save
        self._fence = Fence(storage, made_at)
        self._sparse_saver = SparseSaver(concurrency)
        self._handle: SaveHandle | None = None
        self._thread: threading.Thread | None = None
        self._is_in_save = False

    @property
    def is_running(self) -> bool:
        """Whether a save is under way."""
        return self._handle is not None and not self._handle.done()

    @property
    def is_this_thread(self) -> bool:
        """Whether the caller is in the thread of the save that is under way, as ``on_save`` is."""
        return self._thread is threading.current_thread()

    @contextmanager
    def one_save(self) -> Iterator[None]:
        """Refuse a save in the middle of one of the same thread, which no lock holds off."""
        if self._is_in_save:
            raise RuntimeError(
                "save was called in the middle of another save of this thread, from on_save or a signal handler: set a "
                "flag there, and save in the training loop (CheckpointManager has save_on_signal)"
            )
        self._is_in_save = True
        try:
            yield
        finally:
            self._is_in_save = False

    def start(
        self,
        take: Callable[[], Staged],
        info: SaveInfo,
        ranks: Ranks,
        *,
        max_keep: int | Keep | None,
        overwrite: bool,
        resumed: bool,
    ) -> SaveHandle:
        """Stage, and do the rest now or in the background, once the save before has ended. Collective.

        Args:
            take: takes the state.
            info: what to save, and whether in the background.
            ranks: that take part, which tell the errors of this save.
            max_keep: how many checkpoints stay.
            overwrite: supersede a committed checkpoint.
            resumed: whether a checkpoint of the output dir was loaded before.

        Raises:
            Exception: whatever ``take`` raised here.
            RecckptError: it raised on another rank; or the save before failed, and nobody has been told yet.
        """
        handle = SaveHandle(info)
        settle_on_all(self.settle, ranks)
        self._fence.is_resumed = resumed
        staged = stage_on_all(take, info, ranks)
        to = Destination(
            self._storage,
            self._fence,
            ranks.background,
            self._sparse_saver,
            self._concurrency,
            max_keep,
            self._transfers,
        )
        if not info.background:
            handle.committed.set_result(self._finish(staged, info, to, overwrite))
            return handle
        self._begin(handle, staged, to, overwrite)
        return handle

    def _begin(self, handle: SaveHandle, staged: Staged, to: Destination, overwrite: bool) -> None:
        """Start the thread of a save, or call the save off."""
        may_begin: SimpleQueue[bool] = SimpleQueue()
        args = (may_begin, handle, staged, to, overwrite)
        thread = threading.Thread(target=self._run, args=args, name="recckpt-save")
        handle.info.let_go()
        self._handle, self._thread, is_started = handle, thread, False
        try:
            thread.start()
            is_started = True
        finally:  # an interrupt, no room for a thread, or the interpreter is about to end
            may_begin.put(is_started)
            if not is_started:
                self._handle = self._thread = None
                staged.close()

    def settle(self, timeout_sec: float | None = None) -> bool:
        """Wait for the save that is under way, and say whether it has ended.

        Raises:
            RecckptError: it failed, and nobody has been told yet; once.
        """
        handle, thread = self._handle, self._thread
        if handle is None or thread is None:
            return True
        if timeout_sec != 0:  # not by join: one that is interrupted takes a thread that runs for one that has ended
            futures.wait([handle.committed], timeout_sec)
        if not handle.done():
            return False
        thread.join()
        self._handle = self._thread = None
        if handle in _untold:
            handle.wait()
        return True

    def _run(
        self, may_begin: SimpleQueue[bool], handle: SaveHandle, staged: Staged, to: Destination, overwrite: bool
    ) -> None:
        """Be the thread of a save."""
        if not may_begin.get():  # training goes on first: it would wait 5 ms for the interpreter that a new thread has
            return
        give_way()
        try:
            record = self._finish(staged, handle.info, to, overwrite)
        except BaseException as error:
            _untold.add(handle)
            handle.committed.set_exception(_failure(error, handle.info, to.ranks.rank))
        else:
            handle.committed.set_result(record)

    def _finish(self, staged: Staged, info: SaveInfo, to: Destination, overwrite: bool) -> Manifest:
        with closing(staged):
            record = save(staged, info, to, overwrite=overwrite)
        info.let_go()
        if self._on_save is not None:
            try:
                self._on_save(info)
            except Exception:
                log.exception("%s is saved, but on_save=%r failed", info.ckpt_id, self._on_save)
        return record


def settle_on_all(settle: Callable[[], object], ranks: Ranks) -> None:
    """Wait on all ranks for the save that is under way, and raise its error where one has not been told. Collective.

    One rank may have been told by :meth:`SaveHandle.wait`, and another not: all raise then.

    Args:
        settle: waits on this rank.
        ranks: all of them, which tell the errors of the save that is to follow.

    Raises:
        RecckptError: the save failed, or a rank is missing.
    """
    if ranks.has_lost:
        settle()  # its error says more than that a rank is missing by now
    ranks.on_all(settle)


def _failure(error: BaseException, info: SaveInfo, rank: int) -> BaseException:
    """Return the error of a save in the background: one of ours, whatever went wrong between the ranks."""
    if isinstance(error, RecckptError) or not isinstance(error, Exception):
        return error
    failure = info.failure(rank, f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


@atexit.register  # the interpreter has waited for the threads by then
def _tell_at_exit() -> None:
    for handle in list(_untold):
        error = handle.committed.exception()
        if error is not None:
            log.error("the last save of this process failed: %s", error)
            sys.excepthook(type(error), error, error.__traceback__)
