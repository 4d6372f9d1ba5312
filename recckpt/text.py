"""Text for people: aligned columns, sizes, names that cannot break a line, and the bar of a long save or load."""

from __future__ import annotations

import difflib
import json
import logging
import sys
import threading
import time
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from typing import Any

_MAX_VALUES = 4  # of a vector in a line of text; --json has all
_GAP = "  "


def grid(head: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> list[str]:
    """Return lines with aligned columns.

    Args:
        head: names of the columns.
        rows: one text a column.
        right: names of the columns to align on the right, such as numbers.
    """
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(_width(line[column]) for line in lines) for column in range(len(head))]

    def cell(text: str, name: str, width: int) -> str:
        padding = " " * (width - _width(text))
        return padding + text if name in right else text + padding

    return [_GAP.join(map(cell, line, head, widths)).rstrip() for line in lines]


def pairs(values: Iterable[tuple[str, str]]) -> list[str]:
    """Return lines of aligned names and values."""
    listed = list(values)
    width = max((_width(name) for name, _ in listed), default=0)
    return [f"{name}{' ' * (width - _width(name))}{_GAP}{value}".rstrip() for name, value in listed]


def escaped(name: str) -> str:
    """Return a name as it is, or as a JSON string where it would break a line or be misread."""
    plain = name.isprintable() and name == name.strip() and not name.startswith('"') and name
    return name if plain else json.dumps(name)


def one_line(text: str) -> str:
    """Return a message as one line."""
    joined = "; ".join(line.strip() for line in text.splitlines() if line.strip())
    return joined if joined.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in joined)


def size(n_bytes: int) -> str:
    """Return bytes in decimal units."""
    value = float(n_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if round(value, 1) < 1000:
            return f"{value:.1f} {unit}" if unit != "B" else f"{n_bytes} B"
        value /= 1000
    return f"{value:.1f} PB"


def count(number: int) -> str:
    """Return a count with separators."""
    return f"{number:,}"


def plural(number: int, what: str) -> str:
    """Return a count and what is counted."""
    return f"{count(number)} {what}{'' if number == 1 else 's'}"


def nearest(name: object, allowed: Iterable[str]) -> str:
    """Return a hint at the name that was probably meant, or nothing."""
    close = difflib.get_close_matches(str(name), list(allowed), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def cell(value: Any) -> str:
    """Return a value of a slot, long vectors cut short."""
    if isinstance(value, list):
        shown = [cell(item) for item in value[:_MAX_VALUES]]
        if len(value) > _MAX_VALUES:
            shown.append(f"... ({len(value)})")
        return f"[{', '.join(shown)}]"
    if not isinstance(value, float):
        return str(value)
    if 1e6 <= abs(value) < 1e15:  # seconds since 1970, of which six digits would be a day of two weeks
        return f"{value:.3f}".rstrip("0").rstrip(".")
    return f"{value:.6g}"


def _width(text: str) -> int:
    """Return the columns that a terminal gives to a text."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)


log = logging.getLogger("recckpt")


class Progress:
    """Counts bytes of one save or load; a context manager that ends with a log line. Thread-safe."""

    def __init__(self, what: str, total_bytes: int) -> None:
        from tqdm import tqdm  # only a save or load shows a bar

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
