"""The manager: counts steps, saves when a save is due, and resumes a run from its newest checkpoint."""

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
    """Saves a run as ``ckpt_<step>`` when a save is due, and restores it.

    Thread-safe: steps, saves and restores of several threads are serialized. A manager belongs to its process: a
    forked child makes its own, or gets :class:`recckpt.errors.ForkedError`.

    As a context manager, it waits at the end of the block for a running save. If the block ends without an error, it
    also saves the last step, if a step was counted or a near save was restored.

    Args:
        saver: the saver, which knows what to save, and where.
        save_interval: steps between checkpoints, or a policy of :mod:`recckpt.policies.when`.
        shard_id: number of this rank; None: from the process group, else from the environment (RANK), else 0.
        shard_num: number of ranks; None: from the process group, else from WORLD_SIZE, else 1. Above 1, ``step``,
            ``save`` and ``restore`` are collective.
        async_save: whether training continues while a checkpoint is written; and what to do if a save is due while
            another is running: ``"wait"`` for it, as True does, ``"skip"`` the new one, or
            ``"latest"``: save as soon as the running one has ended, at the step reached by then.
        ephemeral: when to make additional checkpoints; only the newest of them is kept, and only until a
            regular one is committed. Steps or a policy.
        save_on_signal: signals, such as ``("SIGTERM", "SIGUSR1")`` or their numbers, that make the next :meth:`step`
            save; then the process ends as the signal demands. SIGUSR1 and SIGUSR2 only save. A
            :class:`recckpt.policies.OnSignal` limits how long that may take.
        on_save_error: what to do with errors of saves begun by :meth:`step`, :meth:`window` or :meth:`epoch`:
            ``"raise"`` them; ``"warn"`` logs them; a function is called with them on every rank. Training continues
            until three saves in a row have failed, or the number in a :class:`recckpt.policies.Tolerate`. See them in
            :attr:`counts` and ``recckpt watch``. :meth:`save`, :meth:`close` and the end of ``with`` raise.
        save_at_start: whether ``with`` saves before training starts, if there was nothing to restore.
        step_prefix: prefix of checkpoint names: ``"model"`` for ``model_<step>``.

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
        """Return a manager of everything in a run; restores nothing, and logs in one line what it saves and how.

        Finds the tables of the model, including those of ``nn.Embedding`` and TorchRec
        (:func:`recckpt.live.live_tables`), and recognises each optimizer by what it trains. Call it on each rank after
        the model is wrapped and the optimizers are made. Collective if TorchRec has sharded the model.

        Several objects may be given by name, ``{"towers": adam}``; checkpoints use the names. Without a name they are
        ``dense_optim``, ``scheduler`` and ``loader``; the second of a list is ``dense_optim_1``. Register other
        objects with state, such as a scaler, by :meth:`register_for_checkpointing`.

        Args:
            model: any module.
            optimizers: all that train it: at most one of tables (:mod:`recckpt.sparse`) and any number of others.
            schedulers: learning-rate schedulers of the optimizers.
            loader: one or several objects with a position in the data, as for :meth:`register_io_state`. If None, a
                restore warns of shuffling loaders among the caller's variables; ``()`` for no loader.
            output_dir: where checkpoints go, as for :class:`recckpt.Saver`.
            save_interval: steps between checkpoints, or a policy of :mod:`recckpt.policies.when`.
            max_keep: how many to keep: by default two, so that one is left if the newest is damaged.
            async_save: whether training continues while a checkpoint is written, the default; see docs/async.md.
            deltas: whether a save writes only what changed, the default; see docs/deltas.md.
            tables: arguments of ``live_tables``, such as ``{"min_rows": 100}``, or its result; None leaves
                embeddings of other libraries dense.
            concurrency: threads that read and write tables.
            near: when to make near saves, and where they go; see docs/near.md.
            choose: which slots and rows of tables are saved, in which dtypes; None for all of them, unchanged.
            transfers: how files are sent, and how long ranks wait for each other.
            on_save: called with the :class:`recckpt.SaveInfo` of each save.
            run: the name of this job in metrics.
            metadata: facts about the run, such as ``{"owner": "ads", "data": "v3"}``, in JSON types: stored with each
                checkpoint; a restore adds the checkpoint's entries that this call lacks.
            shard_id: number of this rank, as for :class:`recckpt.CheckpointManager`, like all arguments below.
            shard_num: number of ranks.
            ephemeral: when to make additional checkpoints; only the newest of them is kept.
            save_on_signal: signals that make the next step save.
            on_save_error: what to do with errors of saves that a step began.
            save_at_start: whether ``with`` saves before training starts.
            step_prefix: prefix of checkpoint names.

        Raises:
            TypeError: ``model`` is not a module, or an argument is missing or unknown.
            ValueError: an object would not be saved, or is unknown; lists all such problems, before anything is made.
                Or a signal cannot be caught, after the output dir was made.
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
        """The saver, which knows what to save, and where."""
        return self._saver

    @property
    def save_interval(self) -> int | When:
        """Steps between checkpoints, or the policy."""
        return self._options.save_interval

    @property
    def global_step(self) -> int:
        """Number of steps so far, including the steps of the restored run."""
        return self._run.global_step

    @property
    def windows(self) -> int:
        """Number of windows of the data that have ended, including windows of the restored run."""
        return self._run.windows

    @property
    def epochs(self) -> int:
        """Number of epochs that have ended, including epochs of the restored run."""
        return self._run.epochs

    @property
    def metadata(self) -> Mapping[str, StateValue]:
        """Facts about the run, as given to :meth:`attach`, and further entries of a restored checkpoint.

        To change it, assign a whole mapping on all ranks; later checkpoints store it.

        Raises:
            TypeError, ValueError: the assigned value cannot be stored as JSON.
        """
        return self._run.metadata

    @metadata.setter
    def metadata(self, metadata: State) -> None:
        self._run.describe(as_metadata(metadata))

    @property
    def event_time(self) -> float | None:
        """The latest time of an event in the data so far, in seconds since 1970; None if unknown.

        :meth:`step` updates it. Assign a time, on all ranks, to set it before the first batch, to set it back after a
        wrong record, or to set it ahead of the clock. A restore replaces it.

        Raises:
            TypeError, ValueError: the assigned value is not a time.
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
        """The numbers of saves begun, skipped and failed so far."""
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
        """Count a step, and save if a save is due; call it after each batch.

        Args:
            state: numbers, strings, and lists and dicts of these, for readers without torch; kept with the checkpoint,
                if this step makes a checkpoint.
            metrics: name -> number, for policies of what to keep and when to save; stored like ``state``.
            event_time: the latest time of an event in this batch, in seconds since 1970. A time that is a day ahead of
                the clock and of the previous one is ignored, with a warning.

        Raises:
            TypeError: ``event_time`` is not a number, or ``state`` or ``metrics`` not a mapping.
            ValueError: ``event_time`` is beyond the year 5000, as milliseconds are; an entry of ``state`` has another
                type, a metric is not a number, or either is named ``event_time``, ``windows`` or ``epochs``. One rank
                alone does not count a refused step; several ranks all raise ``SaveFailedError`` at a save.
            SaveFailedError: this save, or the previous background save, failed; the next save may succeed.
            WriterFencedError: another process has taken the output dir over.
        """
        with self._turn():
            self._autosave.count("step", state, metrics, event_time)

    def should_save(self, step: int | None = None, *, metrics: Metrics = None) -> bool:
        """Return whether a step is due to be saved, for loops that call :meth:`save`; saves and counts nothing.

        A step is due if ``save_interval`` or ``ephemeral`` selects it, or a signal that ends the process was received.
        No step is due if a checkpoint that is not ephemeral already has it, or the run is past it.

        Args:
            step: the step, in a loop that counts its own steps; None for :attr:`global_step`.
            metrics: as for :meth:`step`, for policies.
        """
        with self._turn():
            return self._autosave.should_save(step, metrics)

    def window(self, *, state: State = None, metrics: Metrics = None) -> None:
        """Count a window of the data, and save if a save is due; call it once at its end, after its last step.

        A checkpoint of the last step does not contain the end of the window: a save that is due replaces that
        checkpoint. Arguments and errors are as for :meth:`step`.
        """
        with self._turn():
            self._autosave.count("window", state, metrics, None)

    def epoch(self, *, state: State = None, metrics: Metrics = None) -> None:
        """Count an epoch, and save if a save is due; call it once at its end, after its last step and window.

        Arguments and errors are as for :meth:`step`.
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
        """Save this step now, and wait; if a checkpoint already has this step, log that and return None.

        A checkpoint of this step that another branch of the run left behind is superseded.

        Args:
            step: the step, in a loop that counts its own steps and does not call :meth:`step`.
            state: numbers, strings, and lists and dicts of these, for readers without torch.
            metrics: name -> number, for policies of what to keep.

        Raises:
            TypeError, ValueError: as :meth:`step`; or ``step`` is not an int, or the run is past it.
            SaveFailedError: this save, or the previous background save, failed; the next save may succeed.
            WriterFencedError: another process has taken the output dir over.
        """
        with self._turn():
            return self._autosave.save(state, metrics, step)

    def all_steps(self) -> list[int]:
        """Return the steps that can be passed to :meth:`restore`, in order of commit. Not collective.

        These are the steps of committed checkpoints of a manager with this ``step_prefix``; damaged ones are left
        out, with an error in the log.

        Raises:
            CorruptCheckpointError: all of them are damaged.
            FormatVersionError: a newer recckpt wrote one of them.
        """
        self._check_process()
        steps = (
            layout.step_of_id(checkpoint.ckpt_id, self._run.step_prefix)
            for checkpoint in reversed(newest_first(self._saver.storage))
        )
        return [step for step in steps if step is not None]

    def latest_step(self) -> int | None:
        """Return the last of :meth:`all_steps`, or None without checkpoints; raises the same errors. Not collective."""
        return max(self.all_steps()[-1:], default=None)

    def delete(self, step: int) -> None:
        """Remove a step's checkpoint and the checkpoints that it superseded. Collective: all ranks pass the same step.

        Rotation's rules hold: pinned checkpoints, bases of deltas and the only checkpoint stay. If the next delta would
        be based on the removed checkpoint, the next save is full. The run stays at its present step.

        Raises:
            TypeError: ``step`` is not an int.
            CheckpointInUseError: the checkpoint cannot be removed; the message gives the reason and a remedy.
            CheckpointNotFoundError, CorruptCheckpointError: there is no such checkpoint, or it is damaged.
            SaveFailedError: the running save failed; nothing was deleted.
            WriterFencedError: another process has taken the output dir over.
            RecckptError, OSError: the storage failed; call :meth:`delete` again.
        """
        with self._turn():
            self._autosave.settle_on_all()
            self._saver.removal.delete(self._ranks(), self._run.id_of(step))
            if step == self._run.global_step:
                self._run.note_saved(False)

    def forget(self, table: str, ids: Iterable[int] | Tensor) -> list[Forgotten]:
        """Remove ids from a table: from its rows, and from all files in the output dir; see docs/forget.md.

        Collective: all ranks pass the same ids. The next save is full, because a delta would list the ids as deleted.

        Args:
            table: the name of a table in the model or in any checkpoint.
            ids: int64 ids in any order, such as a tensor.

        Returns:
            One result per request that was carried out; the last result is for this call.

        Raises:
            TypeError, ValueError: there is no such table, or no id was passed; nothing was changed.
            CorruptCheckpointError: a checkpoint is damaged, so its ids are unknown.
            WriterFencedError: another process has taken the output dir over.
            RecckptError, OSError: the storage or a rank failed; the next save continues the request.
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
        """Allow rotation to remove the checkpoint of a step again, at the next save; no error if it is not pinned."""
        self._check_process()
        rotation.unpin(self._saver.storage, self._run.id_of(step))

    def wait_until_finished(self) -> None:
        """Wait for a running save; the manager can still be used afterwards. Collective among several ranks.

        Raises:
            SaveFailedError, WriterFencedError: the save failed, and its error has not been raised yet.
        """
        with self._turn():
            self._autosave.settle_on_all()

    def reached_preemption(self) -> bool:
        """Return whether any rank received a signal of ``save_on_signal`` that ends the process.

        The next :meth:`step`, or the end of ``with``, saves and ends the process. A loop whose next step takes long can
        stop when this returns True. Collective among several ranks.
        """
        with self._turn():
            return self._autosave.reached_preemption()

    def close(self) -> None:
        """Wait for a running save, and restore the previous signal handlers.

        If ``async_save="latest"`` has put off a save, the present step is saved first; this is collective among several
        ranks.

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
                    if not self._autosave.is_ending:  # then the run continues elsewhere; not collective
                        self._saver._note_end(self._run.global_step)
            except BaseException as failure:
                error = failure
                raise
            finally:
                self._autosave.close(error)

    def _turn(self) -> AbstractContextManager[Any]:
        self._check_process()
        return self._saver._turn()  # one lock: two could each be held by a thread that waits for the other
