"""The options of a manager, checked before anything is made."""

from __future__ import annotations

from dataclasses import dataclass

from recckpt.format import layout
from recckpt.manager.save_errors import OnSaveError, checked_on_save_error
from recckpt.manager.step_arguments import checked_event_time, checked_prefix
from recckpt.policies.schedule import Backpressure, Schedule, Trigger, checked_backpressure
from recckpt.policies.when import Moment, When, as_when, check_ephemeral
from recckpt.types import flag, positive_int, positive_number


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

    def schedule(self, begin: Moment) -> Schedule:
        """Return when a run that begins at a moment saves."""
        return Schedule(self.regular, self.between, self.backpressure, begin)

    def reload_trigger(self, begin: Moment) -> Trigger | None:
        """Return when such a run looks for what is new in a model bank; None for after each save."""
        return None if self.reload is None else Trigger(self.reload, begin)


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
    return ManagerOptions(
        regular,
        between,
        None if reload_interval is None else as_when(reload_interval, "reload_interval"),
        None if near_interval is None else as_when(near_interval, "near_interval"),
        flag("async_save", async_save),
        backpressure,
        grace,
        flag("save_at_start", save_at_start),
        checked_event_time(event_time),
        checked_prefix(step_prefix),
        checked_on_save_error(on_save_error),
        positive_int("raise_after", raise_after),
    )
