"""Writes one rank's file and commits it together with the other ranks' files; has the writer process's main loop.

Imports no torch, except to pack a state.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import pickle
import signal
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import TYPE_CHECKING, Any, NamedTuple

from recckpt.dense.torch_archive import ArchiveContents, write_archive
from recckpt.errors import SaveFailedError
from recckpt.format import layout
from recckpt.parallel.roll_call import Attendance, moments
from recckpt.storage import SinkFile, Storage, open_storage

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_log = logging.getLogger(__name__)
_GOOD = b"good"
_LOOK_SEC = 0.2  # how often the writer process checks that its parent is alive
_GRACE_SEC = 5.0  # time for a hook to end after the parent is gone


@dataclass(frozen=True)
class RankInfo:
    """One rank among others.

    Attributes:
        global_rank: 0 to ``global_world_size`` - 1.
        global_world_size: number of ranks that save together.
    """

    global_rank: int
    global_world_size: int

    def __post_init__(self) -> None:
        rank, size = self.global_rank, self.global_world_size
        if not (type(rank) is int and type(size) is int and 0 <= rank < size):
            raise ValueError(f"global_rank must be 0 to global_world_size - 1, found rank {rank!r} of {size!r}")

    @property
    def file_name(self) -> str:
        """Name of the file of this rank."""
        return layout.of_rank("checkpoint", self.global_rank)


class WriterHook(ABC):
    """Called on each rank by its writer; with an :class:`AsyncCheckpointer`, in the writer process.

    Follows the hook of the same name in ``torch.distributed.checkpoint._experimental``, with one difference: there
    the file is in place before ``pre_commit``.
    """

    @abstractmethod
    def pre_commit(self, path: str, **kwargs: Any) -> None:
        """Called when this rank's bytes are durable but not yet visible. An error makes the save fail on all ranks.

        Args:
            path: the directory of the checkpoint: an absolute path or a URL.
            kwargs: the keyword arguments of ``save``.
        """

    @abstractmethod
    def post_commit(self, path: str, **kwargs: Any) -> None:
        """Called when the files of all ranks are in place. An error is raised on all ranks, but the files stay."""


class PartlyCommittedError(SaveFailedError):
    """A rank failed after all ranks had agreed to commit: when putting its file in place, or in ``post_commit``."""

    def __init__(self, ckpt_id: str, rank: int, cause: str) -> None:
        super().__init__(ckpt_id, rank, cause)
        self.args = (
            f"saving {ckpt_id!r}: rank {rank} failed while or after putting its file in place: {cause}; "
            "other ranks may already have new files: fix the cause and save again",
        )


class RankFailedError(Exception):
    """A rank failed or did not reach a barrier: ``rank`` is the first such rank, with its error as text."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank, self.reason = rank, reason


class Barrier:
    """Lets the ranks agree, several times per save. This base class serves a single rank."""

    def begin(self) -> None:
        """Begin a save. Every rank must begin every save, even if the previous save failed."""

    def agree(self, *, last: bool = False) -> None:
        """Wait until all ranks have arrived. Collective.

        Args:
            last: whether this is the last agreement of this save.

        Raises:
            RankFailedError: on all ranks, if a rank refused or did not arrive in time.
        """

    def refuse(self, reason: str) -> None:
        """Make the next agreement fail on all ranks, without waiting for them."""


