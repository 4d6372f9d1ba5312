"""Formats text for people: counts, sizes, durations, values, safe names, and short descriptions of objects."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

_UNITS = (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1))
_MAX_VALUES = 4  # most values of a vector in a line of text; --json has all
_T = TypeVar("_T")
_MOST = 60  # most characters of a name
_BARS = "▁▂▃▄▅▆▇█"


def escaped(name: str) -> str:
    """Return a name unchanged, or as a JSON string if it would break a line or be misread."""
    plain = name.isprintable() and name == name.strip() and not name.startswith('"') and name
    return name if plain else json.dumps(name)


def one_line(text: str) -> str:
    joined = "; ".join(line.strip() for line in text.splitlines() if line.strip())
    return joined if joined.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in joined)


def size(n_bytes: int) -> str:
    value = float(n_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if round(value, 1) < 1000:
            return f"{value:.1f} {unit}" if unit != "B" else f"{n_bytes} B"
        value /= 1000
    return f"{value:.1f} PB"


def duration(seconds: float) -> str:
    """Format seconds in the two largest units."""
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
    unit, n_sec, smaller, n_smaller = next(each for each in _UNITS if seconds >= each[1])
    whole, rest = divmod(int(seconds), n_sec)
    more = f" {rest // n_smaller} {smaller}" if rest >= n_smaller else ""
    return f"{count(whole)} {unit}{more}"


def count(number: int) -> str:
    return f"{number:,}"


def plural(number: int, what: str) -> str:
    return f"{count(number)} {what}{'' if number == 1 else 's'}"


def nearest(name: object, allowed: Iterable[str]) -> str:
    """Return a hint that names the most similar allowed name; "" if none is similar."""
    close = difflib.get_close_matches(str(name), [each for each in allowed if each != name], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def first_few(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


def instead_of(name: str, names: Iterable[str]) -> str:
    """Return the end of a message for an unknown name: the existing names, and the most similar one."""
    names = list(names)
    return f"; there {'is' if len(names) == 1 else 'are'} {first_few(names, 20) or 'none'}{nearest(name, names)}"


def cell(value: Any) -> str:
    if isinstance(value, list):
        shown = [cell(item) for item in value[:_MAX_VALUES]]
        if len(value) > _MAX_VALUES:
            shown.append(f"... ({len(value)})")
        return f"[{', '.join(shown)}]"
    if not isinstance(value, float):
        return str(value)
    if 1e6 <= abs(value) < 1e15:  # Unix times: six digits would be as coarse as days
        return f"{value:.3f}".rstrip("0").rstrip(".")
    return f"{value:.6g}"


def shown(describe: Callable[[_T], str]) -> Callable[[_T], str]:
    """Make a ``__repr__`` from a function that describes an object in a few words.

    The ``__repr__`` never raises: debuggers show objects whose ``__init__`` has not ended or has failed.
    """

    @functools.wraps(describe)
    def shown_as(of: _T) -> str:
        name = type(of).__name__
        try:
            return f"<{name} {describe(of)}>"
        except Exception as error:
            return f"<{name}, half made ({type(error).__name__})>"

    return shown_as


def quoted(name: str) -> str:
    return repr(name if len(name) <= _MOST else f"{name[:_MOST]}...")


def sparkline(values: Sequence[float | None]) -> str:
    """Return one bar character per number, relative to the largest; a dot for None."""
    most = max((value for value in values if value is not None), default=0.0)
    heights = (None if value is None else int(len(_BARS) * (value / most)) if most > 0 else 0 for value in values)
    return "".join("·" if height is None else _BARS[min(len(_BARS) - 1, height)] for height in heights)
