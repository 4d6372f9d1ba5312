"""What a run takes up from checkpoints: its own newest one, and what a model bank adds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, get_args

from recckpt.load.report import LoadPlan, LoadReport
from recckpt.manager.answers import answers
from recckpt.manager.autosave import Autosave
from recckpt.manager.habits import RESTORE_INSTEAD, RESTORE_LINE
from recckpt.manager.resume import Restorer
from recckpt.manager.run_state import Run
from recckpt.parallel.one_process import OneProcess
from recckpt.parallel.ranks import Ranks
from recckpt.policies.when import When
from recckpt.saver import Saver
from recckpt.text import count, plural, shown

HyperParameters = Literal["load", "keep"]


class Resumable(OneProcess):
    """The loads of a :class:`recckpt.CheckpointManager`; each waits for the save that is under way, and takes turns."""

    _saver: Saver
    _run: Run
    _save_interval: int | When
    _autosave: Autosave
    _restorer: Restorer
    _ranks: Callable[[], Ranks]

    @shown
    def __repr__(self) -> str:
        counts = self._autosave.counts
        failed = f", of which {count(counts.failed)} failed" if counts.failed else ""
        saves = f"{plural(counts.begun, 'save')} begun{failed}"
        where = f"at step {count(self._run.global_step)}, save_interval={self._save_interval!r}"
        return f"{where}, {saves}, saver={self._saver!r}"

    @abstractmethod
    def _turn(self) -> AbstractContextManager[Any]:
        """Return the lock of the manager and its saver."""

    @contextmanager
    def _forgotten(self) -> Iterator[None]:
        """Give the block in which the output dir is read, after what is to be forgotten there was. Collective."""
        left = self._saver.forgetting.before_restore(self._ranks())
        yield
        self._saver.forgetting.after_restore(left, self._saver.model)

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Let the run go on from what the block loads, once what is under way has ended. Collective."""
        with self._turn():
            self._autosave.settle_on_all()
            self._saver.trainers.check_restore(is_logged=self._ranks().rank == 0)
            with self._forgotten():
                yield
            self._autosave.start()

    @answers(RESTORE_LINE, RESTORE_INSTEAD)
    def restore(
        self,
        global_step: int | Literal["latest", "best"] | None = None,
        *,
        load_conf: Mapping[str, Any] | None = None,
        rng: bool = True,
        required: bool = False,
        hyper_parameters: HyperParameters = "load",
        near: bool = True,
    ) -> int:
        """Bring back the newest committed checkpoint or near save, or the checkpoint of one step; return its step.

        A newest checkpoint that turns out damaged is passed over, with an error in the log, for the newest that does
        not stand on what is damaged.

        Args:
            global_step: the step to restore; None or "latest" for the newest; "best" by ``Best`` in ``max_keep``.
            load_conf: what to take; None for everything.
            rng: whether to restore the random generators of torch, CUDA, numpy and Python.
            required: whether it is an error that there is nothing to restore.
            hyper_parameters: ``"load"`` those of the checkpoint, or ``"keep"`` those that dense and sparse optimizers
                have now, and the rates that their schedulers were made with; see docs/resume.md.
            near: whether near saves count, of a saver that makes them; those of one step are never looked for.

        Returns:
            The step; 0 where there was nothing to restore.

        Raises:
            CheckpointNotFoundError: no such checkpoint, and ``global_step`` or ``required`` was given.
            CorruptCheckpointError: the checkpoint of ``global_step``, or every one, is damaged.
            FormatVersionError: a newer recckpt wrote one of them.
            StateMismatchError: the checkpoint does not fit the model; nothing has been changed.
            CheckpointRemovedError: time and again another process removed it before it was read.
            PartlyLoadedError: reading failed when tables with rows had been changed; restoring again mends that.
            ValueError: ``hyper_parameters`` is neither, or :meth:`load_model_bank` has replaced them before.
        """
        keeps = _keeps(hyper_parameters)
        with self._loading():
            return self._restorer.restore(
                global_step, load_conf=load_conf, rng=rng, required=required, keeps_settings=keeps, near=near
            )

    def load_model_bank(
        self, bank: Sequence[Mapping[str, Any]] | None, *, hyper_parameters: HyperParameters = "load"
    ) -> LoadReport:
        """Start from other runs, or resume: the own output dir counts as the very last entry of the bank.

        Call it before :meth:`restore`, which then has nothing left to do.

        Args:
            bank: entries ``{"path": ..., "load": [...], "exclude": [...], ...}``; see docs/load.md. None is an
                empty one.
            hyper_parameters: as of :meth:`restore`, where the run resumes.

        Raises:
            ValueError: ``hyper_parameters`` is neither.
            LoadConfError: keys, names or paths that do not exist; all of them, before anything is changed.
            StateMismatchError: state that does not fit the model; all of it.
            CheckpointNotFoundError: a path holds no committed checkpoint.
            CorruptCheckpointError: a file is damaged.
            CheckpointRemovedError, PartlyLoadedError: as :meth:`restore`.
        """
        keeps = _keeps(hyper_parameters)
        with self._loading():
            return self._restorer.load_model_bank([] if bank is None else bank, keeps_settings=keeps)

    def plan(self, bank: Sequence[Mapping[str, Any]] | None) -> LoadPlan:
        """Say what :meth:`load_model_bank` would do; reads no rows and changes nothing.

        Raises:
            LoadConfError, StateMismatchError, CheckpointNotFoundError: as it would.
        """
        with self._turn():
            return self._restorer.plan([] if bank is None else bank)

    def reload_dynamic(self) -> list[LoadReport]:
        """Load the dynamic entries of the bank whose path has another checkpoint now than the one taken.

        Called by :meth:`step`, :meth:`window` and :meth:`epoch` when they save, or as ``reload_interval`` says. An
        entry takes the names that it won when the bank was loaded.

        Raises:
            StateMismatchError: the new checkpoint does not fit the model; nothing has been changed.
            CheckpointRemovedError, PartlyLoadedError: as :meth:`restore`.
        """
        with self._turn():
            return self._restorer.reload_dynamic()


def _keeps(hyper_parameters: object) -> bool:
    if hyper_parameters not in get_args(HyperParameters):
        raise ValueError(f"hyper_parameters must be 'load' or 'keep', found {hyper_parameters!r:.100}")
    return hyper_parameters == "keep"
