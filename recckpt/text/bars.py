"""Progress bars for saves, loads and commands of more than two seconds, on a terminal or in a notebook.

A bar never makes its operation fail: if it cannot be drawn, it is dropped.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from recckpt.text.words import count, size

log = logging.getLogger("recckpt")

DELAY_SEC = 2.0  # shorter operations show no bar
SWITCH = "RECCKPT_PROGRESS"  # 0: no bars; 1: bars even if stderr is not a terminal
OFF = "TQDM_DISABLE"  # any text: no bars; tqdm itself checks this only on import

_open: set[int] = set()  # active bars
_clocks: set[int] = set()  # active elapsed-time displays


class Progress:
    """Counts the bytes of one save or load; a context manager that logs a line at the end. Thread-safe."""

    def __init__(self, what: str, total_bytes: int, *, has_bar: bool = True) -> None:
        self._what, self._total_bytes, self._has_bar = what, total_bytes, has_bar
        self.n_bytes = self.n_rows = 0
        self._lock = threading.Lock()
        self._begin = time.perf_counter()
        self._bar: _Bar | None = None

    def advance(self, n_bytes: int) -> None:
        with self._lock:
            self.n_bytes += n_bytes
            if self._bar is not None:
                self._bar.call("update", n_bytes)

    def add_rows(self, n_rows: int) -> None:
        with self._lock:
            self.n_rows += n_rows

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._begin

    def __enter__(self) -> Progress:
        if self._has_bar and are_shown():
            line = 0 if _clocks and not _open else None  # replaces the elapsed time: a line below needs a real terminal
            _open.add(id(self))
            self._bar = _Bar(desc=self._what, total=self._total_bytes, unit="B", unit_scale=True, position=line)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        _open.discard(id(self))
        if self._bar is not None:
            self._bar.call("close")
        if kind is None:
            seconds = self.seconds
            rate = size(round(self.n_bytes / max(seconds, 1e-9)))
            log.info(
                "%s: %s rows, %s in %.2f s (%s/s)", self._what, count(self.n_rows), size(self.n_bytes), seconds, rate
            )


class ElapsedTime:
    """Shows how long an operation has taken, while no Progress shows a bar; a context manager."""

    def __init__(self, what: str) -> None:
        self._what, self._begin, self._at_work = what, time.perf_counter(), threading.Lock()
        self._at_work.acquire()  # not an Event, whose lock may leak at an interrupt
        self._thread = threading.Thread(target=self._run, name="recckpt-clock", daemon=True) if are_shown() else None

    def __enter__(self) -> ElapsedTime:
        if self._thread is not None:
            _clocks.add(id(self))
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._at_work.release()
        if self._thread is not None:
            self._thread.join()
            _clocks.discard(id(self))

    def _run(self) -> None:
        bar: _Bar | None = None
        pause_sec = DELAY_SEC
        while not self._at_work.acquire(timeout=pause_sec):
            pause_sec = 1.0
            if not _open:
                bar = bar or _Bar(bar_format="{desc}", delay=0, position=0)
                bar.call("set_description_str", f"{self._what}: {time.perf_counter() - self._begin:.0f} s")
            elif bar is not None:
                bar.call("close")
                bar = None
        if bar is not None:
            bar.call("close")


class _Bar:
    """A tqdm bar, dropped at its first error: stderr is closed, or the terminal or kernel is gone."""

    def __init__(self, **options: Any) -> None:
        self._bar: Any = None
        try:
            from recckpt.text.drawn_bar import NotebookBar, TerminalBar  # slow import

            kind = NotebookBar if _is_notebook() else TerminalBar
            self._bar = kind(leave=False, dynamic_ncols=True, **{"delay": DELAY_SEC, **options})
        except Exception as error:
            log.debug("no bar can be drawn: %s", error)

    def call(self, method: str, *args: object) -> None:
        if self._bar is None:
            return
        try:
            getattr(self._bar, method)(*args)
        except Exception as error:
            self._bar.disable = True  # so that garbage collection prints nothing
            self._bar = None
            log.debug("the bar is dropped: %s", error)


def are_shown() -> bool:
    """Return whether to draw bars: by TQDM_DISABLE and RECCKPT_PROGRESS, else on a terminal or in a notebook."""
    setting = "0" if os.environ.get(OFF) else os.environ.get(SWITCH, "").strip()
    if setting in ("0", "1"):
        return setting == "1"
    return _is_notebook() or is_terminal(sys.stderr)


def is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError, OSError):
        return False


@contextmanager
def aside() -> Iterator[None]:
    """Clear the bars while the block writes to stderr."""
    library = sys.modules.get("tqdm")
    if library is None or not are_shown():
        yield
        return
    with library.tqdm.external_write_mode(file=sys.stderr):
        yield


def _is_notebook() -> bool:
    """Return whether this process is a notebook kernel, which has already imported IPython."""
    try:
        shell = sys.modules["IPython"].get_ipython()
        return "IPKernelApp" in shell.config
    except (KeyError, AttributeError):
        return False
