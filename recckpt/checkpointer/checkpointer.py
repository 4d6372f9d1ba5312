"""Checkpointers of a nested state dict: one waits for the write, the other only for a copy of the state."""

from __future__ import annotations

import os
import sys
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any, cast

from recckpt.checkpointer.process import CheckpointProcess, SaveFuture, log_done, sendable
from recckpt.checkpointer.reader import StateReader
from recckpt.checkpointer.staging import CheckpointStager, SharedMemoryStager, StagedState
from recckpt.checkpointer.writer import (
    Barrier,
    CheckpointWriter,
    RankInfo,
    StoreBarrier,
    WriterHook,
    describe,
    storage_at,
)
from recckpt.errors import ForkedError, StateMismatchError
from recckpt.parallel.one_process import OneProcess, OwnFuture
from recckpt.parallel.process_group import shared_store
from recckpt.parallel.ranks import rank_and_size
from recckpt.types import positive_number

BARRIER_TIMEOUT_SEC = 600.0
_made = count()  # equal on all ranks, because they make their checkpointers in the same order


class Checkpointer(OneProcess):
    """Saves and loads a nested state dict, in one file per rank: ``<path>/checkpoint_<rank>.pt``.

    Follows ``torch.distributed.checkpoint._experimental``. As a context manager it closes itself. Thread-safe: saves
    and loads from several threads run one after another. It belongs to the process that made it: a forked child must
    make another, or gets :class:`recckpt.errors.ForkedError`.
    """

    def __init__(self, reader: StateReader) -> None:
        super().__init__()
        self._reader = reader
        self._pending: list[SaveFuture] = []

    @abstractmethod
    def save(
        self, state_dict: dict[str, Any], path: str | os.PathLike[str], **kwargs: Any
    ) -> tuple[Future[None], Future[None]] | None:
        """Save a state, completely or not at all, and replace a state at the same path. Collective among several ranks.

        Args:
            state_dict: a dict of tensors, numbers, strings, bytes, None, and lists, tuples, sets and dicts of these.
            path: the directory of the checkpoint, or any fsspec URL.
            kwargs: passed to the stager and to the commit hook.

        Returns:
            None once all is written; or two futures: of the copy, after which the state may change, and of the write.

        Raises:
            TypeError, ValueError: the state or path cannot be saved.
            SaveFailedError: writing failed; the cause is chained.
        """

    def load(
        self,
        path: str | os.PathLike[str],
        state_dict: dict[str, Any] | None = None,
        *,
        default_map_location: Any = None,
        strict: bool = False,
    ) -> dict[str, Any]:
        """Wait for the running write, then load a state, without running any code from the file.

        Args:
            path: the directory or URL that was passed to ``save``.
            state_dict: what to fill: tensors are filled in place, other values replaced, None becomes the saved value;
                None for everything saved.
            default_map_location: device of tensors that are not filled in place, as for ``torch.load``.
            strict: raise if keys of ``state_dict`` are missing; otherwise they stay unchanged.

        Returns:
            ``state_dict``, or a new dict.

        Raises:
            FileNotFoundError: the file of this rank does not exist.
            StateMismatchError: keys are missing, or sizes, dtypes or types differ; nothing was changed.
            CorruptCheckpointError: the file is damaged; tensors of ``state_dict`` may have been filled already.
        """
        with self._turn():
            for outcome in self._pending:
                outcome.wait()
            begin = time.perf_counter()
            state, missing = self._reader.read(path, state_dict, map_location=default_map_location, strict=strict)
            if strict and missing:  # for a custom reader; recckpt's reader has raised before filling anything
                raise StateMismatchError(os.fspath(path), missing=missing, remedy="pass strict=False to keep them")
            log_done("loaded", os.fspath(path), begin)
            return state

    @abstractmethod
    def close(self) -> None:
        """Wait for the running save, raise its error if the caller has not seen the error, and free all resources."""


