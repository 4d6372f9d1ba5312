"""The manager: counts steps, saves when it is time, and takes up a run where its newest checkpoint left it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from recckpt.format import layout
from recckpt.format.manifest import Manifest, StateValue
from recckpt.manager.attach import FIND_ALL, OneOrMany, TablesOption, attached, guests_of
from recckpt.manager.autosave import Autosave
from recckpt.manager.options import ManagerOptions, Metrics, State, as_metadata, checked_event_time
from recckpt.manager.resume import Restorer, Resumable
from recckpt.manager.run_state import Run
from recckpt.manager.signals import SignalWatch
from recckpt.output_dir import rotation
from recckpt.output_dir.forget_requests import Forgotten
from recckpt.output_dir.listing import newest_first
from recckpt.parallel.ranks import this_rank
from recckpt.policies.deltas import Deltas
from recckpt.policies.keep import Keep
from recckpt.policies.options import Choose, Near, OnSaveError, OnSignal, Signals, Transfers
from recckpt.policies.schedule import Backpressure, SaveCounts
from recckpt.policies.when import When
from recckpt.save.job import OnSave
from recckpt.saver import Saver
from recckpt.text import count, plural, shown
from recckpt.text.foreign_words import answers_by, unknown_attribute

if TYPE_CHECKING:
    from typing_extensions import Self

_MADE_BY_ATTACH = "CheckpointManager.attach(model, optimizers, output_dir='runs/clicks', save_interval=100)"


class CheckpointManager(Resumable):
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
        async_save: whether training goes on while a checkpoint that :meth:`step` began is written; and what to do when
            a save is due while one is under way: ``"wait"`` for it, as True does, ``"skip"`` the new one, or
            ``"latest"``: remember it, and save as soon as the other is done, at the step of that moment.
        ephemeral: when to make checkpoints between the others, of which only the newest stays, and only until a
            regular one is there; steps or a policy.
        save_on_signal: signals, such as ``("SIGTERM", "SIGUSR1")`` or their numbers, that let the next :meth:`step`
            save; after that the process ends as the signal asks. SIGUSR1 and SIGUSR2 only save. A
            :class:`recckpt.policies.OnSignal` limits how long that may take.
        on_save_error: what the error of a save does that :meth:`step`, :meth:`window` or :meth:`epoch` began:
            ``"raise"`` stops training; ``"warn"`` logs it, and a function gets it, on every rank, and training goes on,
            until three saves in a row have failed, or as many as a :class:`recckpt.policies.Tolerate` says. It is in
            :attr:`counts` and ``recckpt watch``. :meth:`save`, :meth:`close` and the end of ``with`` raise.
        save_at_start: whether ``with`` saves before training starts, where there was nothing to restore.
        step_prefix: of the names of checkpoints: ``"model"`` for ``model_<step>``.

    Raises:
        TypeError: ``saver`` is not a :class:`recckpt.Saver`.
        ValueError: another argument is invalid.
    """

    @answers_by(f"{_MADE_BY_ATTACH}, or CheckpointManager(saver, save_interval=100)")
    def __init__(
        self,
        saver: Saver,
        save_interval: int | When,
        *,
        shard_id: int | None = None,
        shard_num: int | None = None,
        async_save: bool | Backpressure = False,
        ephemeral: int | When | None = None,
        save_on_signal: Signals | OnSignal = (),
        on_save_error: OnSaveError = "raise",
        save_at_start: bool = False,
        step_prefix: str = layout.STEP_PREFIX,
    ) -> None:
        super().__init__()
        if not isinstance(saver, Saver):
            other = f"{saver!r:.100}" if isinstance(saver, str) else f"a {type(saver).__name__}"
            raise TypeError(f"saver must be a recckpt.Saver, found {other}: {_MADE_BY_ATTACH} makes one")
        options = ManagerOptions(
            save_interval, async_save, ephemeral, save_on_signal, on_save_error, save_at_start, step_prefix
        )
        self._saver, self._options = saver, options
        self._run = run = Run(step_prefix=step_prefix)
        self._ranks = partial(saver.ranks.of, shard_id, shard_num)
        sides, candidates = guests_of(
            saver, options.regular, run.moment(), lambda: this_rank(shard_id, shard_num)[0] == 0
        )
        self._restorer = Restorer(saver.loader, run, self._ranks, lambda: saver.max_keep, candidates)
        watch, reload = SignalWatch(options.on_signal), self._restorer.reload_dynamic
        self._autosave = Autosave(saver, run, self._ranks, options, watch, sides=sides, reload=reload)
        saver.counted_run.follow(lambda: (run.global_step, run.state), run.step_prefix)

    @classmethod
    @answers_by("attach(model, [optimizers], output_dir='runs/clicks', save_interval=100)")
    def attach(
        cls,
        model: nn.Module,
        optimizers: OneOrMany[Optimizer] = None,
        *,
        schedulers: OneOrMany[Any] = None,
        loader: OneOrMany[Any] = None,
        output_dir: str | os.PathLike[str],
        save_interval: int | When,
        max_keep: int | Keep | None = 2,
        async_save: bool | Backpressure = True,
        deltas: bool | Deltas = True,
        tables: TablesOption = FIND_ALL,
        concurrency: int = 4,
        near: Near | None = None,
        choose: Choose | None = None,
        transfers: Transfers | None = None,
        on_save: OnSave | None = None,
        run: str | None = None,
        metadata: State = None,
        shard_id: int | None = None,
        shard_num: int | None = None,
        ephemeral: int | When | None = None,
        save_on_signal: Signals | OnSignal = (),
        on_save_error: OnSaveError = "raise",
        save_at_start: bool = False,
        step_prefix: str = layout.STEP_PREFIX,
    ) -> Self:
        """Return a manager of all that a run consists of; restores nothing, and logs in a line what it saves and how.

        The tables of the model are found, those of ``nn.Embedding`` and TorchRec too
        (:func:`recckpt.live.live_tables`), and each optimizer is known by what it trains. Call it on each rank once the
        model is wrapped and the optimizers are made. Collective where TorchRec has sharded the model.

        Several things may be given by name, ``{"towers": adam}``; names stand in checkpoints. Without a name they are
        ``dense_optim``, ``scheduler`` and ``loader``, the second of a list ``dense_optim_1``. Register what else has
        state, such as a scaler, by :meth:`register_for_checkpointing`.

        Args:
            model: any module.
            optimizers: all that train it, one of tables (:mod:`recckpt.sparse`) and any number of others.
            schedulers: those of the optimizers.
            loader: what has a position in the data, as :meth:`register_io_state` takes it; several, too. Where it is
                None, a restore names the loaders that shuffle among the variables of the calling code; ``()`` for none.
            output_dir: where checkpoints go, as of :class:`recckpt.Saver`.
            save_interval: steps between checkpoints, or a policy of :mod:`recckpt.policies.when`.
            max_keep: how many to keep: by default two, so that a damaged newest one leaves another.
            async_save: whether training goes on while a checkpoint is written: yes by default, see docs/async.md.
            deltas: whether a save writes only what has changed: yes by default, see docs/deltas.md.
            tables: arguments of ``live_tables``, such as ``{"min_rows": 100}``, or what it has returned; None leaves
                embeddings that are not recckpt's dense.
            concurrency: threads that read and write tables.
            near: when to make near saves, and where they go; see docs/near.md.
            choose: which slots and rows of tables are saved, and how narrow; None for all as they are.
            transfers: how files travel, and how long ranks wait for each other.
            on_save: called with the :class:`recckpt.SaveInfo` of each save.
            run: what metrics call this job.
            metadata: what the run is about, such as ``{"owner": "ads", "data": "v3"}``, as JSON has it: kept with each
                checkpoint, and by a restore, entry by entry where this call has none of that name.
            shard_id: number of this rank, as of :class:`recckpt.CheckpointManager`; so are all that follow.
            shard_num: number of ranks.
            ephemeral: when to make checkpoints of which only the newest stays.
            save_on_signal: signals that let the next step save.
            on_save_error: what the error of a save does that a step began.
            save_at_start: whether ``with`` saves before training starts.
            step_prefix: of the names of checkpoints.

        Raises:
            TypeError: ``model`` is not a module, or an argument is missing or unknown.
            ValueError: something is not saved as it is, or not known; all of it, before anything is made. Or a signal
                that cannot be caught, once the output dir is made.
            OSError: the output dir cannot be written.
        """
        place = os.fspath(output_dir) if isinstance(output_dir, os.PathLike) else output_dir
        saver = partial(Saver, output_dir=place, max_keep=max_keep, concurrency=concurrency, deltas=deltas)
        saver = partial(saver, near=near, choose=choose, transfers=transfers, on_save=on_save, run=run)
        manager = partial(cls, save_interval=save_interval, shard_id=shard_id, shard_num=shard_num)
        manager = partial(manager, async_save=async_save, ephemeral=ephemeral, save_on_signal=save_on_signal)
        manager = partial(manager, on_save_error=on_save_error, save_at_start=save_at_start, step_prefix=step_prefix)
        known = as_metadata(metadata)  # before anything is made
        made = attached(saver, manager, model, optimizers, schedulers=schedulers, loader=loader, tables=tables)
        made._looks_for_loaders = loader is None
        made._run.describe(known)
        return made

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise unknown_attribute(self, name)

    @property
    def saver(self) -> Saver:
        """What is saved, and where."""
        return self._saver

    @property
    def save_interval(self) -> int | When:
        """Steps between checkpoints, or the policy."""
        return self._options.save_interval

    @property
    def global_step(self) -> int:
        """Steps so far, those of the restored run included."""
        return self._run.global_step

    @property
    def windows(self) -> int:
        """Windows of the data that have ended, those of the restored run included."""
        return self._run.windows

    @property
    def epochs(self) -> int:
        """Epochs that have ended, those of the restored run included."""
        return self._run.epochs

    @property
    def metadata(self) -> Mapping[str, StateValue]:
        """What the run is about, as :meth:`attach` was given it, and what a restored checkpoint has beside that.

        Assign all of it, on all ranks, to have it in the checkpoints that follow.

        Raises:
            TypeError, ValueError: it is set to what JSON does not have.
        """
        return self._run.metadata

    @metadata.setter
    def metadata(self, metadata: State) -> None:
        self._run.describe(as_metadata(metadata))

    @property
    def event_time(self) -> float | None:
        """The latest time of an event in the data so far, in seconds since 1970; None where none is known.

        :meth:`step` moves it on. Assign it, on all ranks, to give it before the first batch, to set it back after a
        wrong record, or on to where no clock is; a restored one takes its place.

        Raises:
            TypeError, ValueError: it is set to what is no time.
        """
        return self._run.event_time

    @event_time.setter
    def event_time(self, event_time: float) -> None:
        checked = checked_event_time(event_time)
        if checked is None:
            raise ValueError(f"event_time must be a number of seconds since 1970, found {event_time!r}")
        with self._turn():
            self._run.stand_at(checked)
            self._autosave.note_time()

    @property
    def counts(self) -> SaveCounts:
        """What became of the saves so far."""
        return self._autosave.counts

    def register_for_checkpointing(self, name: str, obj: Any, *, per_rank: bool = False) -> None:
        """Save an object beside the model; see :meth:`recckpt.Saver.register_for_checkpointing`."""
        self._saver.register_for_checkpointing(name, obj, per_rank=per_rank)

    def register_io_state(self, name: str, obj: Any) -> None:
        """Save the position of a dataset; see :meth:`recckpt.Saver.register_io_state`."""
        self._saver.register_io_state(name, obj)

    @answers_by("step(metrics={'auc': 0.7}), which counts by itself; a loop that counts calls save(STEP)")
    def step(
        self,
        *,
        state: State = None,
        metrics: Metrics = None,
        event_time: float | None = None,
    ) -> None:
        """Count a step, and save if it is time; call it after each batch.

        Args:
            state: numbers, strings, and lists and dicts of these, for readers without torch; kept with the checkpoint,
                if this step makes one.
            metrics: name -> number, for policies of what to keep and when to save; kept in the same place.
            event_time: the latest time of an event in this batch, in seconds since 1970. One that is a day ahead of
                the clock, and of the last, is not taken, with a warning.

        Raises:
            TypeError: ``event_time`` is not a number, or ``state`` or ``metrics`` not a mapping.
            ValueError: ``event_time`` is beyond the year 5000, as milliseconds are; an entry of ``state`` is none of
                these, a metric not a number, or either is called ``event_time``, ``windows`` or ``epochs``. One rank
                alone has not counted a refused step; of several all raise ``SaveFailedError`` at a save.
            SaveFailedError: this save, or the one before in the background; the next may well work.
            WriterFencedError: another process has taken the output dir over.
        """
        with self._turn():
            self._autosave.count("step", state, metrics, event_time)

    def should_save(self, step: int | None = None, *, metrics: Metrics = None) -> bool:
        """Say whether a step is to be saved, for loops that save by :meth:`save`; saves and counts nothing.

        It is where ``save_interval`` or ``ephemeral`` says so or a signal that ends the process came, unless a
        checkpoint that stays has it, or the run is past it.

        Args:
            step: of a loop that counts its own steps; None for :attr:`global_step`.
            metrics: as of :meth:`step`, for policies.
        """
        with self._turn():
            return self._autosave.should_save(step, metrics)

    def window(self, *, state: State = None, metrics: Metrics = None) -> None:
        """Count a window of the data, and save if it is time; call it once at its end, after its last step.

        Where the last step is in a checkpoint already, that does not hold the end of the window: a save that is due
        takes its place. Arguments and errors are as of :meth:`step`.
        """
        with self._turn():
            self._autosave.count("window", state, metrics, None)

    def epoch(self, *, state: State = None, metrics: Metrics = None) -> None:
        """Count an epoch, and save if it is time; call it once at its end, after its last step and window.

        Arguments and errors are as of :meth:`step`.
        """
        with self._turn():
            self._autosave.count("epoch", state, metrics, None)

    @answers_by("save(), or save(300, metrics={'auc': 0.7}) in a loop that counts its own steps")
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

    def all_steps(self) -> list[int]:
        """Return the steps that :meth:`restore` can be given, in order of commit. Not collective.

        They are those of committed checkpoints that a manager with this ``step_prefix`` named; damaged ones are left
        out, with an error in the log.

        Raises:
            CorruptCheckpointError: there are only damaged ones.
            FormatVersionError: a newer recckpt wrote one.
        """
        self._check_process()
        steps = (
            layout.step_of_id(checkpoint.ckpt_id, self._run.step_prefix)
            for checkpoint in reversed(newest_first(self._saver.storage))
        )
        return [step for step in steps if step is not None]

    def latest_step(self) -> int | None:
        """Return the last of :meth:`all_steps`, None where there is no checkpoint; raises as it. Not collective."""
        return max(self.all_steps()[-1:], default=None)

    def delete(self, step: int) -> None:
        """Remove the checkpoint of a step, and what it superseded. Collective: all ranks name the same step.

        Rotation's rules hold: what is pinned, what deltas are read from and the only checkpoint stay. Where the next
        delta would stand on it, the next save is full. The run stays where it is, whichever step that was of.

        Raises:
            TypeError: ``step`` is not an int.
            CheckpointInUseError: it stays; says why, and what to do.
            CheckpointNotFoundError, CorruptCheckpointError: this step is not committed, or damaged.
            SaveFailedError: the save that was under way has failed; nothing was deleted.
            WriterFencedError: another process has taken the output dir over.
            RecckptError, OSError: the storage failed; delete it again.
        """
        with self._turn():
            self._autosave.settle_on_all()
            self._saver.removal.delete(self._ranks(), self._run.id_of(step))
            if step == self._run.global_step:
                self._run.note_saved(False)

    def forget(self, table: str, ids: Iterable[int] | Tensor) -> list[Forgotten]:
        """Remove ids from a table: from its rows, and from all that lies in the output dir; see docs/forget.md.

        Collective: all ranks name the same ids. The next save is a full one, since a delta would name them as deleted.

        Args:
            table: its name, in the model or in any checkpoint.
            ids: int64, in any order, such as a tensor.

        Returns:
            What was done, for each request that was carried out; that of this call is the last.

        Raises:
            TypeError, ValueError: there is no such table, or no id was passed; nothing was changed.
            CorruptCheckpointError: a checkpoint is damaged, so that what it holds is unknown.
            WriterFencedError: another process has taken the output dir over.
            RecckptError, OSError: the storage failed, or a rank; the next save goes on with it.
        """
        with self._turn():
            self._autosave.settle_on_all()
            return self._saver.removal.forget(self._ranks(), self._saver.model, table, ids)

    def pin(self, step: int) -> None:
        """Keep the checkpoint of a step until it is unpinned, whatever ``max_keep`` says. Not collective.

        Raises:
            TypeError: ``step`` is not an int.
            CheckpointNotFoundError: this step is not committed.
        """
        self._check_process()
        rotation.pin(self._saver.storage, self._run.id_of(step))

    def unpin(self, step: int) -> None:
        """Let rotation have the checkpoint of a step again, at the next save; no error where it is not pinned."""
        self._check_process()
        rotation.unpin(self._saver.storage, self._run.id_of(step))

    def wait_until_finished(self) -> None:
        """Wait for the save that is under way; the manager goes on. Collective where there are several ranks.

        Raises:
            SaveFailedError, WriterFencedError: it failed, and its error was not raised yet.
        """
        with self._turn():
            self._autosave.settle_on_all()

    def reached_preemption(self) -> bool:
        """Say whether a signal of ``save_on_signal`` came that ends the process, on any rank.

        The next :meth:`step`, or the end of ``with``, saves and ends it: a loop that does not come to a step soon may
        stop there. Collective where there are several ranks.
        """
        with self._turn():
            return self._autosave.reached_preemption()

    def close(self) -> None:
        """Wait for the save that is under way, and give signals back what they did before.

        A save that ``async_save="latest"`` has put off is made first, of this step. Collective then, where there are
        several ranks.

        Raises:
            SaveFailedError, WriterFencedError: that save failed.
        """
        with self._turn():
            self._autosave.close()

    @shown
    def __repr__(self) -> str:
        counts = self._autosave.counts
        failed = f", of which {count(counts.failed)} failed" if counts.failed else ""
        saves = f"{plural(counts.begun, 'save')} begun{failed}"
        where = f"at step {count(self._run.global_step)}, save_interval={self.save_interval!r}"
        return f"{where}, {saves}, saver={self._saver!r}"

    def __enter__(self) -> CheckpointManager:
        with self._turn():
            if self._options.save_at_start and self._run.global_step == 0 and not self._restorer.passes_over():
                self.save()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._turn():
            try:
                if error is None:
                    self._autosave.finish()
                    if not self._autosave.is_ending:  # or it goes on elsewhere; others are not asked: one may be gone
                        self._saver._note_end(self._run.global_step)
            except BaseException as failure:
                error = failure
                raise
            finally:
                self._autosave.close(error)

    def _turn(self) -> AbstractContextManager[Any]:
        self._check_process()
        return self._saver._turn()  # one lock for both: two could each be held by a thread that waits for the other
