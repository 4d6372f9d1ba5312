"""The run that a manager counts, for the saves that its saver makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from recckpt.format import layout
from recckpt.format.manifest import StateValue

Counted = tuple[int | None, Mapping[str, StateValue]]  # the step of a run, and what else its manager counts


class CountedRun:
    """The step of the run that a saver saves, and what else its manager counts; nothing where no manager counts.

    Attributes:
        prefix: of the ids that the manager gives.
    """

    def __init__(self) -> None:
        self._now: Callable[[], Counted] = lambda: (None, {})
        self.prefix = layout.STEP_PREFIX

    def follow(self, now: Callable[[], Counted], prefix: str) -> None:
        """Take both from a manager, and how it names steps; the last one that was made for a saver counts."""
        self._now, self.prefix = now, prefix

    def step_and_state(
        self, step: int | None, state: Mapping[str, StateValue] | None
    ) -> tuple[int | None, Mapping[str, StateValue] | None]:
        """Return the step of a save and its state, to which a save of the run's own step adds what its manager counts.

        Args:
            step: None for that of the run.
            state: what the caller gives.

        Raises:
            ValueError: the caller gives another value for what the manager counts.
        """
        now, counted = self._now()
        if step not in (None, now) or not isinstance(state, Mapping | None):  # another kind is refused where it is read
            return step, state
        own = state or {}
        name = next((name for name in counted if name in own and own[name] != counted[name]), None)
        if name is not None:
            raise ValueError(
                f"state[{name!r}]: found {own[name]!r}, but the manager counts {counted[name]!r}: use another name"
            )
        return now, {**counted, **own}
