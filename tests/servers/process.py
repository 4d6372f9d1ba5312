"""Servers that tests start: on 127.0.0.1 only, ended by their process id, and with the process that started them."""

import ctypes
import re
import signal
import subprocess
import threading
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def _die_with_parent():
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class ServerProcess:
    """A running server; ready as soon as a line of its output matches.

    Attributes:
        said: the match.
    """

    def __init__(self, command, ready, *, env=None, cwd=None):
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            cwd=cwd,
            preexec_fn=_die_with_parent,
        )
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            self.said = re.search(ready, line)
            if self.said:
                threading.Thread(target=self._listen, daemon=True).start()
                return
        self.stop()
        raise RuntimeError(f"{Path(command[0]).name} did not start:\n{''.join(lines)}")

    def stop(self):
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _listen(self):
        """Take what it says, or it would stop when the pipe is full; its own children may speak for longer."""
        with self.process.stdout as output:
            for _ in output:
                pass
