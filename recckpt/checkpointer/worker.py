"""The writer process: writes what it finds in shared memory (no torch, nor anything else of the trainer's)."""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, NamedTuple

from recckpt.checkpointer.barrier import Barrier, RankFailedError
from recckpt.checkpointer.writer import CheckpointWriter, RankInfo, WriterHook
from recckpt.dense.torch_archive import ArchiveContents
from recckpt.storage import open_storage

_LOOK_SEC = 0.2  # how often the process looks whether its parent is alive
_GRACE_SEC = 5.0  # for a hook that does not end by itself once it is gone


class Setup(NamedTuple):
    """The first message to a writer process."""

    rank_info: RankInfo
    commit_hook: WriterHook | None
    init_fn: Callable[..., object] | None
    init_args: tuple[Any, ...]


class Write(NamedTuple):
    """A request to write. A descriptor of shared memory follows where there is a new one."""

    url: str
    pickle: bytes
    spans: list[tuple[int, int]]
    n_memory_bytes: int
    new_memory: bool
    kwargs: bytes  # pickled apart: what cannot be loaded here fails its own save and no other


class RemoteTracebackError(Exception):
    """Where in the writer process an error came from; the cause of that error."""

    def __str__(self) -> str:
        return f"in the writer process:\n\n{self.args[0]}"


class OrphanedError(BaseException):
    """The process that asked for the save is gone."""


def main(fd: int, parent_pid: int) -> None:
    """Serve the parent over a socket until it closes it or dies."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the trainer, which may still want to save
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    orphaned = threading.Event()
    threading.Thread(target=_watch, args=(parent_pid, orphaned), daemon=True).start()
    connection = Connection(fd)
    with suppress(
        EOFError, BrokenPipeError, ConnectionResetError, OrphanedError
    ):  # the parent is gone, or wants no more
        _serve(connection, orphaned)


def _watch(parent_pid: int, orphaned: threading.Event) -> None:
    """End with the parent, even if a fork of it still holds its end of the socket."""
    while os.getppid() == parent_pid:
        time.sleep(_LOOK_SEC)
    orphaned.set()
    time.sleep(_GRACE_SEC)
    os._exit(1)


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
    memory = _Memory(connection)
    connection.send(("ready", None))
    while True:
        request: Write = connection.recv()
        block = memory.get(request)
        connection.send(("begun", None))
        try:
            pieces = [block[begin : begin + size] for begin, size in request.spans]
            writer.put(open_storage(request.url), ArchiveContents(request.pickle, pieces), pickle.loads(request.kwargs))
        except Exception as error:
            connection.send(_failure(error))
        else:
            connection.send(("done", None))


class _Memory:
    """The shared memory of the parent, mapped for as long as it stays the same."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._fd = connection, -1
        self._block = memoryview(b"")

    def get(self, request: Write) -> memoryview:
        if request.new_memory:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._block = recv_handle(self._connection), memoryview(b"")
        if len(self._block) != request.n_memory_bytes:
            self._block = memoryview(mmap.mmap(self._fd, request.n_memory_bytes, prot=mmap.PROT_READ))
        return self._block


def _failure(error: Exception) -> tuple[str, Any]:
    """Return the message that brings an error with its cause to the parent, as text where it does not pickle."""
    cause = error.__cause__
    trace = "".join(traceback.format_exception(cause or error))
    sendable = []
    for each in (error, cause):
        try:
            pickle.loads(pickle.dumps(each))
            sendable.append(each)
        except Exception:
            sendable.append(RuntimeError(f"{type(each).__qualname__}: {each}"))
    return "failed", (*sendable, trace)


class _AskingBarrier(Barrier):
    """Asks the parent to wait for the other ranks, which it knows how to reach."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def begin(self) -> None:
        """Do nothing: the parent has begun the save."""

    def agree(self, *, last: bool = False) -> None:
        self._connection.send(("agree", last))
        failure: RankFailedError | None = self._connection.recv()
        if failure is not None:
            raise failure

    def refuse(self, reason: str) -> None:
        self._connection.send(("refuse", reason))
