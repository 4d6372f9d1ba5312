"""The date of the tables: where the run is, which rows that they look up next get."""

from __future__ import annotations

from recckpt.manager.run_state import Run
from recckpt.save.arguments import tables_in
from recckpt.saver import Saver


class TableDates:
    """Dates the tables of a saver's model by a run."""

    def __init__(self, saver: Saver, run: Run) -> None:
        self._saver, self._run = saver, run
        self.look_again()

    def look_again(self) -> None:
        """Date the tables that the model has now; there may be new ones."""
        self._tables = tables_in(self._saver.model)
        self.set()

    def set(self) -> None:
        """Date the tables."""
        for table in self._tables:
            table.step = self._run.global_step
            if self._run.event_time is not None:  # else that of the table stays, which may have been set by hand
                table.event_time = self._run.event_time
