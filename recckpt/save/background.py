"""A save that runs while training continues."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from recckpt.errors import ForkedError, RecckptError
from recckpt.format.manifest import Manifest
from recckpt.parallel.one_process import OwnFuture
from recckpt.parallel.ranks import Ranks
from recckpt.parallel.threads import Worker
from recckpt.save.save_info import SaveInfo
from recckpt.text import one_line, plural, quoted, shown, size

log = logging.getLogger("recckpt")
_OF_PARENT = "of the process that this one was forked from"


class SaveHandle:
    """A save in progress or ended.

    Attributes:
        committed: gets the manifest once the checkpoint is durable, or the error if the save fails.
        info: the course of the save so far.
    """

    def __init__(self, info: SaveInfo) -> None:
        self.info = info
        self.committed: OwnFuture[Manifest] = OwnFuture()
        self.committed.set_running_or_notify_cancel()  # a running save cannot be cancelled

    @shown
    def __repr__(self) -> str:
        return f"of {quoted(self.info.ckpt_id)}, {self._state()}"

    def _state(self) -> str:
        try:
            if not self.done():
                return "under way"
            error = self.committed.exception()
        except ForkedError:
            return _OF_PARENT
        if error is not None:
            return f"failed: {type(error).__name__}: {one_line(str(error))}"
        info = self.info
        rows = plural(info.n_upserts if info.kind == "delta" else info.n_rows, "row")
        return f"committed: {info.kind} of {rows}, {size(info.n_bytes)}"

    def done(self) -> bool:
        """Return whether the save has ended, with or without an error."""
        return self.committed.done()

    def wait(self, timeout_sec: float | None = None) -> Manifest:
        """Wait until the checkpoint is durable, and return its manifest. Not collective.

        Raises:
            TypeError: ``timeout_sec`` is neither a number nor None.
            TimeoutError: the save takes longer than this; the save continues.
            RecckptError: the save failed; the saver does not raise this error again.
            ForkedError: this process was forked, and the save runs in its parent.
        """
        self.committed.check_process()
        check_timeout(timeout_sec)
        if not self.committed.wait(timeout_sec):
            raise TimeoutError(f"saving {self.info.ckpt_id!r} has not ended after {timeout_sec} s; the save continues")
        _unraised.discard(self)
        return self.committed.result()


_unraised: set[SaveHandle] = set()  # failed saves with errors not yet raised; raised at exit at the latest
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unraised.clear)  # the parent raises their errors


class SaveRunner:
    """Runs saves, one at a time, in the caller's thread or in a thread per save. Not thread-safe."""

    def __init__(self) -> None:
        self._worker = Worker[SaveHandle]("recckpt-save")
        self._is_in_save = False

    def __str__(self) -> str:
        handle = self._worker.task
        try:
            return "idle" if handle is None or handle.done() else f"saving {quoted(handle.info.ckpt_id)}"
        except ForkedError:
            return _OF_PARENT

    @property
    def is_running(self) -> bool:
        """Whether a save has not ended yet."""
        return self._worker.task is not None and not self._worker.task.done()

    def check_caller(self) -> None:
        """Raise if the caller is the thread of the running save: ``on_save`` would wait for its own save to end."""
        if self._worker.is_caller:
            raise RuntimeError(
                "on_save runs as part of a save, and cannot wait for that save: call save, load and step in "
                "the thread that trains"
            )

    @contextmanager
    def one_save(self) -> Iterator[None]:
        """Raise if this thread is already in a save; the saver's lock is reentrant, so the lock allows this."""
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

    def run(
        self, work: Callable[[], Manifest], handle: SaveHandle, rank: int, called_off: Callable[[], object]
    ) -> SaveHandle:
        """Do the work of a save here, or start it in a thread if ``handle.info.background``.

        If ``work`` fails, it must close all that it opened. ``called_off`` is called if no thread could be started.
        """

        def aside() -> None:
            try:
                record = work()
            except BaseException as error:
                _unraised.add(handle)
                handle.committed.set_exception(_failure(error, handle.info, rank))
            else:
                handle.committed.set_result(record)

        if handle.info.background:
            handle.info.note_unblocked()
            self._worker.begin(handle, aside, called_off)
        else:
            handle.committed.set_result(work())
        return handle

    def settle(self, timeout_sec: float | None = None) -> bool:
        """Wait for the running save; return whether it has ended. Raise its error if that was not raised yet."""
        check_timeout(timeout_sec)
        handle = self._worker.task
        if handle is None:
            return True
        if not handle.committed.wait(timeout_sec):
            return False
        self._worker.wait()
        self._worker.drop()
        if handle in _unraised:
            handle.wait()
        return True


def check_timeout(timeout_sec: float | None) -> None:
    """Raise TypeError unless ``timeout_sec`` is a number of seconds, or None."""
    is_number = isinstance(timeout_sec, int | float) and not isinstance(timeout_sec, bool)
    if timeout_sec is not None and not is_number:
        raise TypeError(f"timeout_sec must be a number of seconds, or None to wait to the end, found {timeout_sec!r}")


def settle_on_all(settle: Callable[[], object], ranks: Ranks) -> None:
    """Wait on all ranks for the running save; raise its error if any rank has not raised it yet. Collective.

    If only some ranks have raised the error in :meth:`SaveHandle.wait`, all ranks raise it here. If the save failed
    because a rank is missing, each rank raises its own error, because the ranks can no longer communicate.
    """
    failure: Exception | None = None
    try:
        settle()
    except Exception as error:
        if ranks.has_lost:
            raise  # names the failed save; the next collective call would only fail as part of the next save
        failure = error

    def outcome() -> None:
        if failure is not None:
            raise failure

    ranks.on_all(outcome)


def _failure(error: BaseException, info: SaveInfo, rank: int) -> BaseException:
    """Return the error of a background save as a RecckptError; return KeyboardInterrupt and the like unchanged."""
    if isinstance(error, RecckptError) or not isinstance(error, Exception):
        return error
    failure = info.failure(rank, f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


@atexit.register  # when this runs, the interpreter has joined the save threads
def _log_at_exit() -> None:
    for handle in list(_unraised):
        error = handle.committed.exception()
        if error is not None:
            log.error("the last save of this process failed: %s", error)
            sys.excepthook(type(error), error, error.__traceback__)
