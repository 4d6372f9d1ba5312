"""What people see of a long save or load: a bar on a terminal, one log line otherwise."""

from __future__ import annotations

import logging
import sys
import threading
import time

from tqdm import tqdm

log = logging.getLogger("recckpt")


class Progress:
    """Counts bytes of one save or load; a context manager that ends with a log line. Thread-safe."""

    def __init__(self, what: str, total_bytes: int) -> None:
        self._what, self.n_bytes, self.n_rows = what, 0, 0
        self._lock = threading.Lock()
        self._begin = time.perf_counter()
        self._bar = tqdm(
            total=total_bytes,
            desc=what,
            unit="B",
            unit_scale=True,
            leave=False,
            disable=not sys.stderr.isatty(),
        )

    def advance(self, n_bytes: int) -> None:
        """Count ``n_bytes`` more."""
        with self._lock:
            self.n_bytes += n_bytes
            self._bar.update(n_bytes)

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._begin

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._bar.close()
        if kind is None:
            seconds = self.seconds
            log.info(
                "%s: %s rows, %.1f MB in %.2f s (%.2f GB/s)",
                self._what,
                f"{self.n_rows:,}",
                self.n_bytes / 1e6,
                seconds,
                self.n_bytes / 1e9 / max(seconds, 1e-9),
            )
