"""Who looks at the rows of a store: the snapshots that copy a row before it changes, and the marks that note it."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from recckpt.sparse.table.column import Column
from recckpt.sparse.table.mark_set import HasMarkSets, MarkSet
from recckpt.sparse.table.pre_images import Log
from recckpt.sparse.table.snapshot import IdImages, Logs, RowIds, Snapshot
from recckpt.types import EMBEDDING

Int64s = npt.NDArray[np.int64]
_SPARE_BYTES, _SPARE_ID_BYTES = 256 << 20, 16 << 20  # of logs, kept for the next: fresh memory is slow


class Observers:
    """The snapshots and marks of one store, each for as long as it is held. Used under the lock of the store."""

    def __init__(self) -> None:
        self._snapshots: list[weakref.ref[Snapshot]] = []
        self._marks: list[weakref.ref[HasMarkSets]] = []
        self._spare_logs: Logs | None = None

    @property
    def has_snapshot(self) -> bool:
        """Whether rows are copied aside before they change."""
        return any(reference() is not None for reference in self._snapshots)

    @property
    def has_marks(self) -> bool:
        """Whether anything marks single rows."""
        return any(not marks.is_replaced for marks in self.mark_sets())

    def snapshot(
        self, name: str, n_rows: int, ids: Column | RowIds, columns: Mapping[str, Column], slots: Collection[str] | None
    ) -> Snapshot:
        """Return the first ``n_rows`` rows as they are now, with some ``slots`` of the columns, or with all.

        Args:
            name: the table.
            n_rows: of the table.
            ids: a column that may change, or ids that stay as they are.
            columns: by the names of slots.
            slots: those that are read.
        """
        names = sorted(columns, key=lambda slot: (slot != EMBEDDING, slot))
        columns = {slot: columns[slot] for slot in names if slots is None or slot in slots}
        specs = tuple(column.spec for column in columns.values())
        logs, self._spare_logs = self._spare_logs, None
        if logs is None or logs.slots.specs != specs:
            logs = Logs(Log([ids.spec]) if isinstance(ids, Column) else None, Log(specs))
        kept_ids = IdImages(n_rows, ids, logs.ids) if isinstance(ids, Column) and logs.ids is not None else ids
        assert not isinstance(kept_ids, Column)
        on_close = partial(self._take_back, logs)
        snapshot = Snapshot(name, n_rows, kept_ids, columns, log=logs.slots, on_close=on_close)
        self._snapshots = [*(r for r in self._snapshots if r() is not None), weakref.ref(snapshot)]
        return snapshot

    def track(self, marks: HasMarkSets) -> None:
        """Note in these marks all that changes."""
        self._marks = [*(r for r in self._marks if r() is not None), weakref.ref(marks)]

    def announce(self, rows: Int64s, n_rows: int, *, with_ids: bool) -> None:
        """Let snapshots copy, and marks mark, ``rows``, all different where there is a snapshot, that change now.

        ``n_rows`` is how many the store has; ``with_ids`` says that the rows are about to belong to other ids.
        """
        self.keep(rows, with_ids=with_ids)
        self.mark(rows, n_rows)

    def mark(self, rows: Int64s, n_rows: int) -> None:
        """Let marks mark rows, of ``n_rows``."""
        for marks in self.mark_sets():
            marks.mark(rows, n_rows)

    def keep(self, rows: Int64s, *, with_ids: bool) -> None:
        """Let snapshots copy rows aside that are about to change."""
        for reference in self._snapshots:
            snapshot = reference()
            if snapshot is not None and len(rows):
                snapshot.keep_rows(rows)
                if with_ids:
                    snapshot.keep_ids(rows)

    def replaced(self) -> None:
        """Let marks take all rows for changed."""
        for marks in self.mark_sets():
            marks.replace()

    def mark_sets(self) -> list[MarkSet]:
        """Return all sets in which a change is to be marked."""
        return [some for reference in self._marks if (marks := reference()) is not None for some in marks.sets]

    def fail_snapshots(self, error: Exception) -> None:
        """Let whoever still reads a snapshot get this error: rows changed before they were copied aside."""
        for reference in self._snapshots:
            snapshot = reference()
            if snapshot is not None:
                snapshot.fail(error)

    def forget_snapshots(self) -> None:
        """Copy nothing aside any more for the snapshots of now."""
        self._snapshots = []

    def _take_back(self, logs: Logs) -> None:
        """Keep some of the memory of a snapshot that is over for the next one."""
        if logs.ids is not None:
            logs.ids.forget(_SPARE_ID_BYTES)
        logs.slots.forget(_SPARE_BYTES)
        self._spare_logs = logs
