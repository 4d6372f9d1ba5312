"""Which rows have changed since the base of a saver, by their fingerprints: for rows that any code may have written.

All rows are looked at once a save, by the thread that writes; what has changed is not known before.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from recckpt.sparse.table.fingerprints import Prints, fingerprints
from recckpt.sparse.table.marks import DeltaSource, FrozenRows, SaverMarks
from recckpt.sparse.table.snapshot import Snapshot, SnapshotOver
from recckpt.sparse.table.store import Store
from recckpt.types import SlotSpec

Bytes = npt.NDArray[np.uint8]


class _Base(NamedTuple):
    """A checkpoint, and the prints of its rows over these slots."""

    save_id: str
    slots: tuple[SlotSpec, ...]
    prints: Prints
    share: float  # of the rows, that were others in the base before it; 0 where that is not known


class PrintMarks(SaverMarks):
    """The prints of the rows of one store as they are in the base of one saver: 8 bytes a row, 16 during a save."""

    def __init__(self, store: Store) -> None:
        self.store = weakref.ref(store)
        self._base: _Base | None = None

    def begin(self, base: str) -> None:
        """Count from now on: looks at all rows."""
        store = self.store()
        if store is not None:
            with store.lock:
                rows = store.snapshot("")
            self._base = _Base(base, rows.slots, fingerprints(rows), 0.0)
            rows.close()

    def resume(self, base: str, changed: npt.NDArray[np.int64], deleted: npt.NDArray[np.int64]) -> bool:
        """Count from a base: rows whose prints there are not known get others than they have now."""
        store = self.store()
        if store is None or len(deleted):
            return False
        self.begin(base)
        rows = store.find(changed)
        if self._base is not None:
            self._base.prints[rows[rows >= 0]] ^= 1
        return True

    def is_unchanged(self, base: str) -> bool:
        """Say that rows may have changed."""
        return False

    def freeze(self, store: Store, name: str, slots: Collection[str] | None) -> FrozenRows:
        """Return the rows as they are now; what has changed is looked for when it is asked for."""
        return FrozenPrints(PrintedRows(store.snapshot(name, slots)), self._base, self._committed)

    def peek(self, store: Store, name: str, slots: Collection[str] | None) -> FrozenRows:
        """Return the same, which keeps the prints of the base."""
        return FrozenPrints(PrintedRows(store.snapshot(name, slots)), self._base, lambda base: None)

    def _committed(self, base: _Base | None) -> None:
        self._base = base


class PrintedRows(SnapshotOver):
    """A snapshot whose prints are taken before its rows are read for the last time. Thread-safe.

    ``check`` may refuse them.
    """

    def __init__(self, rows: Snapshot, check: Callable[[Prints], object] = lambda prints: None) -> None:
        super().__init__(rows)
        self._check, self._lock = check, threading.Lock()
        self._prints: Prints | None = None

    @property
    def prints(self) -> Prints:
        """The prints of all rows."""
        with self._lock:
            if self._prints is None:
                prints = fingerprints(self._rows)
                self._check(prints)
                self._prints = prints
            return self._prints

    @property
    def known_prints(self) -> Prints | None:
        """The prints of all rows, None where they were not taken."""
        return self._prints

    def read_slots(self, rows: npt.NDArray[Any], targets: Mapping[str, Bytes], *, is_last: bool) -> None:
        """Copy rows of some slots into a target each; after ``is_last`` they are not read again."""
        if is_last:
            _ = self.prints  # of all rows, before the first may change
        super().read_slots(rows, targets, is_last=is_last)


class FrozenPrints(FrozenRows):
    """Rows at the moment of a save, and the base that their prints are compared with."""

    def __init__(self, rows: PrintedRows, base: _Base | None, committed: Callable[[_Base | None], None]) -> None:
        self.snapshot: PrintedRows = rows
        is_comparable = base is not None and base.slots == rows.slots and len(base.prints) == rows.n_rows
        self._base = base if is_comparable else None
        self._committed = committed
        self._bits: Bytes | None = None
        self._lock = threading.Lock()

    def is_replaced(self, base: str) -> bool:
        """Say whether there are no prints of this base."""
        return self._base is None or self._base.save_id != base

    @property
    def n_changed(self) -> int:
        """As many rows as had changed in the save before: how many have is known once all are looked at."""
        return self.snapshot.n_rows if self._base is None else round(self._base.share * self.snapshot.n_rows)

    def delta(self, base: str) -> DeltaSource:
        """Return what has changed; other rows are protected until it is known which those are."""
        self._check_base(base)
        return DeltaSource(self.snapshot, self._narrowed, ())

    def changes(self, base: str) -> DeltaSource:
        """Return the same, of a snapshot whose other rows can be read until :meth:`DeltaSource.narrow` is called."""
        self._check_base(base)
        return DeltaSource(self.snapshot, self._changed, ())

    def changed_since(self, base: str) -> Bytes:
        """Return a bit a row, 1 for those that have changed since this base; looks at all rows."""
        self._check_base(base)
        return self._changed()

    def committed(self, save_id: str) -> None:
        """Make this checkpoint the base; unless no row was read, and there are no prints."""
        prints, before = self.snapshot.known_prints, self._base
        share = 0.0 if prints is None or before is None or not len(prints) else float(np.mean(prints != before.prints))
        self._committed(None if prints is None else _Base(save_id, self.snapshot.slots, prints, share))

    def failed(self) -> None:
        """Keep the base."""

    def _changed(self) -> Bytes:
        """Return a bit a row, 1 for those whose print is another one, in whole words of 8 bytes; look once."""
        with self._lock:
            if self._bits is None:
                assert self._base is not None
                is_other = self.snapshot.prints != self._base.prints
                bits = np.packbits(is_other, bitorder="little")
                self._bits = np.concatenate([bits, np.zeros(-len(bits) % 8, np.uint8)])
            return self._bits

    def _check_base(self, base: str) -> None:
        if self.is_replaced(base):
            raise RuntimeError(f"table {self.snapshot.name!r}: no prints of {base!r}")

    def _narrowed(self) -> Bytes:
        """Return the same, and let the other rows go."""
        bits = self._changed()
        self.snapshot.narrow(bits)
        return bits
