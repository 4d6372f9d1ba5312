"""Which rows have changed since the base of a saver, by a bit a row that the store sets before a row changes."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from recckpt.format.buckets import bucket_of, distinct
from recckpt.sparse.table.id_index import IdIndex
from recckpt.sparse.table.snapshot import Snapshot, SnapshotIds
from recckpt.sparse.table.store import MarkSet, Store, marked_rows

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class FrozenRows(ABC):
    """A table at the moment of a save, and which of its rows have changed by then since the base.

    Attributes:
        snapshot: all rows.
        base: save id of the checkpoint since which it is known what has changed; None where it is not known.
        erased: the ids that were erased since the base, in pieces; some may be there again.
    """

    snapshot: Snapshot
    base: str | None
    erased: Sequence[Int64s] = ()

    def is_replaced(self, base: str) -> bool:
        """Say whether a delta on the checkpoint with this save id has to hold all rows, for want of marks since."""
        return self.base != base

    @property
    @abstractmethod
    def n_changed(self) -> int:
        """About how many rows and erased ids a delta would hold: for the choice of a full."""

    def delta(self, base: str, *, narrows: bool = True) -> DeltaSource:
        """Return what has changed since this base.

        Where it ``narrows``, the snapshot releases the other rows once it is known which those are; otherwise all can
        be read until :meth:`DeltaSource.narrow`.
        """
        self.check_base(base)

        def bits() -> Bytes:
            bits = self.changed_since(base)
            if narrows:
                self.snapshot.narrow(bits)
            return bits

        return DeltaSource(self.snapshot, bits, self.erased)

    @abstractmethod
    def changed_since(self, base: str) -> Bytes:
        """Return a bit a row, 1 for those that have changed since this base, in whole words; all stay protected."""

    def check_base(self, base: str) -> None:
        """Raise RuntimeError where it is not known what has changed since this base."""
        if self.is_replaced(base):
            raise RuntimeError(f"table {self.snapshot.name!r}: no marks since {base!r}, only since {self.base!r}")

    @abstractmethod
    def committed(self, save_id: str) -> None:
        """Make this checkpoint the base."""

    def failed(self) -> None:  # noqa: B027  # where nothing was begun, nothing ends
        """Keep the base, and all that has changed since."""


class SaverMarks(ABC):
    """What one saver knows of the changes in one store."""

    store: weakref.ref[Store]

    @abstractmethod
    def begin(self, base: str) -> None:
        """Count from now on what changes: the rows are exactly those of the checkpoint with this save id."""

    def is_unchanged(self, base: str) -> bool:
        """Say whether nothing has changed since this base; never wrongly so."""
        return False

    @abstractmethod
    def freeze(
        self, store: Store, name: str, slots: Collection[str] | None, *, keeps_marks: bool = False
    ) -> FrozenRows:
        """Return the rows as they are now, and what has changed until now.

        A near save moves no base and drops no marks, however it ends (rule *keeps_marks*).
        """

    def resume(self, base: str, changed: Int64s, deleted: Int64s) -> bool:
        """Count from a base since which some ids have changed and some are gone; say whether that is possible."""
        return False


class _Since(NamedTuple):
    """The base and what has changed since, and behind it, while a save is under way, what has since that began."""

    base: str | None
    sets: tuple[MarkSet, ...]


class Marks(SaverMarks):
    """What has changed in one store since the base of one saver. The store marks it, under its lock."""

    def __init__(self, store: Store) -> None:
        self.store, self._lock = weakref.ref(store), store.lock
        self._since = _Since(None, (MarkSet(is_replaced=True),))
        store.track(self)

    @property
    def sets(self) -> tuple[MarkSet, ...]:
        """All sets in which a change is to be marked."""
        return self._since.sets

    def begin(self, base: str) -> None:
        with self._lock:
            if (store := self.store()) is not None:
                store.mark_noted()
            self._since = _Since(base, (MarkSet(is_replaced=False),))

    def is_unchanged(self, base: str) -> bool:
        with self._lock:
            if (store := self.store()) is not None:
                store.mark_noted()
            has_changes = any(some.is_replaced or some.n_erased or some.n_marked for some in self.sets)
            return self._since.base == base and not has_changes

    def freeze(self, store: Store, name: str, slots: Collection[str] | None, *, keeps_marks: bool = False) -> Frozen:
        """Return what has changed since the base, all of it in the first set; a save begins a second one."""
        with self._lock:
            store.mark_noted()
            (base, (first, *_)), second = self._since, MarkSet(is_replaced=False)
            frozen = Frozen(self, base, first, second, store.snapshot(name, slots))
            if not keeps_marks:  # else the second set is of nobody, so that nothing ends with what is returned
                self._since = _Since(base, (first, second))
            return frozen

    def resume(self, base: str, changed: Int64s, deleted: Int64s) -> bool:
        """Count from a base, with marks of these rows and deletes of these ids (rule *payload_is_marks*)."""
        store = self.store()
        if store is None:
            return False
        with self._lock:
            store.mark_noted()
            marks = MarkSet(is_replaced=False)
            rows = store.find(changed)
            marks.mark(rows[rows >= 0], len(store))
            marks.note_erased(deleted)
            self._since = _Since(base, (marks,))
        return True

    def end(self, frozen: Frozen, base: str | None) -> None:
        """Count from what was frozen, if it has become a base, or else from the base before."""
        with self._lock:
            before, sets = self._since
            if len(sets) == 2 and sets[1] is frozen.second:  # else it has ended, or another save or base has begun
                self._since = _Since(before, sets[:1]) if base is None else _Since(base, sets[1:])


class Frozen(FrozenRows):
    """The same by marks; made under the lock of the store.

    Attributes:
        bits: 1 for each row that has changed, in whole words of 8 bytes.
    """

    def __init__(self, marks: Marks, base: str | None, first: MarkSet, second: MarkSet, snapshot: Snapshot) -> None:
        self.snapshot, self.second = snapshot, second
        self._marks, self.base = marks, None if first.is_replaced else base
        self.bits, self._n_marked = first.share(snapshot.n_rows), first.n_marked
        self.erased = tuple(first.erased)

    @property
    def n_changed(self) -> int:
        """Rows and erased ids that a delta would hold, ids that are there again included."""
        return self.snapshot.n_rows if self.base is None else self._n_marked + sum(map(len, self.erased))

    def delta(self, base: str, *, narrows: bool = True) -> DeltaSource:
        """Return what has changed since this base; where it ``narrows``, the other rows are released at once."""
        source = super().delta(base, narrows=False)
        if narrows:
            source.narrow()
        return source

    def changed_since(self, base: str) -> Bytes:
        self.check_base(base)
        return self.bits

    def committed(self, save_id: str) -> None:
        self._marks.end(self, save_id)

    def failed(self) -> None:
        self._marks.end(self, None)


class DeltaSource:
    """The changed rows of a snapshot as rows 0 to ``n_rows - 1``, which the saver reads as those of a table.

    The rows are looked for when they are asked for, which takes longer the more rows the table has. Making this
    takes no time, since training waits for it.
    """

    def __init__(self, snapshot: Snapshot, bits: Callable[[], Bytes], erased: Sequence[Int64s]) -> None:
        self.name, self.slots, self.n_all = snapshot.name, snapshot.slots, snapshot.n_rows
        self.snapshot, self._bits, self._erased = snapshot, bits, erased

    def narrow(self) -> None:
        """Let the other rows go: they are protected no longer, and cannot be read."""
        self.snapshot.narrow(self._bits())

    @cached_property
    def rows(self) -> Int64s:
        """The rows of the snapshot that have changed."""
        return marked_rows(self._bits(), self.n_all)

    @property
    def n_rows(self) -> int:
        return len(self.rows)

    @property
    def ids(self) -> SnapshotIds:
        return SnapshotIds(lambda rows, target: self.snapshot.read_ids(self.rows[rows], target))

    @property
    def n_kept(self) -> int:
        """Rows that were copied aside so far."""
        return self.snapshot.n_kept

    @property
    def erased(self) -> Int64s:
        """The ids that were erased, all different; some may be there again."""
        return distinct(np.empty(0, np.int64), *self._erased)

    def deletes(self) -> Int64s:
        """Return the ids that were erased and are not there again, all different, in bucket order."""
        erased = self.erased
        if len(erased):
            upserts = IdIndex()
            upserts.reserve(self.n_rows)
            for piece in self.ids.pieces(0, self.n_rows):
                upserts.find_or_add(piece.numpy())
            erased = erased[upserts.find(erased) < 0]
        return erased[np.argsort(bucket_of(erased), kind="stable")]

    def read_slots(self, rows: npt.NDArray[Any], targets: Mapping[str, Bytes], *, is_last: bool) -> None:
        """Copy rows of some slots into a target each; after ``is_last`` they are not read again, in any slot."""
        self.snapshot.read_slots(self.rows[rows], targets, is_last=is_last)

    def close(self) -> None:
        self.snapshot.close()
