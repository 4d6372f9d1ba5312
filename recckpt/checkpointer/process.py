"""Controls the writer process from its parent: starts it, and restarts it after it has died."""

from __future__ import annotations

import inspect
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import TYPE_CHECKING, Any

from recckpt.checkpointer.writer import (
    Barrier,
    PartlyCommittedError,
    RankFailedError,
    RankInfo,
    Setup,
    Write,
    WriterHook,
    describe,
)
from recckpt.errors import SaveFailedError
from recckpt.format import layout
from recckpt.parallel.one_process import OwnFuture
from recckpt.parallel.threads import InOrder
from recckpt.storage import open_storage
from recckpt.text import escaped
from recckpt.types import positive_number

if TYPE_CHECKING:
    from recckpt.checkpointer.staging import Arena, StagedState

_log = logging.getLogger(__name__)
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from recckpt.checkpointer.writer import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)
_REAP_SEC = 10.0


class DiedError(Exception):
    pass


class SaveFuture(OwnFuture[None]):
    """A future; ``seen`` is whether its error was retrieved by :meth:`result` or :meth:`exception`."""

    seen = False

    def result(self, timeout: float | None = None) -> None:
        """Wait; raise the error if there is one, as :class:`concurrent.futures.Future` does."""
        try:
            super().result(timeout)
        except BaseException as error:
            self.seen = self.seen or (self.done() and error is super().exception())
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait; return the error if there is one, as :class:`concurrent.futures.Future` does."""
        error = super().exception(timeout)
        self.seen = True
        return error

    def raise_unseen(self) -> None:
        """Wait, and raise an error that nobody has seen yet."""
        error = super().exception()
        if error is not None and not self.seen:
            raise error


class RemoteTracebackError(Exception):
    """The writer process's traceback, as the cause of an error from there."""


