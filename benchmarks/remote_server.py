"""An S3 server behind a slow line, in a process of its own: moto's, and the proxy of the tests in front of it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).absolute().parents[1] / "tests"
_ALWAYS = 1 << 40


class SlowServer:
    """A running server; a context manager, which ends it.

    Args:
        latency_ms: what each request takes longer.
        mb_per_s: of each connection; 0 for no limit.
    """

    def __init__(self, latency_ms: int, mb_per_s: int) -> None:
        command = [sys.executable, __file__, str(latency_ms), str(mb_per_s)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = self._read()

    def __enter__(self) -> SlowServer:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def requests(self) -> int:
        """Return how many requests there were since the last call."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


def serve(latency_ms: int, mb_per_s: int) -> None:
    """Serve until the standard input ends; each line of it is answered with the number of requests."""
    sys.path.insert(0, str(TESTS))
    from faults.http_proxy import Proxy  # type: ignore[import-not-found]  # by the path above, unknown to mypy
    from servers.process import ServerProcess  # type: ignore[import-not-found]  # likewise

    def pass_on_slowly(exchange: Any) -> bool:
        time.sleep(latency_ms / 1e3)
        answer = exchange.ask()
        if mb_per_s:
            time.sleep((len(exchange.request.body) + len(answer.body)) / 1e6 / mb_per_s)
        exchange.answer(answer)
        return True

    server = ServerProcess([sys.executable, TESTS / "servers" / "moto_s3.py"], r"on port (\d+)")
    proxy = Proxy(int(server.said[1]))
    print(proxy.port, flush=True)
    proxy.arm(pass_on_slowly, times=_ALWAYS)
    for _ in sys.stdin:
        print(proxy.n_requests, flush=True)
        proxy.arm(pass_on_slowly, times=_ALWAYS)
    proxy.stop()
    server.stop()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
