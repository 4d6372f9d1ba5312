"""What a manager, a step, a window, an epoch or a save is given, checked before anything is made or counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from recckpt.errors import SaveFailedError
from recckpt.format import layout
from recckpt.format.codec import COUNT_LIMIT
from recckpt.format.manifest import StateValue
from recckpt.manager.run_state import EPOCHS, WINDOWS
from recckpt.policies.evict import EVENT_TIME
from recckpt.policies.schedule import Backpressure, checked_backpressure
from recckpt.policies.when import When, as_when, check_ephemeral
from recckpt.save.arguments import as_numbers, as_state_values, check_state
from recckpt.sparse.table.eviction import MAX_EVENT_TIME
from recckpt.types import flag, positive_int, positive_number

State = Mapping[str, StateValue] | None
Metrics = Mapping[str, float] | None
OnSaveError = Literal["raise", "warn"] | Callable[[SaveFailedError], object]


@dataclass(frozen=True)
class ManagerOptions:
    """When a manager saves and reloads, and how; see :class:`recckpt.CheckpointManager`."""

    regular: When
    between: When | None
    reload: When | None
    near: When | None
    async_save: bool
    backpressure: Backpressure
    grace_sec: float | None
    save_at_start: bool
    event_time: float | None
    step_prefix: str
    on_save_error: OnSaveError
    raise_after: int


def parse_options(
    save_interval: int | When,
    *,
    async_save: bool = False,
    backpressure: Backpressure = "wait",
    ephemeral: int | When | None = None,
    grace_sec: float | None = None,
    save_at_start: bool = False,
    reload_interval: int | When | None = None,
    near_interval: int | When | None = None,
    event_time: float | None = None,
    step_prefix: str = layout.STEP_PREFIX,
    on_save_error: OnSaveError = "raise",
    raise_after: int = 3,
) -> ManagerOptions:
    """Return the arguments of a manager as it needs them.

    Raises:
        TypeError: ``event_time`` is not a number.
        ValueError: another one is invalid.
    """
    grace = None if grace_sec is None else positive_number("grace_sec", grace_sec)
    if checked_backpressure(backpressure) != "wait" and not async_save:
        raise ValueError(
            f"backpressure={backpressure!r} is for saves in the background, found async_save=False, with which "
            "each step waits for its own save: omit it, or give async_save=True"
        )
    regular, between = as_when(save_interval), None if ephemeral is None else as_when(ephemeral, "ephemeral")
    if between is not None:
        check_ephemeral(between, regular)
    reload = None if reload_interval is None else as_when(reload_interval, "reload_interval")
    near = None if near_interval is None else as_when(near_interval, "near_interval")
    background, at_start = flag("async_save", async_save), flag("save_at_start", save_at_start)
    time = checked_event_time(event_time)
    if not isinstance(step_prefix, str) or not step_prefix:
        raise ValueError(f"step_prefix must be a text such as 'ckpt', found {step_prefix!r}")
    layout.encode_id(layout.step_id(COUNT_LIMIT, step_prefix))  # refuses what no checkpoint could have
    if on_save_error not in ("raise", "warn") and not callable(on_save_error):
        what = "on_save_error must be 'raise', 'warn' or a callable (SaveFailedError) -> None"
        raise ValueError(f"{what}, found {on_save_error!r:.100}")
    after = positive_int("raise_after", raise_after)
    how = (background, backpressure, grace, at_start, time, step_prefix, on_save_error, after)
    return ManagerOptions(regular, between, reload, near, *how)


def check_step(state: State, metrics: Metrics) -> None:
    """Refuse what a save would refuse, without waiting for a device."""
    check_state(state, metrics)
    _check_names(state, metrics)


def as_state(state: State, metrics: Metrics) -> dict[str, StateValue]:
    """Return what is kept with a checkpoint, or raise as :func:`check_step`."""
    entries = {**as_numbers(metrics), **as_state_values(state)}
    _check_names(state, metrics)
    return entries


def _check_names(state: State, metrics: Metrics) -> None:
    """Refuse entries that would take the place of what the manager counts; ValueError names the first."""
    for what, values in (("state", state or {}), ("metrics", metrics or {})):
        name = next((name for name in (EVENT_TIME, WINDOWS, EPOCHS) if name in values), None)
        if name is not None:
            raise ValueError(f"{what}[{name!r}]: this is what the manager counts and resumes from: use another name")


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