class SyncCheckpointer(Checkpointer):
    """Writes before :meth:`save` returns; see :class:`Checkpointer`.

    Args:
        writer: writes the file of this rank.
        reader: reads the file of this rank.
    """

    def __init__(self, writer: CheckpointWriter, reader: StateReader) -> None:
        super().__init__(reader)
        self._writer, self._is_closed = writer, False

    def save(self, state_dict: dict[str, Any], path: str | os.PathLike[str], **kwargs: Any) -> None:
        """Save a state and wait until it is written."""
        with self._turn():
            if self._is_closed:
                raise RuntimeError("the checkpointer is closed; make a new one")
            begin = time.perf_counter()
            self._writer.write(path, state_dict, **kwargs)
            log_done("saved", os.fspath(path), begin)

    def close(self) -> None:
        """Refuse further saves."""
        with self._turn():
            self._is_closed = True


class AsyncCheckpointer(Checkpointer):
    """Copies the state in :meth:`save` and writes it in a separate process; see :class:`Checkpointer`.

    A save waits for the previous one. Each error is raised once: by the future of the write if the caller reads it,
    else by the next :meth:`save` (which then saves nothing) or :meth:`close`. An error that nothing raised is printed
    when the interpreter ends. The interpreter waits for the running write. After an error the next save works.

    Args:
        checkpoint_stager: copies the state.
        checkpoint_process: writes the copy.
        reader: reads the files.
    """

    def __init__(
        self, checkpoint_stager: CheckpointStager, checkpoint_process: CheckpointProcess, reader: StateReader
    ) -> None:
        super().__init__(reader)
        self._stager, self._process = checkpoint_stager, checkpoint_process
        weakref.finalize(self, _print_unseen, self._pending)

    def save(
        self, state_dict: dict[str, Any], path: str | os.PathLike[str], **kwargs: Any
    ) -> tuple[Future[None], Future[None]]:
        """Save a state in the background; returns when it is copied, or, from CUDA, when the copies are enqueued."""
        with self._turn():
            self._raise_unseen()
            self._process.begin()
            try:
                url, sent = storage_at(path).url, sendable("the keyword arguments for the hook", kwargs)
                if url.startswith("memory:"):
                    problem = "the writer process gets a copy, so writes to its memory are lost; use a SyncCheckpointer"
                    raise ValueError(f"{url}: {problem}")
                staged = self._stager.stage(state_dict, **kwargs)
                outcome = self._process.write(staged, url, sent)
            except BaseException as error:
                self._process.refuse(describe(error))
                raise
            self._pending.append(outcome)
            copied: OwnFuture[None] = OwnFuture()  # done when the state is copied; without a value
            copied.set_running_or_notify_cancel()
            if isinstance(staged, Future):
                staged.add_done_callback(partial(_pass_on, copied))
            else:
                copied.set_result(None)
            return copied, outcome

    def close(self) -> None:
        """Close the stager, then the process, and raise the error of the last save if the caller has not seen it."""
        with self._turn():
            try:
                self._stager.close()
            finally:
                self._process.close()
            self._raise_unseen()

    def _raise_unseen(self) -> None:
        while self._pending:
            self._pending[-1].wait()  # after an interrupt here it is still pending
            self._pending.pop().raise_unseen()


def _pass_on(to: OwnFuture[None], copied: Future[StagedState]) -> None:
    if (error := copied.exception()) is None:
        to.set_result(None)
    else:
        to.set_exception(error)


def _print_unseen(pending: list[SaveFuture]) -> None:
    """Print the errors of saves whose checkpointer was garbage-collected, once they have ended."""

    def print_if_unseen(outcome: Future[None]) -> None:
        try:
            cast(SaveFuture, outcome).raise_unseen()
        except ForkedError:
            return  # the parent process prints it
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)

    for outcome in pending:
        outcome.add_done_callback(print_if_unseen)


