"""The saves of a run: begun when they are due or a signal asks for one, never two at a time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from recckpt.errors import RecckptError
from recckpt.format.manifest import Manifest
from recckpt.manager.at_save import meet
from recckpt.manager.near_steps import NearSteps
from recckpt.manager.reloads import Reloads
from recckpt.manager.run_state import Run
from recckpt.manager.save_errors import SaveErrors
from recckpt.manager.signals import SignalWatch, goes_on, most_urgent
from recckpt.manager.step_arguments import Metrics, State, check_step, checked_event_time
from recckpt.manager.table_dates import TableDates
from recckpt.parallel.ranks import Ranks
from recckpt.policies.schedule import Kind, SaveCounts, Schedule
from recckpt.policies.when import Ends
from recckpt.save.background_save import SaveHandle, settle_on_all
from recckpt.save.save_info import SaveInfo
from recckpt.saver import Saver

log = logging.getLogger("recckpt")

_LOST_SEC = 5.0  # that a save in the background has to end in, once a rank is known to be missing


class Autosave:
    """Saves a run when its schedule says so; see :class:`recckpt.CheckpointManager`. Collective; not thread-safe.

    Args:
        ranks: returns those that save together, as they are now.
        reloads: looks for what is new in a model bank.
        errors: says which errors of the saves that steps begin are raised.
        clock: seconds, for policies.
    """

    def __init__(
        self,
        saver: Saver,
        run: Run,
        ranks: Callable[[], Ranks],
        schedule: Schedule,
        signals: SignalWatch,
        *,
        near: NearSteps,
        async_save: bool,
        grace_sec: float | None,
        reloads: Reloads,
        errors: SaveErrors,
        clock: Callable[[], float],
    ) -> None:
        self._saver, self._run, self._ranks_now = saver, run, ranks
        self._schedule, self._signals, self._near, self._async_save = schedule, signals, near, async_save
        self._grace_sec, self._reloads, self._errors, self._clock = grace_sec, reloads, errors, clock
        self._in_flight: SaveHandle | None = None
        self._has_stepped = False
        self._dates = TableDates(saver, run)

    @property
    def counts(self) -> SaveCounts:
        """What became of the saves so far."""
        return self._near.counted(self._schedule.counts)

    def start(self) -> None:
        """Begin to count from where the run is, as after a restore."""
        begin = self._run.moment(self._clock())
        self._schedule.start(begin)
        self._near.start(begin)
        self._reloads.start(begin)
        self._dates.look_again()
        self._has_stepped = False

    def count(self, ends: Ends, state: State, metrics: Metrics, event_time: float | None) -> None:
        """Count a step, a window or an epoch, and save if it is time."""
        run = self._run
        time_of_events = checked_event_time(event_time)  # first: a step that is refused is not counted
        if self._ranks.size == 1:
            check_step(state, metrics)
        run.count(ends)
        self._has_stepped = True
        run.note_event(time_of_events)
        self._dates.set()
        # Several ranks may see the end of a save at different steps: they raise at the next, unless one is lost.
        if self._ranks.size == 1 or self._saver.ranks.has_lost:
            self._errors.let_pass(partial(self.settle, 0))
        now = run.moment(self._clock(), metrics, ends)
        due = self._schedule.due(now, self._agreed)
        kind = self._schedule.admit(due, lambda: self._ranks.gather(self._saver.is_saving)[0])
        if self._near.is_due(now, self._agreed, has_saved=kind is not None):
            kind = self._near.begin(self._ranks_now(), run, meet(self._ranks, run, None, state, metrics)[0].state)
        if kind is not None:
            self._save_due(kind, state, metrics)
        self._reloads.look_if_due(now, self._agreed, has_saved=kind is not None)
        if self._signals.is_watching:
            number = most_urgent(self._ranks.gather(self._signals.take()))
            if number is not None:
                self._answer(number, state, metrics)
        if kind is None and self._ranks.size > 1:  # not before: the others may be at a save, which raises on all
            check_step(state, metrics)

    def _agreed(self, ask: Callable[[], bool]) -> bool:
        """Ask all ranks, of which one is enough."""
        return any(self._ranks.on_all(ask))

    def save(self, state: State, metrics: Metrics, step: int | None = None) -> Manifest | None:
        """Save this step, or one of the caller's own count, and wait; None where a checkpoint that stays has it."""
        self._settle_for_save()
        saved = self._save("regular", state, metrics, step, background=False)
        return saved.wait() if isinstance(saved, SaveHandle) else saved

    def should_save(self, step: int | None, metrics: Metrics) -> bool:
        """Say whether a step that ends here, or at a step of the caller's own count, is to be saved. Collective."""
        run, ranks = self._run, self._ranks_now()
        at = run.global_step if step is None else step
        now = replace(run.moment(self._clock(), metrics), step=at)
        has_come = self.reached_preemption()
        is_due = self._schedule.would_save(now, lambda ask: any(ranks.on_all(ask)))
        is_ahead = at > run.global_step or (at == run.global_step and not run.is_saved)
        return is_ahead and (is_due or has_come)

    def reached_preemption(self) -> bool:
        """Say whether a signal that ends the process came on any rank. Collective."""
        return any(self._ranks_now().gather(self._signals.is_ending))

    def finish(self) -> None:
        """Save the last step, also where the save before has failed, whose error is raised after."""
        self._settle_then(self._save_last)

    def _settle_then(self, save: Callable[[], object]) -> None:
        """Wait for the save before, and save, though that has failed; raise its error then."""
        try:
            self._settle_for_save()
        except Exception:
            save()
            raise
        save()

    def _save_last(self) -> None:
        """Without a step a near save alone is saved: all else would take the place of what was trained before."""
        if self._has_stepped or self._near.has_restored_newest(self._ranks_now(), self._run):
            self.save(None, None)

    def close(self, error: BaseException | None = None) -> None:
        """Make the save that was put off, wait for what is under way, and give signals back what they did before.

        Where an ``error`` is being raised already, no save is made, and the error of one is only logged.
        """
        try:
            if error is None:
                self._save_put_off()
            self.settle()
        except Exception as failure:
            if error is None:
                raise
            log.error("%s", failure)
        finally:
            if self._schedule.forget():
                log.warning("a save was due and put off, and is not made, since the run has failed")
            self._signals.release()

    def _save_put_off(self) -> None:
        kind = self._schedule.pending
        if kind is not None:
            self._settle_then(partial(self._save, kind, None, None, background=False))

    def settle(self, timeout_sec: float | None = None) -> bool:
        """Wait for the save in the background, and raise its error unless it was raised before."""
        try:
            return self._saver.settle(timeout_sec)
        finally:
            self._note_failure()

    def settle_on_all(self) -> None:
        """Wait on all ranks, and raise the error of the save unless all of them have raised it before. Collective."""
        settle_on_all(self.settle, self._ranks_now().raising(self._info.failure))

    def _settle_for_save(self) -> None:
        """As :meth:`settle_on_all`, before a save that a missing rank fails."""
        settle_on_all(self.settle, self._info.raising(self._ranks_now()))

    def _save_due(self, kind: Kind, state: State, metrics: Metrics) -> None:
        """Save this step as it is due, or a signal asks; the error is raised unless the run is to go on."""
        save = partial(self._save, kind, state, metrics, background=self._async_save)
        if self._errors.are_raised:
            save()
            return
        self._errors.let_pass(self._settle_for_save)  # the save before, whose error would be that of this one
        if not self._errors.let_pass(save):
            self._schedule.missed(kind, self._run.moment(self._clock()))

    def _save(
        self, kind: Kind, state: State, metrics: Metrics, step: int | None = None, *, background: bool
    ) -> Manifest | SaveHandle | None:
        """Save this step, or that of the caller's own count, unless it is in a checkpoint that stays."""
        run = self._run
        self._note_failure()
        own, is_saved = meet(self._ranks, run, step, state, metrics)
        self._dates.set()
        if is_saved:
            log.info("%s is saved already", run.ckpt_id)
            return None
        try:
            save = self._saver.save_async if background else self._saver.save
            saved = save(
                run.ckpt_id,
                self._ranks.rank,
                self._ranks.size,
                step=run.global_step,
                state=own.state,
                overwrite=True,
                ephemeral=kind == "ephemeral",
            )
        except Exception:
            if not self._note_failure():  # this one has failed, not the one before
                self._count_failure()
            raise
        self._dates.look_again()
        self._schedule.begun(kind, run.moment(self._clock()))
        self._in_flight = saved if isinstance(saved, SaveHandle) else None
        if self._in_flight is None:
            self._errors.count(is_failed=False)
        self._schedule.count(deltas=(saved.info if isinstance(saved, SaveHandle) else saved).kind == "delta")
        if kind == "regular":
            run.note_saved()
        return saved

    @property
    def _ranks(self) -> Ranks:
        """Those of now: what fails on one, or one that is missing, fails the save of this step; alone, as it is."""
        ranks = self._ranks_now()
        return ranks if ranks.size == 1 else self._info.raising(ranks, self._failure_before)

    def _failure_before(self) -> RecckptError | None:
        """Return the error of the save in the background, which a missing rank fails before anything of this step."""
        try:
            self.settle(_LOST_SEC)
        except RecckptError as error:
            return error
        return None

    @property
    def _info(self) -> SaveInfo:
        """The save of this step."""
        return SaveInfo(self._run.ckpt_id, self._run.global_step)

    def _note_failure(self) -> bool:
        """Say whether the save in the background has failed since the last call; no checkpoint holds its step then."""
        handle = self._in_flight
        if handle is None or not handle.done():
            return False
        self._in_flight = None
        if handle.committed.exception() is None:
            self._errors.count(is_failed=False)
            return False
        self._count_failure()
        self._run.note_saved(False)
        return True

    def _count_failure(self) -> None:
        self._schedule.count(failed=1)
        self._errors.count(is_failed=True)

    def _answer(self, number: int, state: State, metrics: Metrics) -> None:
        """Save for a signal, and let the process end where it asks for that."""
        log.warning("signal %d: saving step %d", number, self._run.global_step)
        if goes_on(number):
            self._save_due("regular", state, metrics)
            return
        try:
            if not self._save_within(self._grace_sec, state, metrics):
                log.error("step %d is not saved after %s s of grace", self._run.global_step, self._grace_sec)
        except Exception as error:
            log.error("signal %d: %s", number, error)
            raise
        finally:
            self._signals.follow(number)

    def _save_within(self, seconds: float | None, state: State, metrics: Metrics) -> bool:
        """Save this step and say whether that, and the save before it, ended in time; None waits for both."""
        end = math.inf if seconds is None else time.monotonic() + seconds

        def left() -> float | None:
            return None if seconds is None else max(0.0, end - time.monotonic())

        try:
            is_over = self.settle(left())
        except Exception as error:
            log.error("%s", error)  # one more reason to save this step
            is_over = True
        is_over = all(self._ranks.gather(is_over))  # of one rank it may end as the grace does
        if is_over:
            self._save("regular", state, metrics, background=True)
        return is_over and self.settle(left())
