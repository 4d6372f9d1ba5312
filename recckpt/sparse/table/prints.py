"""Fingerprints of rows, which find changed rows if any code may have written them.

A fingerprint is 8 bytes over all slots of a row: multilinear hashing (Carter and Wegman, JCSS 1979) of its words, which
may be shorter than 8 bytes. Words are mixed before the multiplication: a product carries bits upwards only, so two sign
changes, which flip the highest bits of two words, would cancel out. The print of the slots so far is the start value of
the next slot. Each save reads all rows once, in the thread that writes. On a device torch computes the same bits: words
are int64 there, because torch has few operations on uint64, and sums and products wrap in the same way.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.format.buckets import M1, M2, random_odds
from recckpt.sparse.table.kernels import compiled
from recckpt.sparse.table.kernels import mix64 as mix64_of_one
from recckpt.sparse.table.marks import FrozenRows, SaverMarks
from recckpt.sparse.table.snapshot import PreImages, Snapshot, SnapshotOver
from recckpt.sparse.table.store import Store
from recckpt.types import SlotSpec

Prints = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
# Bytes of rows that are hashed before checking which of them were copied aside meanwhile. Larger on a device, where a
# check costs more, and where words are widened to 8 bytes.
_PIECE_BYTES, _DEVICE_PIECE_BYTES = 8 << 20, 64 << 20
_MIX = np.uint64(0x9E3779B185EBCA87)  # a prime near 2 ** 64 / golden ratio; multiplying by it mixes the bits of a word
_S29, _S32 = np.uint64(29), np.uint64(32)
_WORDS = {8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}
_SIGNED_MIX, _SIGNED_M1, _SIGNED_M2 = (int(word.astype(np.int64)) for word in (_MIX, M1, M2))
_TORCH_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def fingerprints(rows: Snapshot, first: int = 0, last: int | None = None) -> Prints:
    """Return one fingerprint per row in [first, last) of a snapshot (default: all rows). Thread-safe.

    Call this before any row is read for the last time. Rows are read in place; rows that are copied aside during the
    read are read again from the copy.
    """
    last = rows.n_rows if last is None else last
    prints = np.empty(last - first, np.uint64)
    images = rows.in_place
    in_place = None if images is None else _prints_on_cpu if images.is_on_cpu else prints_on_device
    n_bytes = _DEVICE_PIECE_BYTES if in_place is prints_on_device else _PIECE_BYTES
    n_piece = max(1, n_bytes // max(1, sum(spec.row_bytes for spec in rows.slots)))
    for begin in range(first, last, n_piece):
        end = min(last, begin + n_piece)
        again = np.arange(begin, end)
        if in_place is not None and images is not None:
            prints[begin - first : end - first] = in_place(rows, images, begin, end)
            again = images.kept_among(begin, end)
        if len(again):
            prints[again - first] = _prints_of(rows, again)
    return prints


def _prints_on_cpu(rows: Snapshot, images: PreImages, begin: int, end: int) -> Prints:
    prints = np.zeros(end - begin, np.uint64)
    for spec in rows.slots:
        done = 0
        for memory in images.memory(spec.name, begin, end):
            done += _mix(memory.numpy(), spec, prints[done:])
    return prints


def _prints_of(rows: Snapshot, some: npt.NDArray[np.int64]) -> Prints:
    prints = np.zeros(len(some), np.uint64)
    read = {spec.name: np.empty(len(some) * spec.row_bytes, np.uint8) for spec in rows.slots}
    rows.read_slots(some, read, is_last=False)
    for spec in rows.slots:
        _mix(read[spec.name], spec, prints)
    return prints


def _mix(memory: npt.NDArray[np.uint8], spec: SlotSpec, prints: Prints) -> int:
    n_rows = len(memory) // spec.row_bytes
    words = memory.view(_WORDS[_word_bytes(spec.row_bytes)]).reshape(n_rows, -1)
    _mix_rows(words, random_odds(0, words.shape[1]), prints[:n_rows])
    return n_rows


@compiled
def _mix_rows(words: Any, factors: Any, prints: Any) -> None:
    """Mix the words of each row into its print; the additions do not depend on each other, so the loop vectorizes."""
    for row in range(len(words)):
        mixed = prints[row]
        for i in range(words.shape[1]):
            word = np.uint64(words[row, i])
            word = (word ^ (word >> _S32)) * _MIX
            mixed += (word ^ (word >> _S29)) * factors[i]
        prints[row] = mix64_of_one(mixed)


def _word_bytes(row_bytes: int) -> int:
    return next(n_bytes for n_bytes in (8, 4, 2, 1) if row_bytes % n_bytes == 0)


@torch.no_grad()
def prints_on_device(rows: Snapshot, images: PreImages, begin: int, end: int) -> npt.NDArray[np.uint64]:
    """Return one fingerprint per row in [begin, end); all bytes of the rows have been read when this returns."""
    prints = torch.zeros(end - begin, dtype=torch.int64)
    for spec in rows.slots:
        done, mixed = 0, []
        for memory in images.memory(spec.name, begin, end):
            n_rows = len(memory) // spec.row_bytes
            mixed.append(_mixed(memory, spec, prints[done : done + n_rows].to(memory.device)))
            done += n_rows
        prints = torch.cat(mixed)
    on_host: npt.NDArray[np.uint64] = prints.cpu().numpy().view(np.uint64)
    return on_host


def _mixed(memory: Tensor, spec: SlotSpec, prints: Tensor) -> Tensor:
    n_bytes = _word_bytes(spec.row_bytes)
    if memory.storage_offset() % n_bytes:  # torch views bytes as longer words only at an aligned offset
        memory = memory.clone()
    words = memory.view(_TORCH_WORDS[n_bytes]).view(len(prints), -1).to(torch.int64)
    if n_bytes < 8:
        words &= (1 << 8 * n_bytes) - 1
    words = words ^ _shifted(words, 32)  # not in place, because 8-byte words share memory with the rows
    words *= _SIGNED_MIX
    words ^= _shifted(words, 29)
    factors = torch.from_numpy(random_odds(0, words.shape[1]).view(np.int64)).to(memory.device)
    z = words.mul_(factors).sum(1) + prints
    z = (z ^ _shifted(z, 30)) * _SIGNED_M1  # the same as recckpt.format.buckets.mix64
    z = (z ^ _shifted(z, 27)) * _SIGNED_M2
    return z ^ _shifted(z, 31)


def _shifted(words: Tensor, n_bits: int) -> Tensor:
    """Shift right as unsigned words; torch's own shift would copy the sign bit."""
    return (words >> n_bits).bitwise_and_((1 << 64 - n_bits) - 1)