class StoreBarrier(Barrier):
    """Agrees over a key-value store: the first rank to write an answer decides, and all ranks read it.

    A late rank reads the answer and fails like the others. Each save uses new keys, so that a failed save does not
    affect the next; a process group, in contrast, is unusable after a timeout. Not thread-safe.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_sec: float) -> None:
        self._store, self._rank, self._size, self._timeout_sec = store, rank, size, timeout_sec
        self._save = self._question = 0
        self._before: str | None = None

    def begin(self) -> None:
        self._save, self._question = self._save + 1, 0

    def agree(self, *, last: bool = False) -> None:
        """Wait for the others; then delete the keys of the previous agreement, whose answer all ranks have read."""
        place = self._next_place()
        ranks = self._ranks(place)
        try:
            ranks.come()
            answer = self._wait(place)
            if answer == _GOOD:
                if self._before is not None:
                    self._ranks(self._before).forget()
                    if self._rank == 0:
                        self._store.delete_key(f"{self._before}answer")
                self._before = place
                if last and not ranks.leave(self._timeout_sec):  # rank 0 leaves last, because it may host the store
                    _log.warning("save %d is committed, but not all ranks have confirmed it", self._save)
        except RuntimeError as error:  # the error type of torch's stores
            raise RankFailedError(self._rank, f"the ranks' shared store failed: {error}") from error
        if answer != _GOOD:
            raise RankFailedError(*json.loads(answer))

    def refuse(self, reason: str) -> None:
        try:
            self._decide(self._next_place(), self._rank, reason)
        except RuntimeError:  # the other ranks will time out; this rank raises its own error
            _log.exception("the failure of this rank could not be sent to the others: %s", reason)

    def _next_place(self) -> str:
        self._question += 1
        return f"{self._save}/{self._question}/"

    def _ranks(self, place: str) -> Attendance:
        return Attendance(self._store, self._rank, self._size, place)

    def _decide(self, place: str, rank: int, reason: str) -> bytes:
        return self._store.compare_set(f"{place}answer", "", json.dumps([rank, reason]))

    def _wait(self, place: str) -> bytes:
        """Return the answer: rank 0 writes it once all ranks have arrived; any rank writes it after its timeout."""
        answer, ranks = f"{place}answer", self._ranks(place)
        for _ in moments(self._timeout_sec):
            if self._store.check([answer]):
                return self._store.get(answer)
            if self._rank == 0 and ranks.all_here():
                return self._store.compare_set(answer, "", _GOOD.decode())
        late = ranks.missing() or [0]  # rank 0 has not answered
        names = ", ".join(map(str, late))
        return self._decide(place, late[0], f"rank {names} did not come to the barrier within {self._timeout_sec:g} s")


class CheckpointWriter:
    """Writes ``<path>/checkpoint_<rank>.pt``, completely or not at all.

    The order of a save: make bytes durable under another name, ``pre_commit``, all ranks agree, put the file in
    place, all ranks agree, ``post_commit``, all ranks agree.

    Args:
        rank_info: this rank.
        barrier: where the ranks agree; None for a single rank.
        commit_hook: called before and after the commit.
        proceed: called before every few megabytes; an error that it raises stops the save.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        *,
        barrier: Barrier | None = None,
        commit_hook: WriterHook | None = None,
        proceed: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank_info, self._barrier, self._hook = rank_info, barrier or Barrier(), commit_hook
        self._proceed = proceed

    def write(self, path: str | os.PathLike[str], state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """Save a state dict. Collective if there is a barrier.

        Args:
            path: the directory of the checkpoint, or its URL.
            state_dict: as for :meth:`Checkpointer.save`.
            kwargs: passed to the hook.

        Raises:
            TypeError, ValueError: ``state_dict`` contains something that could not be loaded back safely.
            SaveFailedError: writing failed, here or on another rank; the cause is chained.
        """
        from recckpt.checkpointer.staging import pack

        self._barrier.begin()
        try:
            storage = storage_at(path)
            pickled, pieces = pack(state_dict)
        except BaseException as error:
            self._barrier.refuse(describe(error))
            raise
        # Pieces on other devices are copied one at a time, during the write.
        self.put(storage, ArchiveContents(pickled, (piece.cpu().numpy().data for piece in pieces)), kwargs)

    def put(self, storage: Storage, contents: ArchiveContents, kwargs: Mapping[str, Any]) -> None:
        """Write ``contents`` in the current save. Raises the errors of :meth:`write`."""
        url = storage.url
        with self._raised_alike(url, SaveFailedError):
            draft = storage.draft(self._rank_info.file_name)
            try:
                write_archive(SinkFile(draft), contents, self._proceed)
                draft.seal()
                if self._hook is not None:
                    self._hook.pre_commit(url, **kwargs)
                self._barrier.agree()
            except BaseException:
                draft.discard()
                raise
        with self._raised_alike(url, PartlyCommittedError):
            with draft:
                pass
            self._barrier.agree()
            if self._hook is not None:
                self._hook.post_commit(url, **kwargs)
            self._barrier.agree(last=True)

    @contextmanager
    def _raised_alike(self, url: str, failed: Callable[[str, int, str], SaveFailedError]) -> Iterator[None]:
        """Send an error of this rank to the other ranks, and raise theirs here."""
        try:
            yield
        except RankFailedError as error:
            raise failed(url, error.rank, error.reason) from error.__cause__
        except BaseException as error:
            self._barrier.refuse(describe(error))
            if not isinstance(error, Exception):
                raise
            raise failed(url, self._rank_info.global_rank, describe(error)) from error


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def storage_at(path: str | os.PathLike[str]) -> Storage:
    """Return the storage of a checkpoint's directory. TypeError if it is not a path, ValueError for an invalid one."""
    if not isinstance(path, str | os.PathLike):
        hint = "; pass the state first and then the path" if isinstance(path, Mapping) else ""
        raise TypeError(f"path is a directory or URL, found a {type(path).__name__}{hint}")
    return open_storage(os.fspath(path))


class Setup(NamedTuple):
    rank_info: RankInfo
    commit_hook: WriterHook | None
    init_fn: Callable[..., object] | None
    init_args: tuple[Any, ...]


class Write(NamedTuple):
    """A request to write; a descriptor of shared memory follows if ``new_memory``."""

    url: str
    pickle: bytes
    spans: list[tuple[int, int]]
    n_memory_bytes: int
    new_memory: bool
    kwargs: bytes  # pickled separately, so that an unloadable value fails only its own save


class OrphanedError(BaseException):
    pass


def _failure(error: Exception) -> tuple[str, Any]:
    """Return a message for the parent with an error and its cause; as text if the error cannot be pickled."""
    trace = "".join(traceback.format_exception(error.__cause__ or error))
    sent: list[BaseException | None] = []
    for each in (error, error.__cause__):
        try:
            pickle.loads(pickle.dumps(each))
            sent.append(each)
        except Exception:
            sent.append(RuntimeError(f"{type(each).__qualname__}: {each}"))
    return "failed", (*sent, trace)


class _AskingBarrier(Barrier):
    """Forwards agreements to the parent process, which is connected to the other ranks and has begun the save."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def agree(self, *, last: bool = False) -> None:
        self._connection.send(("agree", last))
        failure: RankFailedError | None = self._connection.recv()
        if failure is not None:
            raise failure

    def refuse(self, reason: str) -> None:
        self._connection.send(("refuse", reason))


def main(fd: int, parent_pid: int) -> None:
    """Run the writer process: serve the parent over a socket until the parent closes it or dies."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the trainer, which may still save
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    orphaned = threading.Event()

    def watch() -> None:
        """End this process when the parent ends, even if a fork of the parent still has the socket."""
        while os.getppid() == parent_pid:
            time.sleep(_LOOK_SEC)
        orphaned.set()
        time.sleep(_GRACE_SEC)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError, OrphanedError):  # the parent is gone, or closed it
        _serve(Connection(fd), orphaned)


