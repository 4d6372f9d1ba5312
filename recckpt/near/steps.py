"""Begins the near saves of a run, at steps where one is due and no checkpoint is made."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from recckpt.near.saves import NearSaves
from recckpt.parallel.ranks import Ranks
from recckpt.policies.schedule import Agreed, Kind, SaveCounts, Trigger
from recckpt.policies.when import EverySteps, Moment, When
from recckpt.save.job import State

log = logging.getLogger("recckpt")

_NO_INTERVAL = "near= has no interval: no near save will be made; give Near(PATH, interval=20) to make near saves"


class NearSteps:
    """Begins the near saves of a run. Collective; not thread-safe.

    ``regular`` is the interval of checkpoints; if it leaves few near saves or none, a warning is logged.
    """

    def __init__(self, saves: NearSaves, regular: When, begin: Moment, is_first: Callable[[], bool]) -> None:
        when = saves.tier.when
        self._saves, self._trigger = saves, None if when is None else Trigger(when, begin)
        self._is_put_off = False
        problem = _NO_INTERVAL if when is None else None
        if isinstance(when, EverySteps) and isinstance(regular, EverySteps) and when.n >= regular.n:
            how_many = "no near save is made" if when.n % regular.n == 0 else "few near saves are made"
            problem = (
                f"Near(interval={when.n}) is not below save_interval={regular.n}: {how_many}, since a checkpoint that "
                "is due at the same step replaces the near save; give a smaller interval"
            )
        if problem is not None and is_first():
            log.warning("%s", problem)

    def start(self, begin: Moment) -> None:
        self._saves.go_on(begin.step)
        self._is_put_off = False
        if self._trigger is not None:
            self._trigger.restart(begin)

    def see(self, now: Moment) -> None:
        if self._trigger is not None:
            self._trigger.see(now)

    def is_due(self, now: Moment, agreed: Agreed, is_window_open: Callable[[], bool], *, has_saved: bool) -> bool:
        is_due = self._is_put_off
        if self._trigger is not None and (has_saved or self._trigger.is_due(now, agreed)):
            self._trigger.restart(now)
            is_due = True
        is_due &= not has_saved
        self._is_put_off = is_due and agreed(is_window_open)
        return is_due and not self._is_put_off

    def begin(self, ranks: Ranks, step: int, state: State) -> Kind | None:
        return None if self._saves.begin(ranks.rank, ranks.size, step, state) else "regular"

    def has_restored_newest(self, ranks: Ranks, order: tuple[int, int] | None) -> bool:
        if self._trigger is None or order is None:
            return False
        if ranks.on_first(lambda: self._saves.is_newest(order)):
            return True
        if ranks.rank == 0:
            log.warning("the restored near save is not made a checkpoint: there is a newer checkpoint by now")
        return False

    def counted(self, counts: SaveCounts) -> SaveCounts:
        near = self._saves.counts
        return replace(counts, near=near.made, near_failed=near.failed, near_skipped=near.skipped)
