"""One table filled from the batches of a chain by several threads at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import numpy as np
import numpy.typing as npt
from torch import Tensor

from recckpt.errors import CorruptCheckpointError
from recckpt.sparse.files.batch_rows import BatchRows
from recckpt.sparse.files.catalogs import count_error
from recckpt.sparse.files.known_ids import KnownIds, LinkRows, RepeatedIdError
from recckpt.sparse.files.load_target import TableLoad
from recckpt.sparse.files.row_filter import RowFilter, numbers
from recckpt.sparse.files.rows_aside import RowsAside, chosen

Int64s = npt.NDArray[np.int64]


class TableFiller:
    """Fills one table from the links of a chain, newest first; ``check`` and ``fill`` from several threads.

    ``expect`` is called first, for each link. Between ``begin_link`` and ``end_link`` it gets the rows of one
    link, either to ``check`` or, after ``start``, to ``fill`` the table.
    """

    def __init__(self, load: TableLoad) -> None:
        self.load = load
        self._target, self._lock = load.target, load.target.lock
        self.n_rows = self.n_filtered = 0
        self._where = load.where.of([spec.name for spec in load.entry.slots])
        self._specs = {spec.name: spec for spec in load.entry.slots if spec.name in load.columns}
        self._known = KnownIds()
        self._is_set = False  # whether the table itself tells which rows are known, and the ids beside it are deletes
        self._newest = ""
        self._initial: Mapping[str, float] = {}  # of slots whose new rows start otherwise during the load
        self._of_link = LinkRows(0)
        self._n_links = self._n_done = self._n_expected = 0
        self._is_started = self._touched = False

    def expect(self, directory: str, n_rows: int) -> None:
        """Count a link, which has so many rows in the batches that are read."""
        self._newest = self._newest or directory
        self._n_links += 1
        self._n_expected += n_rows

    def start(self) -> None:
        """Before the first link, empty the table if it is to be, and make room: nothing moves while threads write."""
        if self._is_started:
            return
        self._is_started, self._known = True, KnownIds()
        if not self.load.with_rows:
            return
        if self.load.empties:
            self._touched = True
            self._target.clear()
            self._target.begin_anew(self.load.fresh)
        takes_all = self._where == RowFilter()
        n_rows = len(self._target) + min(self._n_expected, self.load.entry.rows) if takes_all else None
        self._initial = self._target.start(self.load.ages.missing, n_rows)
        is_aside = self._target.aside is not None
        self._is_set = is_aside and len(self._target) == 0 and (takes_all or self._n_links == 1)

    def begin_link(self) -> None:
        """Take all ids so far for those of newer links."""
        self._known.begin_link()
        self._of_link = LinkRows(len(self._target))

    def end_link(self, deletes: Int64s) -> None:
        """Take the ids that the link deletes for known; after the last link, check how many rows there were."""
        gone = self._known.delete(self._owned(deletes, {})[0])
        if self._is_started:
            self._erase(gone)
        self._n_done += 1
        if self._n_done < self._n_links:
            return
        self._n_done, n_rows = 0, self.n_rows if self._is_set else self._known.n_rows
        self._known, entry = KnownIds(), self.load.entry
        is_whole_chain = not entry.is_whole and not self.load.is_update
        if is_whole_chain and self._target.owns_all and n_rows != entry.rows:  # of a slice it is unknown how many
            raise count_error(self._newest, entry.name, entry.rows, n_rows)

    def end(self) -> None:
        """Let rows that are new from now on start as they did before the load."""
        self._target.end(self._initial)

    def undo(self) -> None:
        """Empty a table that was empty before, or that was to be emptied anyway; others keep what they have taken."""
        if self.load.with_rows:
            self._target.undo(is_cleared=self.load.empties and self._touched)

    @property
    def is_changed(self) -> bool:
        """Whether the table has lost rows or values."""
        return self._touched and not self._target.was_empty

    def check(self, rows: BatchRows) -> int:
        """Refuse rows as ``fill`` would, before ``start``, and change nothing."""
        ids, _ = self._owned(rows.ids, {})
        self._new_rows(ids, {}, rows.path)
        return len(ids)

    def fill(self, rows: BatchRows) -> int:
        """Take those of the rows that the table owns and the filter keeps, and no newer link has named.

        Refuse them where an id comes twice. Return how many the table owns.
        """
        ids, values = self._owned(rows.ids, {name: rows.tensor(spec) for name, spec in self._specs.items()})
        n_own = len(ids)
        self._take(ids, values, rows.path)
        return n_own

    def _take(self, ids: Int64s, rows: dict[str, Tensor], path: str) -> None:
        """Take rows that the table owns."""
        if not self._is_set and (self.load.with_rows or self._n_links > 1):
            ids, rows = self._new_rows(ids, rows, path)
        ids, rows = self._kept(*self._placed(ids, rows))
        self._touched = True
        values = self.load.ages.of_rows(self.load.values_of(rows))
        if not self.load.with_rows:
            self._count(self._target.write_present(ids, values))
        elif self._target.aside is not None:
            # A filter keeps an unknown number of rows: columns grow, and rows move, while no other thread writes them.
            with nullcontext() if self._where == RowFilter() else self._lock:
                self._fill_aside(self._target.aside, ids, values, path)
        else:
            self._count(self._target.merge(ids, values, self.load.dtypes))

    def _count(self, n_rows: int) -> None:
        with self._lock:
            self.n_rows += n_rows

    def _owned(self, ids: Int64s, rows: dict[str, Tensor]) -> tuple[Int64s, dict[str, Tensor]]:
        """Return the rows that the table owns."""
        owned = self._target.owned(ids)
        return (ids, rows) if owned is None else _rows_of(ids, rows, owned)

    def _new_rows(self, ids: Int64s, rows: dict[str, Tensor], path: str) -> tuple[Int64s, dict[str, Tensor]]:
        """Return the rows that no newer link has named."""
        with self._lock, self._refusing(path):
            new = self._known.new_rows(ids)
        return _rows_of(ids, rows, new)

    def _placed(self, ids: Int64s, rows: dict[str, Tensor]) -> tuple[Int64s, dict[str, Tensor]]:
        """Return the rows that the table can have; where the others are not refused, they count as filtered."""
        placed = self._target.placed(ids) if self.load.skips_outside else None
        if placed is None:
            return ids, rows
        with self._lock:
            self.n_filtered += len(ids) - len(placed)
        return _rows_of(ids, rows, placed)

    def _kept(self, ids: Int64s, rows: dict[str, Tensor]) -> tuple[Int64s, dict[str, Tensor]]:
        """Return the rows that the filter keeps."""
        if self._where == RowFilter():
            return ids, rows
        looked_at = {slot: numbers(rows[slot]) for slot in self._where.slots}
        kept = np.flatnonzero(self._where.keeps(ids, looked_at))
        with self._lock:
            self.n_filtered += len(ids) - len(kept)
        self._erase(np.delete(ids, kept))
        return _rows_of(ids, rows, kept)

    def _erase(self, ids: Int64s) -> None:
        """Drop rows that older links gave, if there are any."""
        if self.load.erases and not self._target.was_empty and len(ids):
            self._touched = True
            self._target.erase(ids)

    def _fill_aside(self, aside: RowsAside, ids: Int64s, values: dict[str, Tensor], path: str) -> None:
        """Add rows that the table does not have yet: the ids one thread at a time, then their values."""
        taken = np.arange(len(ids))
        with self._lock, self._refusing(path):
            if self._is_set:
                taken = self._known.without(ids)  # deleted in newer links
            claimed = aside.claim(ids if len(taken) == len(ids) else ids[taken])
            rows = claimed.of_batch
            if self._is_set:
                new = self._of_link.new(ids[taken], rows, len(claimed.ids))
                rows, taken = rows[new], taken[new]
            self.n_rows += len(rows)
        aside.put(claimed, rows, values, None if len(taken) == len(ids) else taken)

    @contextmanager
    def _refusing(self, path: str) -> Iterator[None]:
        """Refuse an id that is twice in a link."""
        try:
            yield
        except RepeatedIdError as error:
            where = f"table {self.load.entry.name!r}"
            raise CorruptCheckpointError(path, where, found=str(error), expected="every id once") from error


def _rows_of(ids: Int64s, values: dict[str, Tensor], rows: Int64s) -> tuple[Int64s, dict[str, Tensor]]:
    return (ids, values) if len(rows) == len(ids) else (ids[rows], chosen(values, rows, len(ids)))
