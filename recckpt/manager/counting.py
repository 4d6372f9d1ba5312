"""What a manager counts: steps, windows and epochs, at whose ends it saves when it is time."""

from __future__ import annotations

from recckpt.manager.answers import answers
from recckpt.manager.autosave import Autosave
from recckpt.manager.habits import STEP_INSTEAD, STEP_LINE
from recckpt.manager.run_state import Run
from recckpt.manager.step_arguments import Metrics, State
from recckpt.parallel.one_process import OneProcess
from recckpt.policies.schedule import SaveCounts


class Counting(OneProcess):
    """What a :class:`recckpt.CheckpointManager` counts; collective where there are several ranks."""

    _run: Run
    _autosave: Autosave

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
    def counts(self) -> SaveCounts:
        """What became of the saves so far."""
        return self._autosave.counts

    @answers(STEP_LINE, STEP_INSTEAD)
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
            event_time: the latest time of an event in this batch, in seconds since 1970.

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
        takes its place.

        Args:
            state: as of :meth:`step`.
            metrics: as of :meth:`step`.

        Raises:
            TypeError, ValueError, SaveFailedError, WriterFencedError: as :meth:`step`.
        """
        with self._turn():
            self._autosave.count("window", state, metrics, None)

    def epoch(self, *, state: State = None, metrics: Metrics = None) -> None:
        """Count an epoch, and save if it is time; call it once at its end, after its last step and window.

        Args:
            state: as of :meth:`step`.
            metrics: as of :meth:`step`.

        Raises:
            TypeError, ValueError, SaveFailedError, WriterFencedError: as :meth:`step`.
        """
        with self._turn():
            self._autosave.count("epoch", state, metrics, None)
