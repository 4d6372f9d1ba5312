"""When a run looks into a model bank for what is new there."""

from __future__ import annotations

from collections.abc import Callable

from recckpt.policies.schedule import Agreed, Trigger
from recckpt.policies.when import Moment


class Reloads:
    """Looks into a model bank as a trigger says, or after each save; so nothing of what is loaded is in the save.

    Args:
        reload: looks, and loads what is new.
        trigger: says when; None for after each save.
    """

    def __init__(self, reload: Callable[[], object], trigger: Trigger | None) -> None:
        self._reload, self._trigger = reload, trigger

    def start(self, begin: Moment) -> None:
        """Begin to count from here, as after a restore."""
        if self._trigger is not None:
            self._trigger.restart(begin)

    def look_if_due(self, now: Moment, agreed: Agreed, *, has_saved: bool) -> None:
        """Look if it is time; ``agreed`` is for triggers on which ranks may differ."""
        if self._trigger is not None:
            self._trigger.see(now)
        if has_saved if self._trigger is None else self._trigger.is_due(now, agreed):
            self.start(now)
            self._reload()