class CheckpointProcess:
    """Writes staged state in a separate process, so that the write does not use training's memory or interpreter lock.

    The process is spawned immediately, so that it is ready before the first save. If it dies, its write fails, and
    another process is spawned. Not thread-safe.

    Args:
        rank_info: this rank.
        barrier: the barrier where the ranks agree; a thread of this process waits at it.
        commit_hook: called in the writer process; pickled, so it must be defined in a module.
        subprocess_init_fn: called first in every writer process, to set up what the hook needs; pickled as well.
        subprocess_init_args: arguments for ``subprocess_init_fn``.
        start_timeout_sec: how long a writer process may take to start.
        close_timeout_sec: how long a writer process may take to end after the last write, before it is killed.

    Raises:
        TypeError: ``subprocess_init_fn`` is not a function, or does not accept its arguments.
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
        self._rank_info, self._barrier = rank_info, barrier or Barrier()
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
        """Process id of the writer process; None if no process runs."""
        return self._children[0].pid if self._children else None

    def begin(self) -> None:
        """Begin a save. Every rank must begin every save.

        Raises:
            RuntimeError: the process is closed.
        """
        if not self._end.alive:
            raise RuntimeError("the checkpointer is closed; make a new one")
        self._barrier.begin()

    def refuse(self, reason: str) -> None:
        """Report to the other ranks that this rank writes nothing in the current save."""
        self._barrier.refuse(reason)

    def write(self, staged: StagedState | Future[StagedState], url: str, kwargs: bytes) -> SaveFuture:
        """Write the staged state in the background, as part of the current save; ``kwargs`` is pickled."""

        def work() -> None:
            begin = time.perf_counter()
            self._write(staged, url, kwargs)
            log_done("saved", url, begin)

        outcome = SaveFuture()
        outcome.set_running_or_notify_cancel()  # a running write cannot be cancelled
        self._writes.submit(partial(outcome.run, work))
        return outcome

    def close(self) -> None:
        """Wait for the running write, then end the process."""
        self._writes.finish()
        self._end()

    def _write(self, staged: StagedState | Future[StagedState], url: str, kwargs: bytes) -> None:
        """Have the process write, and wait for the other ranks whenever the process asks for an agreement."""
        failed: Callable[[str, int, str], SaveFailedError] = SaveFailedError
        try:
            child = self._begun(staged.result() if isinstance(staged, Future) else staged, url, kwargs)
            while (message := child.receive())[0] != "done":
                kind, value = message
                if kind == "failed":
                    raise rebuilt(*value)
                if kind == "refuse":
                    self._barrier.refuse(value)
                    continue
                try:
                    self._barrier.agree(last=value)
                except RankFailedError as failure:
                    child.send(failure)
                else:
                    failed = PartlyCommittedError
                    child.send(None)
        except SaveFailedError:
            raise  # an error of the writer process, which has sent it to the other ranks
        except BaseException as error:
            self._barrier.refuse(describe(error))
            if isinstance(error, DiedError):
                # Start another process at once, for the next save, and remove the half-written file of the dead one.
                with suppress(OSError):
                    self._respawn()
                storage = open_storage(url)
                with suppress(OSError):
                    for name in storage.list_files(""):
                        if layout.is_draft(name, self._rank_info.file_name):
                            storage.remove(name)
            raise failed(url, self._rank_info.global_rank, describe(error)) from error

    def _begun(self, staged: StagedState, url: str, kwargs: bytes) -> Child:
        """Return a writer process that has begun the write; replaces a process that died while idle."""
        for is_last in (False, True):
            if not (self._children and self._children[0].is_running()):
                self._respawn()
            child = self._children[0]
            try:
                child.wait_ready(self._start_timeout_sec)
                child.request(url, staged.pickle, staged.spans, staged.arena, kwargs)
                return child
            except DiedError as error:
                if is_last:
                    raise
                _log.warning("%s before it began to write; starting another", error)
            except Exception:  # the process hangs, or its initialisation failed
                _end_all(self._children, 0)
                raise
        raise AssertionError("unreachable")

    def _respawn(self) -> None:
        _end_all(self._children, 0)
        self._children.append(Child(self._setup))


class Child:
    """A writer process: spawned, not forked; shares only a socket and the module path with its parent.

    The process ignores the terminal's signals, and ends with the parent. ``setup`` is a pickled ``Setup``.
    """

    def __init__(self, setup: bytes) -> None:
        ours, theirs = socket.socketpair()
        self._ready = False
        self._arena: Arena | None = None
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        with ours, theirs:
            command = [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(os.getpid()), path]
            # Block signals until the child ignores them, so that an early interrupt does not end it: the child inherits
            # the blocked set.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._connection = Connection(ours.detach())
        with suppress(OSError):  # the child has died already, which the first request will find
            self._connection.send_bytes(setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, timeout_sec: float) -> None:
        """Wait until the process accepts requests. DiedError, TimeoutError, or the error of its initialisation."""
        if self._ready:
            return
        if not self._connection.poll(timeout_sec):
            raise TimeoutError(f"writer process {self.pid} was not ready within {timeout_sec:g} s")
        kind, value = self.receive()
        if kind == "failed":
            raise rebuilt(*value)
        self._ready = True

    def request(self, url: str, pickled: bytes, spans: list[tuple[int, int]], arena: Arena, kwargs: bytes) -> None:
        """Send a request to write, and wait until the process begins; DiedError if it ended before that."""
        new_memory = self._arena is not arena
        self.send(Write(url, pickled, spans, arena.n_bytes, new_memory, kwargs))
        if new_memory:
            try:
                send_handle(self._connection, arena.fd, self.pid)
            except OSError as error:
                raise self._died() from error
            self._arena = arena
        self.receive()

    def send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise self._died() from error

    def receive(self) -> tuple[str, Any]:
        try:
            message: tuple[str, Any] = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        return message

    def end(self, timeout_sec: float) -> None:
        """Ask the process to end, and kill it after the timeout."""
        self._connection.close()
        self._reap(timeout_sec)

    def _died(self) -> DiedError:
        self._reap(_REAP_SEC)
        code = self._process.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return DiedError(f"writer process {self.pid} {how}")

    def _reap(self, timeout_sec: float) -> None:
        try:
            self._process.wait(timeout_sec)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _end_all(children: list[Child], timeout_sec: float) -> None:
    while children:
        children.pop().end(timeout_sec)


def _check_init(fn: Callable[..., object] | None, args: tuple[Any, ...]) -> None:
    """Raise TypeError if the writer process could not call the function with its arguments."""
    if not (fn is None or callable(fn)):
        raise TypeError(f"subprocess_init_fn must be a function or None, found {fn!r}")
    if not isinstance(args, tuple):
        raise TypeError(f"subprocess_init_args must be a tuple, found {args!r}; for one argument, pass (argument,)")
    if fn is None and args:
        raise TypeError(f"subprocess_init_args={args!r} need a subprocess_init_fn, found None")
    if fn is not None:
        try:
            inspect.signature(fn).bind(*args)
        except TypeError as error:
            raise TypeError(f"subprocess_init_fn does not take subprocess_init_args={args!r}: {error}") from None
        except ValueError:  # a function in C without a signature
            return


def sendable(what: str, value: object) -> bytes:
    """Return a value pickled for the writer process; ValueError if it cannot be loaded there."""
    try:
        data = pickle.dumps(value, protocol=2)
    except Exception as error:
        raise ValueError(f"{what} cannot be sent to the writer process ({describe(error)})") from error
    if b"c__main__\n" in data:
        raise ValueError(f"{what} is defined in the script that runs; move it to a module for the writer process")
    return data


def log_done(what: str, path: str, begin: float) -> None:
    _log.info("%s %s in %.2f s", what, escaped(path), time.perf_counter() - begin)


def rebuilt(error: Exception, cause: BaseException | None, trace: str) -> Exception:
    """Return an error of the writer process, from the message that :func:`_failure` made."""
    remote = RemoteTracebackError(f"in the writer process:\n\n{trace}")
    error.__cause__ = cause or remote
    if cause is not None:
        cause.__cause__ = remote
    return error
