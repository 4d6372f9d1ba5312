"""The writer process of a checkpointer: spawned once, kept warm, and spawned again when it has died."""

from __future__ import annotations

import inspect
import logging
import os
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from recckpt.checkpointer.barrier import Alone, Barrier, RankFailedError, describe
from recckpt.checkpointer.child import Child, DiedError, rebuilt
from recckpt.checkpointer.stager import StagedState
from recckpt.checkpointer.worker import Setup
from recckpt.checkpointer.writer import PartlyCommittedError, RankInfo, WriterHook, storage_at
from recckpt.errors import SaveFailedError
from recckpt.format import drafts
from recckpt.parallel.one_process import OwnFuture
from recckpt.parallel.waiting import InOrder
from recckpt.storage import open_storage
from recckpt.types import positive_number

_log = logging.getLogger(__name__)


class SaveFuture(OwnFuture[None]):
    """A future that knows whether its error has been seen.

    Attributes:
        seen: whether the error was got from :meth:`result` or :meth:`exception`.
    """

    seen = False

    def result(self, timeout: float | None = None) -> None:
        """Wait, and raise the error if there is one; as :class:`concurrent.futures.Future` does."""
        try:
            super().result(timeout)
        except BaseException as error:
            self.seen = self.seen or (self.done() and error is super().exception())
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the error if there is one; as :class:`concurrent.futures.Future` does."""
        error = super().exception(timeout)
        self.seen = True
        return error

    def raise_unseen(self) -> None:
        """Wait, and raise an error that was not seen yet."""
        error = super().exception()
        if error is not None and not self.seen:
            raise error


class CheckpointProcess:
    """A process of its own that writes staged state, so that training shares neither its memory nor its lock.

    It is spawned here and ready long before the first save. If it dies, what it was writing fails, and another one
    is spawned. Not thread-safe.

    Args:
        rank_info: this rank.
        barrier: where several ranks agree; this process waits there, in a thread.
        commit_hook: called in the writer process; pickled, so defined in a module.
        subprocess_init_fn: called first in every writer process, to set up what its hook needs; pickled as well.
        subprocess_init_args: its arguments.
        start_timeout_sec: how long a writer process may take to be ready.
        close_timeout_sec: how long it may take to end, once nothing is left to write, before it is killed.

    Raises:
        TypeError: the function does not take its arguments, or is not a function.
        ValueError: the hook, the function or an argument cannot be sent to another process, or a timeout is not a
            number above 0.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        *,
        barrier: Barrier | None = None,
        commit_hook: WriterHook | None = None,
        subprocess_init_fn: Callable[..., object] | None = None,
        subprocess_init_args: tuple[Any, ...] = (),
        start_timeout_sec: float = 60.0,
        close_timeout_sec: float = 60.0,
    ) -> None:
        self._rank_info, self._barrier = rank_info, barrier or Alone()
        self._start_timeout_sec = positive_number("start_timeout_sec", start_timeout_sec)
        positive_number("close_timeout_sec", close_timeout_sec)
        _check_init(subprocess_init_fn, subprocess_init_args)
        sendable("subprocess_init_fn", subprocess_init_fn)
        sendable("subprocess_init_args", subprocess_init_args)
        self._setup = sendable("the hook", Setup(rank_info, commit_hook, subprocess_init_fn, subprocess_init_args))
        self._writes = InOrder("recckpt-write")
        self._children = [Child(self._setup)]
        self._end = weakref.finalize(self, _end_all, self._children, close_timeout_sec)

    @property
    def pid(self) -> int | None:
        """Process id of the writer process, if there is one."""
        return self._children[0].pid if self._children else None

    def begin(self) -> None:
        """Begin a save. Every rank begins every save.

        Raises:
            RuntimeError: the process is closed.
        """
        if not self._end.alive:
            raise RuntimeError("the checkpointer is closed; make a new one")
        self._barrier.begin()

    def refuse(self, reason: str) -> None:
        """Tell the other ranks that this one has nothing to write in the save that has begun."""
        self._barrier.refuse(reason)

    def write(self, staged: StagedState | Future[StagedState], url: str, kwargs: bytes) -> SaveFuture:
        """Write in the background what has been staged, in the save that has begun.

        Args:
            staged: the state, or a future of it.
            url: as :func:`target_url` returns it.
            kwargs: pickled, for the hook.
        """
        outcome = SaveFuture()
        outcome.set_running_or_notify_cancel()  # what has begun cannot be cancelled

        def work() -> None:
            try:
                self._write(staged, url, kwargs)
            except BaseException as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(None)

        self._writes.submit(work)
        return outcome

    def close(self) -> None:
        """Wait for the write in flight, then let the process end."""
        self._writes.finish()
        self._end()

    def _write(self, staged: StagedState | Future[StagedState], url: str, kwargs: bytes) -> None:
        n_agreed = [0]
        try:
            child = self._begun(staged.result() if isinstance(staged, Future) else staged, url, kwargs)
            self._follow(child, n_agreed)
        except SaveFailedError:
            raise  # of the writer, which has sent it to the others
        except BaseException as error:
            self._barrier.refuse(describe(error))
            if isinstance(error, DiedError):
                self._clean_up(url)
            failed = PartlyCommittedError if n_agreed[0] else SaveFailedError
            raise failed(url, self._rank_info.global_rank, describe(error)) from error

    def _begun(self, staged: StagedState, url: str, kwargs: bytes) -> Child:
        """Return a writer process that has begun; one that died while it was idle costs nothing but time."""
        for is_last in (False, True):
            try:
                child = self._running()
                child.request(url, staged.pickle, staged.spans, staged.arena, kwargs)
                return child
            except DiedError as error:
                if is_last:
                    raise
                _log.warning("%s before it began to write; starting another", error)
        raise AssertionError("unreachable")

    def _running(self) -> Child:
        if not (self._children and self._children[0].is_running()):
            self._respawn()
        child = self._children[0]
        try:
            child.wait_ready(self._start_timeout_sec)
        except Exception:
            self._children.clear()
            child.end(0)
            raise
        return child

    def _respawn(self) -> None:
        _end_all(self._children, 0)
        self._children.append(Child(self._setup))

    def _follow(self, child: Child, n_agreed: list[int]) -> None:
        """Wait for the other ranks when the writer asks for that, until it is done."""
        while True:
            kind, value = child.receive()
            if kind == "done":
                return
            if kind == "failed":
                raise rebuilt(value)
            if kind == "refuse":
                self._barrier.refuse(value)
                continue
            try:
                self._barrier.agree(last=value)
            except RankFailedError as failure:
                child.answer(failure)
            else:
                n_agreed[0] += 1
                child.answer(None)

    def _clean_up(self, url: str) -> None:
        """Spawn another process at once, for the next save, and remove what the dead one left half written."""
        with suppress(OSError):
            self._respawn()
        storage = open_storage(url)
        with suppress(OSError):
            for name in storage.list_files(""):
                if drafts.is_draft(name, self._rank_info.file_name):
                    storage.remove(name)


