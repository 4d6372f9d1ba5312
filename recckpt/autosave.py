"""The saves of a run: begun when they are due, or a signal asks for one, and never two at a time."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

from recckpt import layout
from recckpt.errors import RecckptError
from recckpt.manifest import Manifest, Scalar
from recckpt.run import EVENT_TIME, Ranks, Run
from recckpt.save_runner import SaveHandle
from recckpt.saver import Saver
from recckpt.schedule import Kind, SaveCounts, Schedule
from recckpt.signals import SignalWatch

log = logging.getLogger("recckpt")

_State = Mapping[str, Scalar] | None
_Metrics = Mapping[str, float] | None


class Autosave:
    """Saves a run when its schedule says so. Collective where there are several ranks; not thread-safe.

    Args:
        saver: what is saved, and where.
        run: where the run is.
        ranks: that save together.
        schedule: says when.
        signals: that let the next step save.
        async_save: whether training goes on while a checkpoint is written that a step began.
        grace_sec: how long a save for a signal may take.
        reload: called after a save was begun: looks for what is new in a model bank.
    """

    def __init__(
        self,
        saver: Saver,
        run: Run,
        ranks: Ranks,
        schedule: Schedule,
        signals: SignalWatch,
        *,
        async_save: bool,
        grace_sec: float | None,
        reload: Callable[[], object],
    ) -> None:
        self._saver, self._run, self._ranks = saver, run, ranks
        self._schedule, self._signals = schedule, signals
        self._async_save, self._grace_sec = async_save, grace_sec
        self._reload = reload

    @property
    def counts(self) -> SaveCounts:
        """What became of the saves so far."""
        return self._schedule.counts

    def start(self) -> None:
        """Begin to count from where the run is, as after a restore."""
        self._schedule.start(self._run.global_step, self._run.event_time)

    def step(self, state: _State, metrics: _Metrics, event_time: float | None) -> None:
        """Count a step, and save if it is time."""
        run = self._run
        run.global_step += 1
        if event_time is not None and not math.isnan(event_time):
            run.event_time = max(event_time, event_time if run.event_time is None else run.event_time)
        if self._ranks.size == 1:  # several ranks may see the end of a save at different steps: they raise at the next
            self.settle(timeout_sec=0)
        measured = metrics or {}
        due = self._schedule.due(run.global_step, run.event_time, measured, lambda own: any(self._ranks.gather(own)))
        kind = self._schedule.admit(due, lambda: self._ranks.gather(self._saver.is_saving)[0])
        if kind is not None:
            self._save(kind, state, metrics, blocking=not self._async_save)
            self._reload()
        if self._signals.is_watching:
            noted = self._ranks.gather(self._signals.take())
            self._answer(next((number for number in noted if number is not None), None), state, metrics)

    def save(self, state: _State, metrics: _Metrics) -> Manifest | None:
        """Save this step now, and wait; None where it is in a checkpoint that stays."""
        self.settle()
        saved = self._save("regular", state, metrics, blocking=True)
        return saved.wait() if isinstance(saved, SaveHandle) else saved

    def close(self) -> None:
        """Wait for the save that is under way, and give signals back what they did before."""
        self._signals.release()
        self.settle()

    def settle(self, timeout_sec: float | None = None) -> bool:
        """Wait for the save in the background, and raise its error where nobody has been told of it."""
        try:
            return self._saver.settle(timeout_sec)
        except RecckptError:
            self.counts.failed += 1
            self._run.held_step = None
            raise

    def _save(self, kind: Kind, state: _State, metrics: _Metrics, *, blocking: bool) -> Manifest | SaveHandle | None:
        """Save this step, unless it is in a checkpoint that stays."""
        run = self._run
        ckpt_id = layout.step_id(run.global_step)
        if run.held_step == run.global_step:
            log.info("%s is saved already", ckpt_id)
            return None
        self.settle()
        times = {} if run.event_time is None else {EVENT_TIME: run.event_time}
        measured = {name: float(value) for name, value in (metrics or {}).items()}
        try:
            saved = self._saver.save(
                ckpt_id,
                self._ranks.rank,
                self._ranks.size,
                step=run.global_step,
                state={**times, **measured, **(state or {})},
                overwrite=True,
                ephemeral=kind == "ephemeral",
                blocking=blocking,
            )
        except RecckptError:
            self.counts.failed += 1
            raise
        self._schedule.begun(kind, run.global_step, run.event_time)
        if kind == "regular":
            run.held_step = run.global_step
        return saved

    def _answer(self, number: int | None, state: _State, metrics: _Metrics) -> None:
        """Save for a signal, and let the process end as it asks."""
        if number is None:
            return
        log.warning("signal %d: saving step %d", number, self._run.global_step)
        try:
            self._save("regular", state, metrics, blocking=False)
            if not self.settle(self._grace_sec):
                log.error("step %d is not saved after %s s of grace", self._run.global_step, self._grace_sec)
        except RecckptError as error:
            log.error("signal %d: %s", number, error)
            raise
        finally:
            self._signals.follow(number)
