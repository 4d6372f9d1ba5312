"""Tracks which rows changed since a saver's base checkpoint: one bit per row, set by the store before the change."""

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
    """The rows of a table at the time of a save, and which of them have changed since the base.

    Attributes:
        snapshot: all rows.
        base: save id of the checkpoint since which changes are known; None if they are unknown.
        erased: arrays of ids erased since the base; some may have been added again.
    """

    snapshot: Snapshot
    base: str | None
    erased: Sequence[Int64s] = ()

    def is_replaced(self, base: str) -> bool:
        """Say whether a delta on this checkpoint must hold all rows, because changes since it are unknown."""
        return self.base != base

    @property
    @abstractmethod
    def n_changed(self) -> int:
        """About how many rows and deletes a delta would hold; decides between a delta and a full checkpoint."""

    def delta(self, base: str, *, narrows: bool = True) -> DeltaSource:
        """Return the rows that changed and the ids that were erased since this base.

        With ``narrows`` the snapshot releases unchanged rows as soon as they are known. Otherwise all rows can be read
        until :meth:`DeltaSource.narrow`.
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
        """Return one bit per row, 1 if it changed since this base, padded to 8-byte words; all rows stay readable."""

    def check_base(self, base: str) -> None:
        """Raise RuntimeError if changes since this base are unknown."""
        if self.is_replaced(base):
            raise RuntimeError(f"table {self.snapshot.name!r}: no marks since {base!r}, only since {self.base!r}")

    @abstractmethod
    def committed(self, save_id: str) -> None: ...

    def failed(self) -> None:  # noqa: B027  # a default for subclasses that have nothing to undo
        """End a save that failed: keep the base and all marks since."""


class SaverMarks(ABC):
    """The changes in one store that one saver tracks."""

    store: weakref.ref[Store]

    @abstractmethod
    def begin(self, base: str) -> None:
        """Start marking. The rows of the store must now equal those of the checkpoint with this save id."""

    def is_unchanged(self, base: str) -> bool:
        """Say whether nothing has changed since this base. True is always right, False may be wrong."""
        return False

    @abstractmethod
    def freeze(
        self, store: Store, name: str, slots: Collection[str] | None, *, keeps_marks: bool = False
    ) -> FrozenRows:
        """Return the current rows, and which of them have changed since the base.

        With ``keeps_marks``, for near saves, neither base nor marks change, whether the save commits or fails (rule
        *keeps_marks*).
        """

    def resume(self, base: str, changed: Int64s, deleted: Int64s) -> bool:
        """Start marking from a base since which these ids have changed or were deleted. False if not supported."""
        return False


class _Since(NamedTuple):
    """A base and the changes since. During a save there is a second set, for changes since that save began."""

    base: str | None
    sets: tuple[MarkSet, ...]


class Marks(SaverMarks):
    """Changes in one store since the base of one saver; the store marks them under its lock."""

    def __init__(self, store: Store) -> None:
        self.store, self._lock = weakref.ref(store), store.lock
        self._since = _Since(None, (MarkSet(is_replaced=True),))
        store.track(self)

    @property
    def sets(self) -> tuple[MarkSet, ...]:
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
        with self._lock:
            store.mark_noted()
            (base, (first, *_)), second = self._since, MarkSet(is_replaced=False)
            frozen = Frozen(self, base, first, second, store.snapshot(name, slots))
            if not keeps_marks:  # otherwise ``_since`` does not hold the second set, so ending the save changes nothing
                self._since = _Since(base, (first, second))
            return frozen

    def resume(self, base: str, changed: Int64s, deleted: Int64s) -> bool:
        """Start from a base, with these rows marked and these ids noted as deleted (rule *payload_is_marks*)."""
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
        """End a save. With a new ``base`` drop the marks that the save has written; else keep marks and base."""
        with self._lock:
            before, sets = self._since
            if len(sets) == 2 and sets[1] is frozen.second:  # else the save has ended, or another began
                self._since = _Since(before, sets[:1]) if base is None else _Since(base, sets[1:])


class Frozen(FrozenRows):
    """Rows frozen with their marks, under the lock of the store; ``bits`` are padded to words of 8 bytes."""

    def __init__(self, marks: Marks, base: str | None, first: MarkSet, second: MarkSet, snapshot: Snapshot) -> None:
        self.snapshot, self.second = snapshot, second
        self._marks, self.base = marks, None if first.is_replaced else base
        self.bits, self._n_marked = first.share(snapshot.n_rows), first.n_marked
        self.erased = tuple(first.erased)

    @property
    def n_changed(self) -> int:
        return self.snapshot.n_rows if self.base is None else self._n_marked + sum(map(len, self.erased))

    def delta(self, base: str, *, narrows: bool = True) -> DeltaSource:
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
    """The changed rows of a snapshot, numbered 0 to ``n_rows - 1``, as a table to save.

    Training waits while this object is made, so the changed rows are determined only when they are first needed.
    """

    def __init__(self, snapshot: Snapshot, bits: Callable[[], Bytes], erased: Sequence[Int64s]) -> None:
        self.name, self.slots, self.n_all = snapshot.name, snapshot.slots, snapshot.n_rows
        self.snapshot, self._bits, self._erased = snapshot, bits, erased

    def narrow(self) -> None:
        """Release all unchanged rows: they are no longer copied aside before changes, and cannot be read."""
        self.snapshot.narrow(self._bits())

    @cached_property
    def rows(self) -> Int64s:
        return marked_rows(self._bits(), self.n_all)

    @property
    def n_rows(self) -> int:
        return len(self.rows)

    @property
    def ids(self) -> SnapshotIds:
        return SnapshotIds(lambda rows, target: self.snapshot.read_ids(self.rows[rows], target))

    @property
    def n_kept(self) -> int:
        return self.snapshot.n_kept

    @property
    def erased(self) -> Int64s:
        """Distinct erased ids; some may have been added again."""
        return distinct(np.empty(0, np.int64), *self._erased)

    def deletes(self) -> Int64s:
        """Return the distinct ids that were erased and not added again, in bucket order."""
        erased = self.erased
        if len(erased):
            upserts = IdIndex()
            upserts.reserve(self.n_rows)
            for piece in self.ids.pieces(0, self.n_rows):
                upserts.find_or_add(piece.numpy())
            erased = erased[upserts.find(erased) < 0]
        return erased[np.argsort(bucket_of(erased), kind="stable")]

    def read_slots(self, rows: npt.NDArray[Any], targets: Mapping[str, Bytes], *, is_last: bool) -> None:
        """Copy some slots of rows to one target each. After ``is_last`` these rows must not be read again."""
        self.snapshot.read_slots(self.rows[rows], targets, is_last=is_last)

    def close(self) -> None:
        self.snapshot.close()
