"""The saves of a run: begun when a save is due or a signal asks for one, never two at a time."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from torch.optim import Optimizer

from recckpt.dense.optimizers import groups_of, updater
from recckpt.errors import RecckptError, SaveFailedError
from recckpt.format.manifest import Manifest, StateValue
from recckpt.manager.options import ManagerOptions, Metrics, State, as_state, check_step, checked_event_time
from recckpt.manager.run_state import Run
from recckpt.manager.signals import SignalWatch, goes_on, most_urgent
from recckpt.parallel.ranks import OtherCallError, Ranks
from recckpt.policies.schedule import Agreed, Kind, SaveCounts, Schedule, Trigger
from recckpt.policies.when import Ends, Moment, When
from recckpt.save.arguments import tables_in
from recckpt.save.background import SaveHandle, settle_on_all
from recckpt.save.save_info import SaveInfo
from recckpt.saver import Saver
from recckpt.sparse.optim import SparseOptimizer

log = logging.getLogger("recckpt")

_LOST_SEC = 5.0  # time limit for a running background save once a rank is known to be missing


@dataclass(frozen=True)
class AtSave:
    """One rank's place in the run, and the state that it saves beside the model; all ranks compare these at a save."""

    step: int
    is_saved: bool  # whether a checkpoint that is not ephemeral has this step
    event_time: float | None
    counted: str
    state: dict[str, StateValue]


class GradientWindow:
    """Puts saves off while accumulated gradients wait for their optimizer step, because no checkpoint holds gradients.

    A window is set by ``set_grad_accum_steps`` of an optimizer of tables, or by accelerate's
    ``gradient_accumulation_steps``. Collective if something is due.
    """

    def __init__(self, saver: Saver) -> None:
        self._saver = saver
        self.kind: Kind | None = None  # kind of the save that was put off
        self._signal: int | None = None

    def kind_now(self, due: Kind | None, agreed: Agreed) -> Kind | None:
        """Return the kind of save to make now, from the save that is due and the save that was put off."""
        kind = "regular" if "regular" in (due, self.kind) else due or self.kind
        self.kind = kind if kind is not None and agreed(self.is_open) else None
        return kind if self.kind is None else None

    def signal_now(self, number: int | None, agreed: Agreed) -> int | None:
        number = most_urgent((number, self._signal))
        self._signal = number if number is not None and agreed(self.is_open) else None
        return number if self._signal is None else None

    def take_signal(self) -> int | None:
        """Return the signal that was put off, because no further accumulation window will end."""
        number, self._signal = self._signal, None
        return number

    def is_open(self) -> bool:
        saved = (self._saver.sparse_optim, *self._saver._extra.objects.values())
        optimizers = [updater(one) for one in saved if isinstance(one, Optimizer)]
        if any(isinstance(one, SparseOptimizer) and one.has_gradients_waiting for one in optimizers):
            return True
        state = sys.modules.get("accelerate.state")
        if state is None or state.GradientState().sync_gradients:
            return False
        groups = (group for optimizer in optimizers for group in groups_of(optimizer))
        return any(parameter.grad is not None for group in groups for parameter in group["params"])


class SideSaves(Protocol):
    """Saves that steps make beside checkpoints, such as near saves. Collective; not thread-safe."""

    def start(self, begin: Moment) -> None:
        """Begin to count from the present step of the run, for example after a restore."""

    def see(self, now: Moment) -> None:
        """Record the first known event time, and an event time that was set back."""

    def is_due(self, now: Moment, agreed: Agreed, is_window_open: Callable[[], bool], *, has_saved: bool) -> bool:
        """Return whether to make a side save now: not if a checkpoint was just begun, and not while gradients wait."""

    def begin(self, ranks: Ranks, step: int, state: State) -> Kind | None:
        """Begin a side save; return the kind of checkpoint to make instead if the side save has no base yet.

        WriterFencedError if another process has taken the output dir over.
        """

    def has_restored_newest(self, ranks: Ranks, order: tuple[int, int] | None) -> bool:
        """Return whether the run restored the side save of this order and that save is still the newest."""

    def counted(self, counts: SaveCounts) -> SaveCounts: ...


