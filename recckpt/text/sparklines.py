"""Numbers as a line of small bars."""

from __future__ import annotations

from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None]) -> str:
    """Return a bar for each number, as high as its share of the largest; a dot where there is no number."""
    most = max((value for value in values if value is not None), default=0.0)
    return "".join("·" if value is None else _BARS[_height(value, most)] for value in values)


def _height(value: float, most: float) -> int:
    return min(len(_BARS) - 1, int(len(_BARS) * value / most)) if most > 0 else 0
