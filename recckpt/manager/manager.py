"""The manager: counts steps, saves when it is time, and takes up a run where its newest checkpoint left it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from recckpt.format import layout
from recckpt.format.manifest import Manifest, StateValue
from recckpt.manager.answers import answers, answers_habits
from recckpt.manager.attach import Attachable
from recckpt.manager.autosave import Autosave
from recckpt.manager.counting import Counting
from recckpt.manager.habits import SAVE_INSTEAD, SAVE_LINE, unknown_attribute
from recckpt.manager.near_steps import NearSteps
from recckpt.manager.options import parse_options
from recckpt.manager.own_checkpoints import OwnCheckpoints
from recckpt.manager.reloads import Reloads
from recckpt.manager.resumable import Resumable
from recckpt.manager.resume import Restorer
from recckpt.manager.run_state import Run
from recckpt.manager.save_errors import OnSaveError, SaveErrors
from recckpt.manager.signals import Signals, SignalWatch
from recckpt.parallel.ranks import this_rank
from recckpt.policies.schedule import Backpressure
from recckpt.policies.when import When
from recckpt.saver import Saver


class CheckpointManager(Attachable, Counting, Resumable, OwnCheckpoints):
    """Saves a run as ``ckpt_<step>`` when it is time, and restores it.

    Thread-safe: steps, saves and restores of several threads follow each other. It belongs to the process that made it:
    a forked child makes its own, or gets :class:`recckpt.errors.ForkedError`.

    As a context manager it saves the last step when the block ends well, if there was one or a near save was restored,
    and waits for the save that is under way.

    Args:
        saver: what is saved, and where.
        save_interval: steps between checkpoints, or a policy of :mod:`recckpt.policies.when`.
        shard_id: number of this rank; None for that of the process group, else of the environment (RANK), else 0.
        shard_num: number of ranks; None as above (WORLD_SIZE), else 1. With more than 1, ``step``, ``save`` and
            ``restore`` are collective.
        async_save: whether training goes on while a checkpoint that :meth:`step` began is written.
        backpressure: what to do when a save is due while one is under way: ``"wait"`` for it, ``"skip"`` the new one,
            or ``"latest"``: remember it, and save as soon as the other is done, at the step of that moment. Those two
            need ``async_save``.
        ephemeral: when to make checkpoints between the others, of which only the newest stays, and only until a
            regular one is there; steps or a policy.
        save_on_signal: signals, such as ``("SIGTERM", "SIGUSR1")`` or their numbers, that let the next :meth:`step`
            save; after that the process ends as the signal asks. SIGUSR1 and SIGUSR2 only save.
        grace_sec: how long such a save may take before the process ends without it; None for as long as it takes.
        save_at_start: whether ``with`` saves before training starts, where there was nothing to restore.
        reload_interval: when :meth:`reload_dynamic` looks for what is new in a model bank, steps or a policy; None for
            after each save that :meth:`step`, :meth:`window` or :meth:`epoch` begins.
        near_interval: when to make near saves, between the saves above; steps or a policy. The saver needs ``near``;
            where there is no checkpoint yet to count from, one is made in their place. See docs/near.md.
        event_time: the event time of the first batch, as of :meth:`step`; a restored one takes its place.
        on_save_error: what the error of a save does that :meth:`step`, :meth:`window` or :meth:`epoch` began:
            ``"raise"`` stops training; ``"warn"`` logs it, and a function gets it, on every rank, and training goes on.
            It is in :attr:`counts` and ``recckpt watch``. :meth:`save`, :meth:`close` and the end of ``with`` raise.
        raise_after: how many failed saves in a row are an error of the step all the same.
        step_prefix: of the names of checkpoints: ``"model"`` for ``model_<step>``.
        clock: seconds, for policies of time.

    Raises:
        TypeError: ``saver`` is not a :class:`recckpt.Saver`, or ``event_time`` not a number.
        ValueError: another argument is invalid.
    """

    @answers_habits
    def __init__(
        self,
        saver: Saver,
        save_interval: int | When,
        *,
        shard_id: int | None = None,
        shard_num: int | None = None,
        async_save: bool = False,
        backpressure: Backpressure = "wait",
        ephemeral: int | When | None = None,
        save_on_signal: Signals = (),
        grace_sec: float | None = None,
        save_at_start: bool = False,
        reload_interval: int | When | None = None,
        near_interval: int | When | None = None,
        event_time: float | None = None,
        on_save_error: OnSaveError = "raise",
        raise_after: int = 3,
        step_prefix: str = layout.STEP_PREFIX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        when: dict[str, Any] = {"ephemeral": ephemeral, "reload_interval": reload_interval, "event_time": event_time}
        when |= {"near_interval": near_interval}
        how: dict[str, Any] = {"async_save": async_save, "backpressure": backpressure, "grace_sec": grace_sec}
        how |= {"on_save_error": on_save_error, "raise_after": raise_after}
        options = parse_options(save_interval, save_at_start=save_at_start, step_prefix=step_prefix, **when, **how)
        self._saver, self._save_interval, self._save_at_start = saver, save_interval, options.save_at_start
        self._run = run = Run(event_time=options.event_time, step_prefix=options.step_prefix)
        self._ranks, begin = partial(saver.ranks.of, shard_id, shard_num), run.moment(clock())
        near = NearSteps.of(saver.near_saves, options, begin, lambda: this_rank(shard_id, shard_num)[0] == 0)
        self._restorer = Restorer(saver.loader, run, self._ranks, lambda: saver.max_keep, near.finder)
        self._autosave = Autosave(
            saver,
            run,
            self._ranks,
            options.schedule(begin),
            SignalWatch(save_on_signal),
            near=near,
            async_save=options.async_save,
            grace_sec=options.grace_sec,
            reloads=Reloads(self._restorer.reload_dynamic, options.reload_trigger(begin)),
            errors=SaveErrors(self._ranks, options.on_save_error, options.raise_after),
            clock=clock,
        )
        saver.counted_run.follow(lambda: (run.global_step, run.state), run.step_prefix)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(unknown_attribute(name, dir(type(self))), name=name, obj=self)

    @property
    def saver(self) -> Saver:
        """What is saved, and where."""
        return self._saver

    @property
    def save_interval(self) -> int | When:
        """Steps between checkpoints, or the policy."""
        return self._save_interval

    def register_for_checkpointing(self, name: str, obj: Any, *, per_rank: bool = False) -> None:
        """Save an object beside the model; see :meth:`recckpt.Saver.register_for_checkpointing`."""
        self._saver.register_for_checkpointing(name, obj, per_rank=per_rank)

    def register_io_state(self, name: str, obj: Any) -> None:
        """Save the position of a dataset; see :meth:`recckpt.Saver.register_io_state`."""
        self._saver.register_io_state(name, obj)

    @answers(SAVE_LINE, SAVE_INSTEAD)
    def save(
        self,
        step: int | None = None,
        *,
        state: Mapping[str, StateValue] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Manifest | None:
        """Save this step now, and wait; None, and a log line, where it is in a checkpoint already.

        A checkpoint of this step that another branch of the run left behind is superseded.

        Args:
            step: of a loop that counts its own steps and does not call :meth:`step`: the run goes on from there.
            state: numbers, strings, and lists and dicts of these, for readers without torch.
            metrics: name -> number, for policies of what to keep.

        Raises:
            TypeError, ValueError: as :meth:`step`; or ``step`` is not an int, or the run is past it.
            SaveFailedError: this save, or the one before in the background; the next may well work.
            WriterFencedError: another process has taken the output dir over.
        """
        with self._turn():
            return self._autosave.save(state, metrics, step)

    def wait_until_finished(self) -> None:
        """Wait for the save that is under way; the manager goes on. Collective where there are several ranks.

        Raises:
            SaveFailedError, WriterFencedError: it failed, and its error was not raised yet.
        """
        with self._turn():
            self._autosave.settle_on_all()

    @answers("reached_preemption()")
    def reached_preemption(self) -> bool:
        """Say whether a signal of ``save_on_signal`` came that ends the process, on any rank.

        The next :meth:`step`, or the end of ``with``, saves and ends it: a loop that does not come to a step soon may
        stop there. Collective where there are several ranks.
        """
        with self._turn():
            return self._autosave.reached_preemption()

    def close(self) -> None:
        """Wait for the save that is under way, and give signals back what they did before.

        A save that ``backpressure="latest"`` has put off is made first, of this step. Collective then, where there are
        several ranks.

        Raises:
            SaveFailedError, WriterFencedError: that save failed.
        """
        with self._turn():
            self._autosave.close()

    def __enter__(self) -> CheckpointManager:
        with self._turn():
            if self._save_at_start and self._run.global_step == 0 and not self._restorer.passes_over():
                self.save()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._turn():
            try:
                if error is None:
                    self._autosave.finish()
            except BaseException as failure:
                error = failure
                raise
            finally:
                self._autosave.close(error)

    def _turn(self) -> AbstractContextManager[Any]:
        self._check_process()
        return self._saver._turn()  # one lock for both: two could each be held by a thread that waits for the other
