"""Numbers that callers give: refused at the door where they are none."""

from __future__ import annotations

import sys
from typing import Any


def positive_int(name: str, value: Any) -> int:
    """Return ``value``, or raise ValueError where it is not an int of at least 1."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be an int of at least 1, found {value!r}")
    return value


def positive_number(name: str, value: Any) -> float:
    """Return ``value``, or raise ValueError where it is not a finite number above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:  # which NaN is not
        raise ValueError(f"{name} must be a finite number above 0, found {value!r}")
    return float(value)
