"""The near saves of a run: begun when they are due, and no other save was."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from recckpt.manager.run_state import Run
from recckpt.near.finder import NearFinder
from recckpt.near.saves import NearSaves
from recckpt.parallel.ranks import Ranks
from recckpt.policies.schedule import Agreed, Kind, SaveCounts, Trigger
from recckpt.policies.when import EverySteps, Moment, When
from recckpt.save.job import State

log = logging.getLogger("recckpt")

_NO_INTERVAL = "near= has no interval: no near save will be made; give Near(PATH, interval=20) to make some"


class NearSteps:
    """Begins the near saves of a run, where there are any. Collective; not thread-safe.

    Args:
        saves: of the saver; None where it makes none.
        regular: when checkpoints are made; the log says where their intervals make near saves none, or few.
        begin: where the run begins.
        is_first: whether this is the rank that logs.
    """

    def __init__(self, saves: NearSaves | None, regular: When, begin: Moment, is_first: Callable[[], bool]) -> None:
        when = None if saves is None else saves.tier.when
        self._saves, self._trigger = saves, None if when is None else Trigger(when, begin)
        problem = _NO_INTERVAL if when is None else None
        if isinstance(when, EverySteps) and isinstance(regular, EverySteps) and when.n >= regular.n:
            how_many = "no near save is made" if when.n % regular.n == 0 else "few near saves are made"
            problem = (
                f"Near(interval={when.n}) is not below save_interval={regular.n}: {how_many}, since a checkpoint that "
                "is due at the same step takes the place of one; give a smaller interval"
            )
        if saves is not None and problem is not None and is_first():
            log.warning("%s", problem)

    @property
    def finder(self) -> NearFinder | None:
        """What a restore may find; None where there are none."""
        return None if self._saves is None else self._saves.tier.finder

    def start(self, begin: Moment) -> None:
        if self._saves is not None:
            self._saves.go_on(begin.step)
        if self._trigger is not None:
            self._trigger.restart(begin)

    def see(self, now: Moment) -> None:
        """Take note of the first event time that is known, and of one that was set back."""
        if self._trigger is not None:
            self._trigger.see(now)

    def is_due(self, now: Moment, agreed: Agreed, *, has_saved: bool) -> bool:
        """Say whether to make one now; a checkpoint takes the place of one."""
        if self._trigger is None or not (has_saved or self._trigger.is_due(now, agreed)):
            return False
        self._trigger.restart(now)
        return not has_saved

    def begin(self, ranks: Ranks, run: Run, state: State) -> Kind | None:
        """Begin one; return the kind of save to make in its place, where there is nothing yet that it could stand on.

        Raises:
            WriterFencedError: another process has taken the output dir over.
        """
        assert self._saves is not None  # as the constructor looks for
        is_begun = self._saves.begin(ranks.rank, ranks.size, run.global_step, {**run.state, **(state or {})})
        return None if is_begun else "regular"

    def has_restored_newest(self, ranks: Ranks, run: Run) -> bool:
        """Say whether a run that makes near saves has restored one, and it is still the newest there. Collective."""
        saves, order = self._saves, run.near_order
        if saves is None or self._trigger is None or order is None:
            return False
        if ranks.on_first(lambda: saves.is_newest(order)):
            return True
        if ranks.rank == 0:
            log.warning("the near save that was restored is not committed: there is a newer checkpoint by now")
        return False

    def counted(self, counts: SaveCounts) -> SaveCounts:
        if self._saves is None:
            return counts
        near = self._saves.counts
        return replace(counts, near=near.made, near_failed=near.failed, near_skipped=near.skipped)
