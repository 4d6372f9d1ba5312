"""The checkpoints of a run as its manager sees them: which there are, and which stay or go whatever the policy says."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from recckpt.forgetting.forgetting import Forgotten
from recckpt.manager.autosave import Autosave
from recckpt.manager.run_state import Run
from recckpt.output_dir import rotation
from recckpt.output_dir.listing import newest_first
from recckpt.parallel.one_process import OneProcess
from recckpt.parallel.ranks import Ranks
from recckpt.saver import Saver


class OwnCheckpoints(OneProcess):
    """What a :class:`recckpt.CheckpointManager` does with what lies in its output dir."""

    _saver: Saver
    _run: Run
    _autosave: Autosave
    _ranks: Callable[[], Ranks]

    def all_steps(self) -> list[int]:
        """Return the steps that :meth:`restore` can be given, in order of commit. Not collective.

        They are those of committed checkpoints that a manager with this ``step_prefix`` named; damaged ones are left
        out, with an error in the log.

        Raises:
            CorruptCheckpointError: there are only damaged ones.
            FormatVersionError: a newer recckpt wrote one.
        """
        self._check_process()
        steps = (self._run.step_of(checkpoint.ckpt_id) for checkpoint in reversed(newest_first(self._saver.storage)))
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
            self._saver.deletion.delete(self._ranks(), self._run.id_of(step))
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
            return self._saver.forgetting.forget(self._ranks(), self._saver.model, table, ids)

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
