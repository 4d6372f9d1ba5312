"""The saves of a run: begun when they are due or a signal asks for one, never two at a time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

from recckpt.errors import RecckptError
from recckpt.format import layout
from recckpt.format.manifest import Manifest
from recckpt.manager.run_state import Run
from recckpt.manager.signals import SignalWatch, goes_on, most_urgent
from recckpt.manager.step_arguments import Metrics, State, as_state, check_step, checked_event_time
from recckpt.parallel.ranks import Ranks
from recckpt.policies.schedule import Kind, SaveCounts, Schedule, Trigger
from recckpt.policies.when import Ends, Moment
from recckpt.save.arguments import tables_in
from recckpt.save.background_save import SaveHandle, settle_on_all
from recckpt.save.save_info import SaveInfo
from recckpt.saver import Saver

log = logging.getLogger("recckpt")

_LOST_SEC = 5.0  # that a save in the background has to end in, once a rank is known to be missing


class Autosave:
    """Saves a run when its schedule says so; see :class:`recckpt.CheckpointManager`. Collective; not thread-safe.

    Args:
        ranks: returns those that save together, as they are now.
        reload: looks for what is new in a model bank.
        reload_trigger: says when; None for after each save that was begun.
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
        async_save: bool,
        grace_sec: float | None,
        reload: Callable[[], object],
        reload_trigger: Trigger | None,
        clock: Callable[[], float],
    ) -> None:
        self._saver, self._run, self._ranks_now = saver, run, ranks
        self._schedule, self._signals = schedule, signals
        self._async_save, self._grace_sec = async_save, grace_sec
        self._reload, self._reload_trigger, self._clock = reload, reload_trigger, clock
        self._in_flight: SaveHandle | None = None
        self._has_stepped = False
        self._tables = tables_in(saver.model)
        self._date_tables()

    @property
    def counts(self) -> SaveCounts:
        """What became of the saves so far."""
        return self._schedule.counts

    def start(self) -> None:
        """Begin to count from where the run is, as after a restore."""
        begin = self._run.moment(self._clock())
        self._schedule.start(begin)
        if self._reload_trigger is not None:
            self._reload_trigger.restart(begin)
        self._tables = tables_in(self._saver.model)  # there may be new ones
        self._date_tables()
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
        self._date_tables()
        # Several ranks may see the end of a save at different steps: they raise at the next, unless one is lost.
        if self._ranks.size == 1 or self._saver.ranks.has_lost:
            self.settle(timeout_sec=0)
        now = run.moment(self._clock(), metrics, ends)
        due = self._schedule.due(now, self._agreed)
        kind = self._schedule.admit(due, lambda: self._ranks.gather(self._saver.is_saving)[0])
        if kind is not None:
            self._save(kind, state, metrics, background=self._async_save)
        self._reload_if_due(now, has_saved=kind is not None)
        if self._signals.is_watching:
            number = most_urgent(self._ranks.gather(self._signals.take()))
            if number is not None:
                self._answer(number, state, metrics)
        if kind is None and self._ranks.size > 1:  # not before: the others may be at a save, which raises on all
            check_step(state, metrics)

    def _date_tables(self) -> None:
        """Set the date of the tables to where the run is: rows that they look up next get it."""
        for table in self._tables:
            table.step = self._run.global_step
            if self._run.event_time is not None:  # else that of the table stays, which may have been set by hand
                table.event_time = self._run.event_time

    def _reload_if_due(self, now: Moment, *, has_saved: bool) -> None:
        """Look into a model bank after a save, so that nothing of what is loaded is in it."""
        trigger = self._reload_trigger
        if has_saved if trigger is None else trigger.is_due(now, self._agreed):
            if trigger is not None:
                trigger.restart(now)
            self._reload()

    def _agreed(self, ask: Callable[[], bool]) -> bool:
        """Ask all ranks, of which one is enough."""
        return any(self._ranks.on_all(ask))

    def save(self, state: State, metrics: Metrics) -> Manifest | None:
        """Save this step now, and wait; None where it is in a checkpoint that stays."""
        self._settle_for_save()
        saved = self._save("regular", state, metrics, background=False)
        return saved.wait() if isinstance(saved, SaveHandle) else saved

    def finish(self) -> None:
        """Save the last step, if one was made; also where the save before has failed, whose error is raised after."""
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
        """Without a step there is nothing to save: it would take the place of what was trained before."""
        if self._has_stepped:
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

    def _save(self, kind: Kind, state: State, metrics: Metrics, *, background: bool) -> Manifest | SaveHandle | None:
        """Save this step, unless it is in a checkpoint that stays."""
        run = self._run
        ckpt_id = layout.step_id(run.global_step)
        self._note_failure()
        of_ranks = self._ranks.on_all(lambda: (as_state(state, metrics), run.is_saved, run.event_time, run.counted))
        if all(is_saved for _, is_saved, *_ in of_ranks):
            log.info("%s is saved already", ckpt_id)
            return None
        self._check_counts([counted for *_, counted in of_ranks])
        run.note_event(*(event_time for _, _, event_time, _ in of_ranks))
        try:
            save = self._saver.save_async if background else self._saver.save
            saved = save(
                ckpt_id,
                self._ranks.rank,
                self._ranks.size,
                step=run.global_step,
                state=of_ranks[self._ranks.rank][0],
                overwrite=True,
                ephemeral=kind == "ephemeral",
            )
        except Exception:
            self._schedule.count(failed=not self._note_failure())  # this one has, unless it was the one before
            raise
        self._tables = tables_in(self._saver.model)
        self._schedule.begun(kind, run.moment(self._clock()))
        self._in_flight = saved if isinstance(saved, SaveHandle) else None
        self._schedule.count(deltas=(saved.info if isinstance(saved, SaveHandle) else saved).kind == "delta")
        if kind == "regular":
            run.note_saved()
        return saved

    def _check_counts(self, counted: Sequence[str]) -> None:
        """Refuse a save of ranks of which one has ended another window or epoch, though their steps are the same."""
        for rank, its in enumerate(counted):
            if its != counted[0]:
                raise self._info.failure(rank, f"it has counted {its}, rank 0 {counted[0]}: all count the same")

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
        return SaveInfo(layout.step_id(self._run.global_step), self._run.global_step)

    def _note_failure(self) -> bool:
        """Say whether the save in the background has failed since the last call; no checkpoint holds its step then."""
        handle = self._in_flight
        if handle is None or not handle.done():
            return False
        self._in_flight = None
        if handle.committed.exception() is None:
            return False
        self._schedule.count(failed=1)
        self._run.note_saved(False)
        return True

    def _answer(self, number: int, state: State, metrics: Metrics) -> None:
        """Save for a signal, and let the process end where it asks for that."""
        log.warning("signal %d: saving step %d", number, self._run.global_step)
        if goes_on(number):
            self._save("regular", state, metrics, background=self._async_save)
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