class Autosave:
    """Saves a run when its schedule says so; see :class:`recckpt.CheckpointManager`. Collective; not thread-safe.

    ``ranks`` returns the ranks that save together now. ``on_save_error`` of the options applies to errors of saves that
    a step began, in the same way on all ranks. Errors because of a lost rank, another writer or the caller's arguments
    are always raised, because no later save corrects them.

    ``reload`` loads new checkpoints of a model bank: after each save unless :meth:`reload_when` sets another policy, so
    that the save does not contain the reloaded state.
    """

    def __init__(
        self,
        saver: Saver,
        run: Run,
        ranks: Callable[[], Ranks],
        options: ManagerOptions,
        signals: SignalWatch,
        *,
        sides: Sequence[SideSaves],
        reload: Callable[[], object],
    ) -> None:
        self._saver, self._run, self._ranks_now, self._options = saver, run, ranks, options
        self._signals, self._sides, self._reload = signals, sides, reload
        begin = run.moment()
        self._schedule = Schedule(options.regular, options.between, options.backpressure, begin)
        self._reload_trigger: Trigger | None = None
        self._failures = 0  # consecutive failed saves
        self._in_flight: SaveHandle | None = None
        self._window, self._has_stepped, self._has_reached = GradientWindow(saver), False, False
        self._tables = tables_in(saver.model)
        self.date_tables()

    @property
    def counts(self) -> SaveCounts:
        counts = self._schedule.counts
        for side in self._sides:
            counts = side.counted(counts)
        return counts

    def start(self) -> None:
        """Begin to count from the present step of the run, for example after a restore."""
        begin = self._run.moment()
        self._schedule.start(begin)
        for side in self._sides:
            side.start(begin)
        if self._reload_trigger is not None:
            self._reload_trigger.restart(begin)
        self._tables = tables_in(self._saver.model)  # tables may have been added
        self.date_tables()
        self._window, self._has_stepped = GradientWindow(self._saver), False

    def reload_when(self, when: When | None) -> None:
        """Reload by a policy from the next :meth:`start` on; None for after each save."""
        self._reload_trigger = None if when is None else Trigger(when, self._run.moment())

    def note_time(self) -> None:
        """Apply an event time that the caller set: tables store it with new look-ups, and policies count from it."""
        now = self._run.moment()
        self._schedule.see(now)
        for side in self._sides:
            side.see(now)
        self.date_tables()

    def date_tables(self) -> None:
        """Give the tables the run's step and event time, which they store with each row looked up from now on."""
        for table in self._tables:
            table.step = self._run.global_step
            if self._run.event_time is not None:  # without one, a time that a user gave a table stays
                table.event_time = self._run.event_time

    def count(self, ends: Ends, state: State, metrics: Metrics, event_time: float | None) -> None:
        run = self._run
        time_of_events = checked_event_time(event_time)  # first, because a refused step is not counted
        if self._ranks.size == 1:
            check_step(state, metrics)
        run.count(ends)
        self._has_stepped = True
        run.note_event(run.plausible(time_of_events))
        self.date_tables()
        # Ranks may see the end of a save at different steps: all raise its error at the next, unless a rank is lost.
        if self._ranks.size == 1 or self._saver.ranks.has_lost:
            self._let_pass(partial(self.settle, 0))
        now = run.moment(metrics, ends)
        due = self._window.kind_now(self._schedule.due(now, self._agreed), self._agreed)
        kind = self._schedule.admit(due, lambda: self._ranks.gather(self._saver.is_saving)[0])
        for side in self._sides:
            side.see(now)
            if side.is_due(now, self._agreed, self._window.is_open, has_saved=kind is not None):
                own, _ = self._meet(None, state, metrics)
                kind = side.begin(self._ranks_now(), run.global_step, {**run.state, **own.state})
        if kind is not None:
            self._save_due(kind, state, metrics)
        trigger, is_reload_due = self._reload_trigger, kind is not None
        if trigger is not None:
            trigger.see(now)
            is_reload_due = trigger.is_due(now, self._agreed)
            if is_reload_due:
                trigger.restart(now)
        if is_reload_due:
            self._reload()
        if self._signals.is_watching:
            number = self._window.signal_now(most_urgent(self._ranks.gather(self._signals.take())), self._agreed)
            if number is not None:
                self._answer(number, state, metrics)
        if kind is None and self._ranks.size > 1:  # not before: other ranks may be at a save, which raises on all
            check_step(state, metrics)

    def _agreed(self, ask: Callable[[], bool]) -> bool:  # collective
        return any(self._ranks.on_all(ask))

    def save(self, state: State, metrics: Metrics, step: int | None = None) -> Manifest | None:
        """Save this step, or the caller's own ``step``, and wait; None if a lasting checkpoint already has it."""
        self._settle_for_save()
        if self._window.is_open():
            log.warning(
                "saved between two updates of accumulated gradients; the gradients accumulated so far are not "
                "saved, and a resume begins a new window here; save after an update"
            )
        saved = self._save("regular", state, metrics, step, background=False)
        return saved.wait() if isinstance(saved, SaveHandle) else saved

    def should_save(self, step: int | None, metrics: Metrics) -> bool:
        """Return whether to save the step that ends here, or the caller's own ``step``. Collective."""
        run, ranks = self._run, self._ranks_now()
        at = run.global_step if step is None else step
        now = replace(run.moment(metrics), step=at)
        has_come = self.reached_preemption()
        is_due = self._schedule.would_save(now, lambda ask: any(ranks.on_all(ask)))
        is_ahead = at > run.global_step or (at == run.global_step and not run.is_saved)
        return is_ahead and (is_due or has_come)

    def reached_preemption(self) -> bool:
        """Return whether any rank received a signal that ends the process. Collective."""
        is_reached = any(self._ranks_now().gather(self._signals.is_ending))
        self._has_reached = self._has_reached or is_reached
        return is_reached

    @property
    def is_ending(self) -> bool:
        """Whether this rank received, or learned of, a signal that ends the process. Not collective."""
        return self._signals.is_ending or self._has_reached

    def finish(self) -> None:
        """Save the last step, even if the previous save failed; its error is raised afterwards.

        If no step was made, save only a run that was restored from a near save; otherwise the save would supersede
        earlier training.
        """

        def save_last() -> None:
            ranks, order = self._ranks_now(), self._run.near_order
            if self._has_stepped or any(side.has_restored_newest(ranks, order) for side in self._sides):
                self.save(None, None)

        self._settle_then(save_last)

    def _settle_then(self, save: Callable[[], object]) -> None:
        """Wait for the previous save, then save; raise an error of the previous save after that."""
        try:
            self._settle_for_save()
        except OtherCallError:
            raise  # other ranks are not at this save, which would wait for them
        except Exception:
            save()
            raise
        save()

    def close(self, error: BaseException | None = None) -> None:
        """Make the save that was put off, wait for running saves, and restore the signal handlers.

        With an ``error`` that is already being raised, makes no save and only logs further errors.
        """
        try:
            kind = self._schedule.pending or self._window.kind
            if error is None and kind is not None:
                self._settle_then(partial(self._save, kind, None, None, background=False))
            self.settle()
        except Exception as failure:
            if error is None:
                raise
            log.error("%s", failure)
        finally:
            if self._schedule.forget():
                log.warning("a save was put off and is not made now, because the run has failed")
            self._signals.release(self._window.take_signal())

    def settle(self, timeout_sec: float | None = None) -> bool:
        """Wait for the background save, and raise its error unless it was raised before."""
        try:
            return self._saver.settle(timeout_sec)
        finally:
            self._note_failure()

    def settle_on_all(self) -> None:
        """Wait on all ranks; raise the save's error unless all of them raised it before. Collective."""
        settle_on_all(self.settle, self._ranks_now().raising(self._info.failure))

    def _settle_for_save(self) -> None:
        """Like :meth:`settle_on_all`, before a save that a missing rank fails."""
        settle_on_all(self.settle, self._info.raising(self._ranks_now()))

    def _save_due(self, kind: Kind, state: State, metrics: Metrics) -> None:
        """Save this step. Raises the save's error, unless ``on_save_error`` tolerates it."""
        save = partial(self._save, kind, state, metrics, background=self._options.async_save is not False)
        if self._options.tolerate is None:
            save()
            return
        self._let_pass(self._settle_for_save)  # otherwise this save would report the previous save's error
        if not self._let_pass(save):
            self._schedule.missed(kind, self._run.moment())

    def _let_pass(self, work: Callable[[], object]) -> bool:
        """Run ``work``; return False if a save's error was tolerated. Collective if ``work`` is.

        Raises an error that is not tolerated, and any error that ``on_save_error`` raised on any rank.
        """
        try:
            work()
        except Exception as error:
            tolerate, ranks = self._options.tolerate, self._ranks_now()
            if tolerate is None or ranks.has_lost:
                raise
            if not all(ranks.gather(isinstance(error, SaveFailedError))) or not isinstance(error, SaveFailedError):
                raise
            failed = error
            if self._failures >= tolerate.raise_after:
                log.error("%d consecutive saves have failed; raising the error of the last one", self._failures)
                raise
            answer = tolerate.call
            if answer is None:
                log.warning(
                    "%s (training continues; %d consecutive failures, at %d it stops)",
                    error,
                    self._failures,
                    tolerate.raise_after,
                )
            else:
                if ranks.size > 1:
                    ranks = ranks.raising(lambda r, why: RecckptError(f"on_save_error failed on rank {r}: {why}"))
                ranks.on_each(lambda: answer(failed))
            return False
        return True

    def _save(
        self, kind: Kind, state: State, metrics: Metrics, step: int | None = None, *, background: bool
    ) -> Manifest | SaveHandle | None:
        """Save this step, or the caller's own ``step``, unless a checkpoint that is not ephemeral has it."""
        run = self._run
        self._note_failure()
        own, is_saved = self._meet(step, state, metrics)
        self.date_tables()
        if is_saved:
            log.info("%s is already saved", run.ckpt_id)
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
            if not self._note_failure():  # this save failed, not the previous one
                self._count_failure()
            raise
        self._tables = tables_in(self._saver.model)
        self.date_tables()
        self._schedule.begun(kind, run.moment())
        self._in_flight = saved if isinstance(saved, SaveHandle) else None
        if self._in_flight is None:
            self._failures = 0
        self._schedule.count(deltas=(saved.info if isinstance(saved, SaveHandle) else saved).kind == "delta")
        if kind == "regular":
            run.note_saved()
        return saved

    def _meet(self, step: int | None, state: State, metrics: Metrics) -> tuple[AtSave, bool]:
        """Return this rank's record, and whether a checkpoint that is not ephemeral has this step. Collective.

        Moves the run to the caller's own ``step``, and to the latest event time of all ranks. RecckptError if ranks
        counted different windows or epochs; TypeError, ValueError for invalid arguments.
        """
        run, ranks = self._run, self._ranks

        def bring() -> AtSave:
            at = run.checked_step(step)
            is_saved = run.is_saved and at == run.global_step
            return AtSave(at, is_saved, run.event_time, run.counted, as_state(state, metrics))

        of_ranks = ranks.on_all(bring)
        own, is_saved = of_ranks[ranks.rank], all(each.is_saved for each in of_ranks)
        run.move_to(own.step)
        if not is_saved:
            for rank, each in enumerate(of_ranks):
                if each.counted != of_ranks[0].counted:
                    cause = (
                        f"it has counted {each.counted}, rank 0 {of_ranks[0].counted}: all ranks must count the same"
                    )
                    raise self._info.failure(rank, cause)
            run.note_event(*(each.event_time for each in of_ranks))
        return own, is_saved

    @property
    def _ranks(self) -> Ranks:
        """The present ranks; with several, a rank that fails or is missing fails this step's save."""
        ranks = self._ranks_now()
        return ranks if ranks.size == 1 else self._info.raising(ranks, self._failure_before)

    def _failure_before(self) -> RecckptError | None:
        """Return the error of the background save: if a rank is missing, that save fails before this step's save."""
        try:
            self.settle(_LOST_SEC)
        except RecckptError as error:
            return error
        return None

    @property
    def _info(self) -> SaveInfo:
        return SaveInfo(self._run.ckpt_id, self._run.global_step)

    def _note_failure(self) -> bool:
        """Return whether the background save has failed since the last call; if it has, mark its step as unsaved."""
        handle = self._in_flight
        if handle is None or not handle.done():
            return False
        self._in_flight = None
        if handle.committed.exception() is None:
            self._failures = 0
            return False
        self._count_failure()
        self._run.note_saved(False)
        return True

    def _count_failure(self) -> None:
        self._schedule.count(failed=1)
        self._failures += 1

    def _answer(self, number: int, state: State, metrics: Metrics) -> None:
        log.warning("signal %d: saving step %d", number, self._run.global_step)
        if goes_on(number):
            self._save_due("regular", state, metrics)
            return
        try:
            grace_sec = self._options.on_signal.grace_sec
            if not self._save_within(grace_sec, state, metrics):
                log.error("step %d is not saved after %s s of grace", self._run.global_step, grace_sec)
        except Exception as error:
            log.error("signal %d: %s", number, error)
            raise
        finally:
            self._signals.follow(number)

    def _save_within(self, seconds: float | None, state: State, metrics: Metrics) -> bool:
        """Save this step; return whether this and the previous save ended in time. None waits for both saves."""
        end = math.inf if seconds is None else time.monotonic() + seconds

        def left() -> float | None:
            return None if seconds is None else max(0.0, end - time.monotonic())

        try:
            is_over = self.settle(left())
        except Exception as error:
            log.error("%s", error)  # a further reason to save this step
            is_over = True
        is_over = all(self._ranks.gather(is_over))  # the save may end on one rank just as the grace period does
        if is_over:
            self._save("regular", state, metrics, background=True)
        return is_over and self.settle(left())
