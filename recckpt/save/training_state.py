"""Numbers and strings that a caller gives a step or a save, for policies and for readers without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from recckpt.dense.state_copy import portable
from recckpt.format.layout import is_encodable
from recckpt.format.manifest import Scalar


def check_scalars(state: Mapping[str, Scalar] | None, metrics: Mapping[str, float] | None) -> None:
    """Refuse what a save would refuse. Cheap enough for every batch: waits for no device.

    Raises:
        TypeError: one of the two is neither mapping nor None.
        ValueError: an entry of ``state`` is neither number nor string, or one of ``metrics`` no number; names it.
    """
    for name, value in _mapping("state", state).items():
        if not _is_number_tensor(value):
            as_scalar(name, value)
    for name, value in _mapping("metrics", metrics).items():
        if not _is_number_tensor(value):
            as_number(name, value)


def as_scalars(state: Mapping[str, Scalar] | None) -> dict[str, Scalar]:
    """Return the entries of a state as JSON has them, or raise as :func:`check_scalars`."""
    return {name: as_scalar(name, value) for name, value in _mapping("state", state).items()}


def as_numbers(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Return metrics as Python's numbers, or raise as :func:`check_scalars`."""
    return {name: as_number(name, value) for name, value in _mapping("metrics", metrics).items()}


def as_scalar(name: Any, value: Any) -> Scalar:
    """Return a value as JSON has it, which knows no NaN and no infinity: they become their names."""
    found = portable(f"state[{name!r}]", value)
    if isinstance(found, Tensor) and found.numel() == 1:
        found = found.item()
    if not isinstance(name, str) or not isinstance(found, str | int | float | None):
        raise ValueError(f"state[{name!r}]: found {value!r}, expected a name and a number, string, bool or None")
    if not is_encodable(name) or (isinstance(found, str) and not is_encodable(found)):
        raise ValueError(f"state[{name!r}]: found {value!r}, expected text that is encodable as UTF-8")
    return str(found) if isinstance(found, float) and not math.isfinite(found) else found


def as_number(name: Any, value: Any) -> float:
    """Return a metric as a number of Python's: tensors and numpy's numbers too."""
    try:
        return float(value)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"metrics[{name!r}]: found {value!r:.200}, expected a number") from error


def _is_number_tensor(value: Any) -> bool:
    """Say whether this is a tensor of one number, whose value may be under way on a device still."""
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()


def _mapping(what: str, given: Any) -> Mapping[Any, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"{what} must be a mapping of names to values, or None, found {given!r:.200}")
    return given