def make_sync_checkpointer(
    *,
    rank_info: RankInfo | None = None,
    commit_hook: WriterHook | None = None,
    barrier_timeout_sec: float = BARRIER_TIMEOUT_SEC,
) -> SyncCheckpointer:
    """Return a checkpointer whose ``save`` returns when all is written.

    Args:
        rank_info: this rank; None for the rank in ``torch.distributed``, or a single rank without it.
        commit_hook: called before and after each commit.
        barrier_timeout_sec: how long a rank waits for the others, at each of three barriers, until all ranks raise.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: ``rank_info`` has several ranks that ``torch.distributed`` does not know, or
            ``barrier_timeout_sec`` is not a number above 0.
    """
    rank_info, barrier = _rank_and_barrier(rank_info, commit_hook, barrier_timeout_sec)
    writer = CheckpointWriter(rank_info, barrier=barrier, commit_hook=commit_hook)
    return SyncCheckpointer(writer, StateReader(rank_info))


def make_async_checkpointer(
    *,
    rank_info: RankInfo | None = None,
    commit_hook: WriterHook | None = None,
    barrier_timeout_sec: float = BARRIER_TIMEOUT_SEC,
    subprocess_init_fn: Callable[..., object] | None = None,
    subprocess_init_args: tuple[Any, ...] = (),
    start_timeout_sec: float = 60.0,
    close_timeout_sec: float = 60.0,
) -> AsyncCheckpointer:
    """Return a checkpointer whose ``save`` returns once the state is copied; a separate process writes the copy.

    Args:
        rank_info: as in :func:`make_sync_checkpointer`.
        commit_hook: called in the writer process before and after each commit; must be defined in a module.
        barrier_timeout_sec: as in :func:`make_sync_checkpointer`.
        subprocess_init_fn: called first in every writer process, to set up what the hook needs.
        subprocess_init_args: arguments for ``subprocess_init_fn``.
        start_timeout_sec: how long a writer process may take to start.
        close_timeout_sec: how long a writer process may take to end after the last write, before it is killed.

    Raises:
        TypeError: an argument has a wrong type, or ``subprocess_init_fn`` does not accept its arguments.
        ValueError: as in :func:`make_sync_checkpointer`, or an argument cannot be sent to the process.
    """
    rank_info, barrier = _rank_and_barrier(rank_info, commit_hook, barrier_timeout_sec)
    process = CheckpointProcess(
        rank_info,
        barrier=barrier,
        commit_hook=commit_hook,
        subprocess_init_fn=subprocess_init_fn,
        subprocess_init_args=subprocess_init_args,
        start_timeout_sec=start_timeout_sec,
        close_timeout_sec=close_timeout_sec,
    )
    return AsyncCheckpointer(SharedMemoryStager(), process, StateReader(rank_info))


def _rank_and_barrier(
    rank_info: RankInfo | None, commit_hook: WriterHook | None, timeout_sec: float
) -> tuple[RankInfo, Barrier]:
    if not isinstance(rank_info, RankInfo | None):
        raise TypeError(f"rank_info must be a RankInfo or None, found {rank_info!r}; such as RankInfo(0, 1)")
    if not isinstance(commit_hook, WriterHook | None):
        hint = ": pass an instance of it" if isinstance(commit_hook, type) else ""
        raise TypeError(f"commit_hook must be a WriterHook or None, found {commit_hook!r}{hint}")
    rank_info = rank_info or RankInfo(*rank_and_size())
    positive_number("barrier_timeout_sec", timeout_sec)
    if rank_info.global_world_size == 1:
        return rank_info, Barrier()
    if rank_info != RankInfo(*rank_and_size()):
        raise ValueError(
            f"torch.distributed, through which ranks agree, does not know this process as {rank_info}: call "
            "init_process_group on every rank, and omit rank_info"
        )
    store = shared_store(f"recckpt/checkpointer/{next(_made)}")
    return rank_info, StoreBarrier(store, rank_info.global_rank, rank_info.global_world_size, timeout_sec)
