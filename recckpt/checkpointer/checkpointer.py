"""Checkpointers of a nested state dict: one that waits until all is written, one that only waits for the copy."""

from __future__ import annotations

import os
import sys
import weakref
from abc import abstractmethod
from concurrent.futures import Future
from typing import Any, cast

from recckpt.checkpointer.barrier import describe
from recckpt.checkpointer.process import CheckpointProcess, SaveFuture, sendable, target_url
from recckpt.checkpointer.reader import StateReader
from recckpt.checkpointer.stager import CheckpointStager, StagedState
from recckpt.checkpointer.writer import CheckpointWriter
from recckpt.errors import ForkedError
from recckpt.parallel.one_process import OneProcess, OwnFuture


class Checkpointer(OneProcess):
    """Saves and loads a nested state dict, in one file a rank: ``<path>/checkpoint_<rank>.pt``.

    Follows ``torch.distributed.checkpoint._experimental``. As a context manager it closes itself. Thread-safe: saves
    and loads of several threads follow each other. It belongs to the process that made it: a forked child makes its
    own, or gets :class:`recckpt.errors.ForkedError`.
    """

    def __init__(self, reader: StateReader) -> None:
        super().__init__()
        self._reader = reader
        self._pending: list[SaveFuture] = []

    @abstractmethod
    def save(
        self, state_dict: dict[str, Any], path: str | os.PathLike[str], **kwargs: Any
    ) -> tuple[Future[None], Future[None]] | None:
        """Save a state, over an older one of the same path, whole or not at all. Collective among several ranks.

        Args:
            state_dict: a dict of tensors, numbers, strings, bytes, None, and lists, tuples, sets and dicts of these.
            path: the directory of the checkpoint, or any fsspec URL.
            kwargs: passed to the stager and to the commit hook.

        Returns:
            None when all is written, or two futures: of the copy, after which the state may change, and of the write.

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
        """Load a state, after the write in flight, without running any code from the file.

        Args:
            path: where it was saved.
            state_dict: what to fill: its tensors in place, its other values replaced, and what is None taken whole;
                None for all that is saved.
            default_map_location: where tensors go that are not filled in place; as ``torch.load`` takes it.
            strict: raise where keys of ``state_dict`` are missing; they stay as they are otherwise.

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
            return self._reader.read(path, state_dict, map_location=default_map_location, strict=strict)[0]

    @abstractmethod
    def close(self) -> None:
        """Wait for what is in flight, raise its error if it was not seen yet, and free everything."""


class SyncCheckpointer(Checkpointer):
    """Writes before :meth:`save` returns; see :class:`Checkpointer`.

    Args:
        writer: writes the file of this rank.
        reader: reads it.
    """

    def __init__(self, writer: CheckpointWriter, reader: StateReader) -> None:
        super().__init__(reader)
        self._writer, self._is_closed = writer, False

    def save(self, state_dict: dict[str, Any], path: str | os.PathLike[str], **kwargs: Any) -> None:
        """Save a state and wait until it is written."""
        with self._turn():
            if self._is_closed:
                raise RuntimeError("the checkpointer is closed; make a new one")
            self._writer.write(path, state_dict, **kwargs)

    def close(self) -> None:
        """Take no further saves."""
        with self._turn():
            self._is_closed = True


class AsyncCheckpointer(Checkpointer):
    """Copies the state in :meth:`save` and writes it in a process of its own; see :class:`Checkpointer`.

    A save waits for the one before. Each error is raised once: by the future of the write to whoever asks it, else
    by the next :meth:`save` (which then saves nothing) or :meth:`close`, else it is printed when the interpreter
    ends, which waits for the write in flight. After an error the next save works.

    Args:
        checkpoint_stager: copies the state.
        checkpoint_process: writes the copy.
        reader: reads files.
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
                url, sent = target_url(path), sendable("what is passed to the hook", kwargs)
                staged = self._stager.stage(state_dict, **kwargs)
                outcome = self._process.write(staged, url, sent)
            except BaseException as error:
                self._process.refuse(describe(error))
                raise
            self._pending.append(outcome)
            return _without_value(staged), outcome

    def close(self) -> None:
        """Close the stager, then the process, and raise the error of the last save if it was not seen yet."""
        with self._turn():
            try:
                self._stager.close()
            finally:
                self._process.close()
            self._raise_unseen()

    def _raise_unseen(self) -> None:
        while self._pending:
            for outcome in self._pending:
                outcome.wait()  # an interrupt here leaves it pending
            self._pending.pop().raise_unseen()


def _without_value(staged: StagedState | Future[StagedState]) -> Future[None]:
    """Return a future that is done when the copy is."""
    masked: OwnFuture[None] = OwnFuture()
    masked.set_running_or_notify_cancel()
    if not isinstance(staged, Future):
        masked.set_result(None)
        return masked

    def pass_on(copied: Future[StagedState]) -> None:
        error = copied.exception()
        if error is None:
            masked.set_result(None)
        else:
            masked.set_exception(error)

    staged.add_done_callback(pass_on)
    return masked


def _print_unseen(pending: list[SaveFuture]) -> None:
    """Print the error of a save whose checkpointer is gone; where it still runs, when it ends."""
    for outcome in pending:
        outcome.add_done_callback(_print_if_unseen)


def _print_if_unseen(outcome: Future[None]) -> None:
    try:
        cast(SaveFuture, outcome).raise_unseen()
    except ForkedError:
        return  # it is the parent's to print
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