def _serve(connection: Connection, orphaned: threading.Event) -> None:
    def proceed() -> None:
        if orphaned.is_set():
            raise OrphanedError

    try:
        setup: Setup = pickle.loads(connection.recv_bytes())
        if setup.init_fn is not None:
            setup.init_fn(*setup.init_args)
    except Exception as error:
        connection.send(_failure(error))
        return
    barrier = _AskingBarrier(connection)
    writer = CheckpointWriter(setup.rank_info, barrier=barrier, commit_hook=setup.commit_hook, proceed=proceed)
    connection.send(("ready", None))
    shared, block = -1, memoryview(b"")  # the parent's memory, mapped until the parent uses another block
    while True:
        request: Write = connection.recv()
        if request.new_memory:
            if shared >= 0:
                os.close(shared)
            shared, block = recv_handle(connection), memoryview(b"")
        if len(block) != request.n_memory_bytes:
            block = memoryview(mmap.mmap(shared, request.n_memory_bytes, prot=mmap.PROT_READ))
        connection.send(("begun", None))
        try:
            pieces = [block[begin : begin + size] for begin, size in request.spans]
            writer.put(open_storage(request.url), ArchiveContents(request.pickle, pieces), pickle.loads(request.kwargs))
        except Exception as error:
            connection.send(_failure(error))
        else:
            connection.send(("done", None))
