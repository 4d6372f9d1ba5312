"""What goes on while training does: a save, and a compaction."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from recckpt.errors import ForkedError, RecckptError
from recckpt.format.manifest import Manifest
from recckpt.output_dir.commit import chain_of
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import Checkpoint
from recckpt.parallel.one_process import OwnFuture
from recckpt.parallel.ranks import Ranks
from recckpt.parallel.threads import Latch, StoppedError, Worker
from recckpt.rewrite.compaction import make_offer
from recckpt.rewrite.whole import Means
from recckpt.save.deltas import Changes
from recckpt.save.save_info import SaveInfo
from recckpt.storage import Storage
from recckpt.text import one_line, plural, quoted, shown, size

log = logging.getLogger("recckpt")
_OF_PARENT = "of the process that this one was forked from"
_BUDGET_BYTES = 64 << 20  # beside a trainer, which needs its memory


class SaveHandle:
    """A save that was asked for.

    Attributes:
        committed: the manifest once the checkpoint is durable; the error of a save that failed.
        info: how the save went, so far.
    """

    def __init__(self, info: SaveInfo) -> None:
        self.info = info
        self.committed: OwnFuture[Manifest] = OwnFuture()
        self.committed.set_running_or_notify_cancel()  # what has begun cannot be cancelled

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
        """Say whether the save has ended, well or not."""
        return self.committed.done()

    def wait(self, timeout_sec: float | None = None) -> Manifest:
        """Return the manifest once the checkpoint is durable. Not collective.

        Raises:
            TypeError: ``timeout_sec`` is neither a number nor None.
            TimeoutError: that takes longer; the save goes on.
            RecckptError: the save failed; the saver does not raise this again.
            ForkedError: this is a forked child, which has no save.
        """
        self.committed.check_process()
        check_timeout(timeout_sec)
        if not self.committed.wait(timeout_sec):
            raise TimeoutError(f"saving {self.info.ckpt_id!r} has not ended after {timeout_sec} s; it goes on")
        _unraised.discard(self)
        return self.committed.result()


_unraised: set[SaveHandle] = set()  # saves that failed, whose error is yet to be raised: at the latest at exit
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unraised.clear)  # the parent raises their errors


class SaveRunner:
    """Runs saves, one at a time, in the thread of the caller or in one of their own. Not thread-safe."""

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
        """Whether a save is under way."""
        return self._worker.task is not None and not self._worker.task.done()

    def check_caller(self) -> None:
        """Refuse the thread of the save that is under way, in which ``on_save`` is: it would wait for itself."""
        if self._worker.is_caller:
            raise RuntimeError(
                "on_save is part of the save that it is called from, and cannot wait for it: save, load and step in "
                "the thread that trains"
            )

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

    def run(
        self, work: Callable[[], Manifest], handle: SaveHandle, rank: int, called_off: Callable[[], object]
    ) -> SaveHandle:
        """Do the work of a save here, or begin it in a thread.

        Args:
            work: writes and commits; on an error it leaves nothing open.
            handle: of the save; says whether it is one in the background.
            rank: of this process, for the error of a thread.
            called_off: called where no thread could be started.
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
        """Wait for the save that is under way, and say whether it has ended.

        Raises:
            TypeError: ``timeout_sec`` is neither a number nor None.
            RecckptError: it failed, and its error was not raised yet.
        """
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
    """Raise TypeError where a time to wait is no number of seconds and not None."""
    is_number = isinstance(timeout_sec, int | float) and not isinstance(timeout_sec, bool)
    if timeout_sec is not None and not is_number:
        raise TypeError(f"timeout_sec must be a number of seconds, or None to wait to the end, found {timeout_sec!r}")


def settle_on_all(settle: Callable[[], object], ranks: Ranks) -> None:
    """Wait on all ranks for the save that is under way; raise its error if a rank has not raised it yet. Collective.

    One rank may have raised it by :meth:`SaveHandle.wait`, and another not: all raise it then. If it failed because a
    rank is missing, each rank raises its own error: the ranks no longer reach each other.

    Args:
        settle: waits on this rank.
        ranks: all of them, which raise the errors of the save that is to follow.

    Raises:
        RecckptError: the save failed, or a rank is missing.
    """
    failure: Exception | None = None
    try:
        settle()
    except Exception as error:
        if ranks.has_lost:
            raise  # names the save that failed; what the ranks did next would fail too, as the save that follows
        failure = error

    def outcome() -> None:
        if failure is not None:
            raise failure

    ranks.on_all(outcome)


def _failure(error: BaseException, info: SaveInfo, rank: int) -> BaseException:
    """Return the error of a save in the background: one of ours, whatever went wrong between the ranks."""
    if isinstance(error, RecckptError) or not isinstance(error, Exception):
        return error
    failure = info.failure(rank, f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


@atexit.register  # the interpreter has waited for the threads by then
def _log_at_exit() -> None:
    for handle in list(_unraised):
        error = handle.committed.exception()
        if error is not None:
            log.error("the last save of this process failed: %s", error)
            sys.excepthook(type(error), error, error.__traceback__)


class OfferThread:
    """Makes offers, one at a time, in a thread: what ``Deltas(compact=True)`` asks for. Not thread-safe.

    An error is logged and fails nothing: a later save is full where the chain is too long by then.
    """

    def __init__(self) -> None:
        # A daemon: an interpreter that ends does not wait for it, and what it leaves is no whole offer.
        self._worker = Worker[Latch]("recckpt-compact", is_daemon=True)
        self._offered: str | None = None

    def begin_if_due(self, storage: Storage, fence: Fence, changes: Changes | None) -> None:
        """Begin an offer of what the next delta would stand on, if the policy wants one; rank 0 calls this."""
        chain = changes.chain(fence) if changes else None
        if changes is None or changes.base is None or chain is None or self._worker.is_at_work:
            return
        reason = changes.policy.why_compact(chain)
        if reason is not None and self._offered not in fence.listing.uncommitted:  # one that waits is enough
            log.info("%s: compacting in the background: %s", storage.url, reason)
            newest, stop = chain_of(fence.listing, changes.base.save_id)[0], Latch()
            self._worker.begin(stop, partial(self._make, storage, newest, stop))

    def close(self) -> None:
        """End what is at work, which leaves nothing; an offer may be begun again."""
        if self._worker.task is not None:
            self._worker.task.set()
        self._worker.wait()

    def _make(self, storage: Storage, checkpoint: Checkpoint, stop: Latch) -> None:
        try:
            done = make_offer(storage, checkpoint, Means(None, 1, _BUDGET_BYTES, stop.is_set, has_bar=False))
            self._offered = done.directory or self._offered
        except StoppedError:
            log.info("%s: the compaction of %r was ended", storage.url, checkpoint.ckpt_id)
        except Exception as error:
            log.warning("%s: %r could not be compacted: %s", storage.url, checkpoint.ckpt_id, error)
