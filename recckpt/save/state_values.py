"""What is kept with a checkpoint for readers without torch: values as JSON has them, nested or not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from recckpt.dense.state_copy import portable
from recckpt.format.manifest import MAX_NESTED, StateValue
from recckpt.format.safe_names import is_encodable


def check_state(state: Mapping[str, StateValue] | None, metrics: Mapping[str, float] | None) -> None:
    """Refuse what a save would refuse. Cheap enough for every batch: waits for no device.

    Raises:
        TypeError: one of the two is neither mapping nor None.
        ValueError: JSON has no such value as an entry of ``state``, or one of ``metrics`` is not a number; names it.
    """
    for name, value in _mapping("state", state).items():
        _as_value(_named("state", name), value, waits=False)
    for name, value in _mapping("metrics", metrics).items():
        if not _is_number_tensor(value):
            _as_number(name, value)


def as_state_values(state: Mapping[str, StateValue] | None) -> dict[str, StateValue]:
    """Return the entries of a state as JSON has them, or raise as :func:`check_state`."""
    return {name: _as_value(_named("state", name), value) for name, value in _mapping("state", state).items()}


def as_numbers(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Return metrics as Python's numbers, or raise as :func:`check_state`."""
    return {name: _as_number(name, value) for name, value in _mapping("metrics", metrics).items()}


def _as_value(place: str, value: Any, level: int = 0, *, waits: bool = True) -> StateValue:
    """Return a value as JSON has it; where it does not wait for a device, None for what may be on one."""
    if level > MAX_NESTED:
        raise ValueError(f"{place:.200}: it holds itself, or is nested more than {MAX_NESTED} deep")
    if isinstance(value, Mapping):
        return {name: _as_value(_named(place, name), each, level + 1, waits=waits) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_as_value(f"{place}[{i}]", each, level + 1, waits=waits) for i, each in enumerate(value)]
    return None if not waits and _is_number_tensor(value) else _as_scalar(place, value)


def _as_scalar(place: str, value: Any) -> StateValue:
    """Return a value as JSON has it, which knows no NaN and no infinity: they become their names."""
    found = portable(place, value)
    if isinstance(found, Tensor) and found.numel() == 1:
        found = found.item()
    if not isinstance(found, str | int | float | None):
        raise ValueError(
            f"{place}: found {value!r:.200}, expected a name and a number, string, bool or None, or lists and dicts of "
            "these"
        )
    if isinstance(found, str) and not is_encodable(found):
        raise ValueError(f"{place}: found {value!r:.200}, expected text that is encodable as UTF-8")
    return str(found) if isinstance(found, float) and not math.isfinite(found) else found


def _named(place: str, name: Any) -> str:
    """Return the place of an entry; ValueError where it has no name that JSON could have."""
    if not isinstance(name, str) or not is_encodable(name):
        raise ValueError(f"{place}[{name!r}]: expected a name that is text, encodable as UTF-8")
    return f"{place}[{name!r}]"


def _as_number(name: Any, value: Any) -> float:
    """Return a metric as a Python number, from a tensor or a number of numpy too."""
    try:
        if isinstance(value, str | bytes | bytearray):  # which float() would parse
            raise TypeError("text is not a number")
        return float(value)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"metrics[{name!r}]: found {value!r:.200}, expected a number") from error


def _is_number_tensor(value: Any) -> bool:
    """Say whether this is a tensor of one number, whose value may be under way on a device still."""
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()


def _mapping(what: str, value: Any) -> Mapping[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{what} must be a mapping of names to values, or None, found {value!r:.200}")
    return value
