"""How long ago, in the steps of the run that loads them, and how often rows of a checkpoint were looked up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from recckpt.format.manifest import Manifest
from recckpt.format.tables import ClockDates
from recckpt.policies.evict import COUNT, EVENT_TIME, LAST_STEP, LAST_TIME, least_count
from recckpt.sparse.table.table import HashTable


@dataclass(frozen=True)
class Ages:
    """How a load converts dates of rows; a step of another run becomes its distance to the last step of that run.

    Attributes:
        added_steps: is added to each ``last_step`` of the checkpoint.
        missing: value by tracked slot, for slots that the checkpoint lacks: its own age, and the count with which a
            row stays.
        is_resumed: whether the run goes on at the step of the checkpoint.
        clock: when the clock has dated rows of the checkpoint.
        event_time: takes the place of dates of the clock; None where there is none yet.
    """

    added_steps: int = 0
    missing: Mapping[str, float] = field(default_factory=dict)
    is_resumed: bool = False
    clock: ClockDates | None = None
    event_time: float | None = None

    def of_rows(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the slots of rows of the checkpoint as they are here."""
        if self.added_steps and LAST_STEP in values:
            values = {**values, LAST_STEP: values[LAST_STEP].to(torch.int64) + self.added_steps}
        if self.clock is not None and self.event_time is not None and LAST_TIME in values:
            times = values[LAST_TIME]
            is_of_clock = (times >= self.clock.first) & (times <= self.clock.last)
            values = {**values, LAST_TIME: times.masked_fill(is_of_clock, self.event_time)}
        return values


def ages_of(table: HashTable, manifest: Manifest, taken_step: int | None, clock: ClockDates | None) -> Ages:
    """Return those of rows of a checkpoint; ``taken_step`` is where the run goes on, None where it stays at its own."""
    is_resumed = taken_step is not None and taken_step == manifest.step
    if taken_step is None:
        taken_step = table.time.step
    missing: dict[str, float] = {}
    if "step" in table.track:
        missing[LAST_STEP] = (taken_step if taken_step is not None else manifest.step) or 0
    if "count" in table.track:
        missing[COUNT] = least_count(table.evicts)
    event_time = manifest.state.get(EVENT_TIME)
    if "time" in table.track and isinstance(event_time, int | float):
        missing[LAST_TIME] = float(event_time)
    if "step" not in table.track or taken_step is None or manifest.step is None:
        return Ages(0, missing, is_resumed, clock, table.event_time)
    return Ages(taken_step - manifest.step, missing, is_resumed, clock, table.event_time)
