"""What a step, a window, an epoch or a save is given beside the model: numbers, strings and the time of the data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from recckpt.format import layout
from recckpt.format.json_fields import COUNT_LIMIT
from recckpt.format.manifest import StateValue
from recckpt.manager.run_state import EPOCHS, WINDOWS
from recckpt.policies.evict import EVENT_TIME
from recckpt.save.state_values import as_numbers, as_state_values, check_state
from recckpt.sparse.table.tracking import MAX_EVENT_TIME

State = Mapping[str, StateValue] | None
Metrics = Mapping[str, float] | None


def check_step(state: State, metrics: Metrics) -> None:
    """Refuse what a save would refuse, without waiting for a device."""
    check_state(state, metrics)
    _check_names(state, metrics)


def as_state(state: State, metrics: Metrics) -> dict[str, StateValue]:
    """Return what is kept with a checkpoint, or raise as :func:`check_step`."""
    entries = {**as_numbers(metrics), **as_state_values(state)}
    _check_names(state, metrics)
    return entries


def checked_event_time(event_time: float | None) -> float | None:
    """Return a time; None for NaN and what is infinite. TypeError where it is no number, ValueError if far ahead."""
    if event_time is None:
        return None
    try:
        if isinstance(event_time, bool | np.bool_) or getattr(event_time, "dtype", None) == torch.bool:
            raise TypeError("a bool is not a time")
        is_time = math.isfinite(event_time)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several values
        raise TypeError(
            f"event_time must be a number of seconds since 1970, found {event_time!r}; a datetime has timestamp()"
        ) from error
    if is_time and event_time > MAX_EVENT_TIME:  # tables would take all rows for old; no later time would count
        raise ValueError(
            f"event_time must be seconds since 1970, found {event_time!r}, beyond the year 5000: divide milliseconds "
            "by 1000, nanoseconds by 1e9"
        )
    return float(event_time) if is_time else None


def checked_prefix(step_prefix: Any) -> str:
    """Return a prefix of step names; ValueError where no checkpoint could have it."""
    if not isinstance(step_prefix, str) or not step_prefix:
        raise ValueError(f"step_prefix must be a text such as 'ckpt', found {step_prefix!r}")
    layout.encode_id(layout.step_id(COUNT_LIMIT, step_prefix))
    return step_prefix


def _check_names(state: State, metrics: Metrics) -> None:
    """Refuse entries that would take the place of what the manager counts; ValueError names the first."""
    for what, values in (("state", state or {}), ("metrics", metrics or {})):
        name = next((name for name in (EVENT_TIME, WINDOWS, EPOCHS) if name in values), None)
        if name is not None:
            raise ValueError(f"{what}[{name!r}]: this is what the manager counts and resumes from: use another name")