class _Base(NamedTuple):
    save_id: str
    slots: tuple[SlotSpec, ...]
    prints: Prints
    share: float  # share of rows whose print differed from the base before; 0 if unknown


class PrintMarks(SaverMarks):
    """Fingerprints of one store's rows at the base of one saver; takes 8 bytes per row, 16 during a save."""

    def __init__(self, store: Store) -> None:
        self.store = weakref.ref(store)
        self._base: _Base | None = None

    def begin(self, base: str) -> None:
        """Start marking: read all rows and compute their fingerprints."""
        store = self.store()
        if store is not None:
            with store.lock:
                rows = store.snapshot("")
            self._base = _Base(base, rows.slots, fingerprints(rows), 0.0)
            rows.close()

    def resume(self, base: str, changed: npt.NDArray[np.int64], deleted: npt.NDArray[np.int64]) -> bool:
        """Start from a base. Rows changed since then get wrong fingerprints, so that the next save writes them."""
        store = self.store()
        if store is None or len(deleted):
            return False
        self.begin(base)
        rows = store.find(changed)
        if self._base is not None:
            self._base.prints[rows[rows >= 0]] ^= 1
        return True

    def freeze(
        self, store: Store, name: str, slots: Collection[str] | None, *, keeps_marks: bool = False
    ) -> FrozenRows:
        committed = (lambda base: None) if keeps_marks else self._committed
        return FrozenPrints(PrintedRows(store.snapshot(name, slots)), self._base, committed)

    def _committed(self, base: _Base | None) -> None:
        self._base = base


class PrintedRows(SnapshotOver):
    """A snapshot that computes and checks fingerprints of ``some`` rows before any row is released. Thread-safe."""

    def __init__(
        self,
        rows: Snapshot,
        check: Callable[[Prints], object] = lambda prints: None,
        some: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(rows)
        self._check, self._lock, self._some = check, threading.Lock(), some or (0, rows.n_rows)
        self.known_prints: Prints | None = None

    @property
    def prints(self) -> Prints:
        with self._lock:
            if self.known_prints is None:
                prints = fingerprints(self._rows, *self._some)
                self._check(prints)
                self.known_prints = prints
            return self.known_prints

    def read_slots(self, rows: npt.NDArray[Any], targets: Mapping[str, Bytes], *, is_last: bool) -> None:
        if is_last:
            _ = self.prints  # computes all prints before the first row may change
        self._rows.read_slots(rows, targets, is_last=is_last)


class FrozenPrints(FrozenRows):
    def __init__(self, rows: PrintedRows, then: _Base | None, committed: Callable[[_Base | None], None]) -> None:
        self.snapshot: PrintedRows = rows
        is_comparable = then is not None and then.slots == rows.slots and len(then.prints) == rows.n_rows
        self._then, self._committed = then if is_comparable else None, committed
        self.base = None if self._then is None else self._then.save_id
        self._bits: Bytes | None = None
        self._lock = threading.Lock()

    @property
    def n_changed(self) -> int:
        """An estimate by the last save's share of changed rows, because an exact number would need all rows read."""
        return self.snapshot.n_rows if self._then is None else round(self._then.share * self.snapshot.n_rows)

    def changed_since(self, base: str) -> Bytes:
        """Return one bit per row, 1 if its fingerprint differs from that at the base; the first call reads all rows."""
        self.check_base(base)
        with self._lock:
            if self._bits is None:
                assert self._then is not None
                bits = np.packbits(self.snapshot.prints != self._then.prints, bitorder="little")
                self._bits = np.concatenate([bits, np.zeros(-len(bits) % 8, np.uint8)])
            return self._bits

    def committed(self, save_id: str) -> None:
        """Make this checkpoint the base. If no row was read, no fingerprints exist, and the base is unknown."""
        prints, before = self.snapshot.known_prints, self._then
        share = 0.0 if prints is None or before is None or not len(prints) else float(np.mean(prints != before.prints))
        self._committed(None if prints is None else _Base(save_id, self.snapshot.slots, prints, share))
