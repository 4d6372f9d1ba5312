"""One writer process, as its parent holds it, and the memory that they share (no torch here)."""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

from recckpt.checkpointer.worker import RemoteTracebackError, Write

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from recckpt.checkpointer.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)
_REAP_SEC = 10.0


class DiedError(Exception):
    """The writer process ended while it was needed."""


class Arena:
    """One block of shared memory, which grows and is kept between saves.

    Not in ``/dev/shm``, whose size is small in many containers and whose files outlive a killed process. The other
    process gets the descriptor ``fd``.
    """

    def __init__(self) -> None:
        self.fd, self.n_bytes = _anonymous_file(), 0
        self.memory: mmap.mmap | None = None

    def reserve(self, n_bytes: int) -> None:
        """Map the block anew where it is smaller than ``n_bytes``; memory itself is taken as it is written to."""
        if n_bytes <= self.n_bytes:
            return
        os.ftruncate(self.fd, n_bytes)
        self.memory, self.n_bytes = mmap.mmap(self.fd, n_bytes), n_bytes

    def __del__(self) -> None:
        os.close(self.fd)


class Child:
    """A writer process: spawned, not forked, with nothing of its parent but one socket and the module path.

    It does not get the signals of the parent's terminal, and ends with the parent. ``setup`` is a pickled ``Setup``.
    """

    def __init__(self, setup: bytes) -> None:
        ours, theirs = socket.socketpair()
        self._ready = False
        self._arena: Arena | None = None
        with ours, theirs:
            self._process = _spawn(theirs.fileno())
            self._connection = Connection(ours.detach())
        with suppress(OSError):  # it has died already: the first request will find that
            self._connection.send_bytes(setup)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def is_running(self) -> bool:
        """Say whether the process is alive."""
        return self._process.poll() is None

    def wait_ready(self, timeout_sec: float) -> None:
        """Wait until the process can take a request.

        Raises:
            DiedError: it has ended.
            TimeoutError: it takes too long.
            Exception: its initialisation failed, with this.
        """
        if self._ready:
            return
        if not self._connection.poll(timeout_sec):
            raise TimeoutError(f"writer process {self.pid} was not ready within {timeout_sec:g} s")
        kind, value = self.receive()
        if kind == "failed":
            raise rebuilt(value)
        self._ready = True

    def request(self, url: str, pickled: bytes, spans: list[tuple[int, int]], arena: Arena, kwargs: bytes) -> None:
        """Send a request to write, and wait until the process has begun with it.

        Raises:
            DiedError: it ended before that.
        """
        new_memory = self._arena is not arena
        try:
            self._connection.send(Write(url, pickled, spans, arena.n_bytes, new_memory, kwargs))
            if new_memory:
                send_handle(self._connection, arena.fd, self.pid)
                self._arena = arena
        except OSError as error:
            raise self._died() from error
        self.receive()

    def answer(self, value: object) -> None:
        """Send an answer."""
        try:
            self._connection.send(value)
        except OSError as error:
            raise self._died() from error

    def receive(self) -> tuple[str, Any]:
        """Return the next message, (kind, value)."""
        try:
            message: tuple[str, Any] = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        return message

    def end(self, timeout_sec: float) -> None:
        """Let the process end, and kill it if it does not."""
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


def rebuilt(failure: tuple[Exception, BaseException | None, str]) -> Exception:
    """Return an error of the writer process, with its cause and where it came from."""
    error, cause, trace = failure
    remote = RemoteTracebackError(trace)
    error.__cause__ = cause or remote
    if cause is not None:
        cause.__cause__ = remote
    return error


def _spawn(fd: int) -> subprocess.Popen[bytes]:
    path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
    command = [sys.executable, "-c", _PROGRAM, str(fd), str(os.getpid()), path]
    # An interrupt that comes before the child can say that it ignores it must not end it: signals that are blocked
    # here are blocked there.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(fd,), start_new_session=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("recckpt-staging", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
