"""Python that has imported torch and recckpt already: processes forked from one interpreter, which starts once.

An interpreter that imports them takes four seconds of processor, a fork of one a few milliseconds. Environment
variables that libraries read when they are imported are those of ``_AS_IT_STARTS``.
"""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from support.paths import PYTHONPATH, SUPPORT

_AS_IT_STARTS = {
    "PYTHONPATH": PYTHONPATH,
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}


class WarmProcess:
    """A process that runs ``command``, the arguments of Python: a script, or -m and a module.

    It ends as other interpreters do, at the latest with the process that started it.

    Args:
        command: what follows ``python``.
        cwd: where it runs; here, if it is None.
        env: environment variables beside those of this process.
        files: its stdin, stdout and stderr; those of this process, if it is None.
    """

    def __init__(self, *command, cwd=None, env=None, files=None):
        order = {
            "command": [str(part) for part in command],
            "cwd": str(cwd or Path.cwd()),
            "env": {**os.environ, **_AS_IT_STARTS, **(env or {})},
        }
        self._said, said = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with said:
            descriptors = [file if isinstance(file, int) else file.fileno() for file in files or (0, 1, 2)]
            socket.send_fds(_server(), [json.dumps(order).encode()], [*descriptors, said.fileno()])
        self.pid = int(self._said.recv(100))
        self.returncode = None

    def wait(self, timeout=None):
        """Return the exit code, negative for a signal."""
        if self.returncode is None:
            self._said.settimeout(timeout)
            try:
                self.returncode = int(self._said.recv(100))
            except TimeoutError as error:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout) from error
            self._said.close()
        return self.returncode

    def send_signal(self, number):
        """Send it a signal, where it has not ended."""
        if self.returncode is None:
            try:
                self._said.send(bytes([number]))
            except BrokenPipeError:  # it has
                self.wait()

    def terminate(self):
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)


class Piped(WarmProcess):
    """A process whose ``stdin`` and ``stdout`` are pipes of text."""

    def __init__(self, *command, **options):
        theirs, stdin = os.pipe()
        stdout, theirs_too = os.pipe()
        super().__init__(*command, files=(theirs, theirs_too, 2), **options)
        os.close(theirs)
        os.close(theirs_too)
        self.stdin, self.stdout = os.fdopen(stdin, "w"), os.fdopen(stdout)


def run(*command, cwd=None, env=None):
    """Run it to its end, and return its exit code, and as text what it said."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = WarmProcess(*command, cwd=cwd, env=env, files=(0, out, err))
        process.wait()
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, out.read(), err.read())


@functools.cache
def _server():
    """Start the interpreter, which takes orders once it is warm, and ends when this process and its forks have."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, str(SUPPORT / "warm_server.py")]
        subprocess.Popen(command, stdin=theirs, env={**os.environ, **_AS_IT_STARTS})
    return ours


def start():
    """Start the interpreter now; it is started at the first process otherwise."""
    _server()
