"""Options of a manager and arguments of its steps and saves, with their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import numpy as np
import torch

from recckpt.format import layout
from recckpt.format.codec import COUNT_LIMIT
from recckpt.format.manifest import StateValue
from recckpt.manager.run_state import EPOCHS, METADATA, WINDOWS
from recckpt.policies.evict import EVENT_TIME
from recckpt.policies.options import OnSaveError, OnSignal, Signals, Tolerate, as_tolerate
from recckpt.policies.schedule import Backpressure
from recckpt.policies.when import When, as_when, check_ephemeral
from recckpt.save.arguments import as_numbers, as_state_values, check_state
from recckpt.sparse.table.eviction import MAX_EVENT_TIME
from recckpt.types import flag

State = Mapping[str, StateValue] | None
Metrics = Mapping[str, float] | None


@dataclass(frozen=True)
class ManagerOptions:
    """The arguments of :class:`recckpt.CheckpointManager`; ValueError if one is invalid."""

    save_interval: int | When
    async_save: bool | Backpressure = False
    ephemeral: int | When | None = None
    save_on_signal: Signals | OnSignal = ()
    on_save_error: OnSaveError = "raise"
    save_at_start: bool = False
    step_prefix: str = layout.STEP_PREFIX

    def __post_init__(self) -> None:
        _ = self.regular, self.on_signal, self.tolerate
        if type(self.async_save) is not bool and self.async_save not in get_args(Backpressure):
            raise ValueError(
                f"async_save must be True, False, or for saves that are due during another save one of "
                f"{get_args(Backpressure)}, found {self.async_save!r:.100}"
            )
        if self.between is not None:
            check_ephemeral(self.between, self.regular)
        flag("save_at_start", self.save_at_start)
        if not isinstance(self.step_prefix, str) or not self.step_prefix:
            raise ValueError(f"step_prefix must be a text such as 'ckpt', found {self.step_prefix!r}")
        layout.encode_id(layout.step_id(COUNT_LIMIT, self.step_prefix))  # raises an error for impossible names

    @property
    def regular(self) -> When:
        return as_when(self.save_interval)

    @property
    def between(self) -> When | None:
        return None if self.ephemeral is None else as_when(self.ephemeral, "ephemeral")

    @property
    def backpressure(self) -> Backpressure:
        return "wait" if isinstance(self.async_save, bool) else self.async_save

    @cached_property
    def on_signal(self) -> OnSignal:
        return self.save_on_signal if isinstance(self.save_on_signal, OnSignal) else OnSignal(self.save_on_signal)

    @cached_property
    def tolerate(self) -> Tolerate | None:
        """How many saves may fail before training stops; None if no save may fail."""
        return as_tolerate(self.on_save_error)


def check_step(state: State, metrics: Metrics) -> None:
    """Raise an error for state or metrics that a save would refuse, without waiting for a device."""
    check_state(state, metrics)
    _check_names(state, metrics)


def as_state(state: State, metrics: Metrics) -> dict[str, StateValue]:
    """Return the entries to keep with a checkpoint; raises the same errors as :func:`check_step`."""
    entries = {**as_numbers(metrics), **as_state_values(state)}
    _check_names(state, metrics)
    return entries


def as_metadata(metadata: State) -> dict[str, StateValue]:
    """Return a run's metadata as an entry of a manifest's state; raises the same errors as :func:`check_step`."""
    return as_state_values(metadata, METADATA, level=1)


def _check_names(state: State, metrics: Metrics) -> None:
    """Raise ValueError for entries with a name that the manager itself uses."""
    for what, values in (("state", state or {}), ("metrics", metrics or {})):
        name = next((name for name in (EVENT_TIME, WINDOWS, EPOCHS, METADATA) if name in values), None)
        if name is not None:
            raise ValueError(f"{what}[{name!r}]: the manager uses this name itself: use another name")


def checked_event_time(event_time: float | None) -> float | None:
    """Return a time; None if it is not finite. TypeError if it is not a number, ValueError if far ahead."""
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
    if is_time and event_time > MAX_EVENT_TIME:  # tables would treat all rows as old, and ignore later times
        raise ValueError(
            f"event_time must be seconds since 1970, found {event_time!r}, beyond the year 5000: divide milliseconds "
            "by 1000, nanoseconds by 1e9"
        )
    return float(event_time) if is_time else None
