"""Fingerprints of rows, 8 bytes each over all slots: two moments are compared by them, whoever has written the rows.

The rounds of XXH64 (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md) over the words of a row, which may
be shorter than 8 bytes, slot after slot: the print of the slots before is the seed of the next.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from recckpt.sparse.table.kernels import compiled
from recckpt.sparse.table.snapshot import Snapshot
from recckpt.types import SlotSpec

Prints = npt.NDArray[np.uint64]
_PIECE_BYTES = 8 << 20  # of rows at a time, between two looks at what was copied aside
_P1, _P2, _P3 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
_P4, _P5 = np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5)
_S27, _S29, _S32, _S33 = np.uint64(27), np.uint64(29), np.uint64(32), np.uint64(33)
_WORDS = (np.uint64, np.uint32, np.uint16, np.uint8)


def fingerprints(rows: Snapshot) -> Prints:
    """Return the prints of all rows of a snapshot, none of which has been read for the last time. Thread-safe.

    Rows on the CPU are read where they lie, without a copy; those that were copied aside meanwhile once more.
    """
    prints, is_on_cpu = np.empty(rows.n_rows, np.uint64), rows.is_on_cpu
    n_piece = max(1, _PIECE_BYTES // max(1, sum(spec.row_bytes for spec in rows.slots)))
    for begin in range(0, rows.n_rows, n_piece):
        end = min(rows.n_rows, begin + n_piece)
        again = np.arange(begin, end)
        if is_on_cpu:
            prints[begin:end] = 0
            for spec in rows.slots:
                done = begin
                for memory in rows.memory(spec.name, begin, end):
                    done += _mix(memory, spec, prints[done:end])
            again = rows.kept_among(begin, end)
        if len(again):
            prints[again] = _prints_of(rows, again)
    return prints


def _prints_of(rows: Snapshot, some: npt.NDArray[np.int64]) -> Prints:
    """Return the prints of some rows, from a copy of them."""
    prints = np.zeros(len(some), np.uint64)
    read = {spec.name: np.empty(len(some) * spec.row_bytes, np.uint8) for spec in rows.slots}
    rows.peek(some, read)
    for spec in rows.slots:
        _mix(read[spec.name], spec, prints)
    return prints


def _mix(memory: npt.NDArray[np.uint8], spec: SlotSpec, prints: Prints) -> int:
    """Mix rows of a slot into their prints, and return how many they are."""
    kind = next(word for word in _WORDS if spec.row_bytes % np.dtype(word).itemsize == 0)
    n_rows = len(memory) // spec.row_bytes
    _mix_rows(memory.view(kind).reshape(n_rows, -1), prints[:n_rows])
    return n_rows


@njit(nogil=True, inline="always")
def _rotated(value: Any, n: Any) -> Any:
    return (value << n) | (value >> (np.uint64(64) - n))


@njit(nogil=True, inline="always")
def _round(lane: Any, word: Any) -> Any:
    return _rotated(lane + word * _P2, np.uint64(31)) * _P1


@compiled
def _mix_rows(words: Any, prints: Any) -> None:
    """Mix the words of each row into its print."""
    n_words = words.shape[1]
    n_whole = n_words - n_words % 4
    for row in range(len(words)):
        seed = prints[row]
        if n_whole:
            a, b, c, d = seed + _P1 + _P2, seed + _P2, seed, seed - _P1
            for i in range(0, n_whole, 4):  # four lanes, which do not wait for each other
                a = _round(a, np.uint64(words[row, i]))
                b = _round(b, np.uint64(words[row, i + 1]))
                c = _round(c, np.uint64(words[row, i + 2]))
                d = _round(d, np.uint64(words[row, i + 3]))
            mixed = _rotated(a, np.uint64(1)) + _rotated(b, np.uint64(7))
            mixed += _rotated(c, np.uint64(12)) + _rotated(d, np.uint64(18))
            for lane in (a, b, c, d):
                mixed = (mixed ^ _round(np.uint64(0), lane)) * _P1 + _P4
        else:
            mixed = seed + _P5
        mixed += np.uint64(n_words)
        for i in range(n_whole, n_words):
            mixed = _rotated(mixed ^ _round(np.uint64(0), np.uint64(words[row, i])), _S27) * _P1 + _P4
        mixed = (mixed ^ (mixed >> _S33)) * _P2
        mixed = (mixed ^ (mixed >> _S29)) * _P3
        prints[row] = mixed ^ (mixed >> _S32)