def _check_init(fn: Callable[..., object] | None, args: tuple[Any, ...]) -> None:
    """Refuse what the writer process could not call; raises TypeError."""
    if not (fn is None or callable(fn)):
        raise TypeError(f"subprocess_init_fn must be a function or None, found {fn!r}")
    if not isinstance(args, tuple):
        raise TypeError(f"subprocess_init_args must be a tuple, found {args!r}; of one argument, (argument,)")
    if fn is None and args:
        raise TypeError(f"subprocess_init_args={args!r} are for a subprocess_init_fn, found None")
    if fn is not None:
        try:
            inspect.signature(fn).bind(*args)
        except TypeError as error:
            raise TypeError(f"subprocess_init_fn does not take subprocess_init_args={args!r}: {error}") from None
        except ValueError:  # it is written in C, and does not say what it takes
            return


def target_url(path: str | os.PathLike[str]) -> str:
    """Return where a writer process is to write.

    Raises:
        TypeError: it is not a path.
        ValueError: nothing can be saved there, or not by another process.
    """
    url = storage_at(path).url
    if url.startswith("memory:"):
        raise ValueError(f"{url}: what another process writes to its memory is lost; use a SyncCheckpointer for it")
    return url


def sendable(what: str, value: object) -> bytes:
    """Return a value pickled for the writer process, or raise ValueError where it cannot be loaded there."""
    try:
        data = pickle.dumps(value, protocol=2)
    except Exception as error:
        raise ValueError(f"{what} cannot be sent to the writer process ({describe(error)})") from error
    if b"c__main__\n" in data:
        raise ValueError(f"{what} is defined in the script that runs; move it to a module for the writer process")
    return data


def _end_all(children: list[Child], timeout_sec: float) -> None:
    while children:
        children.pop().end(timeout_sec)
