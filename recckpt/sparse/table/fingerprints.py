"""Fingerprints of rows, 8 bytes each over all slots: two moments are compared by them, whoever has written the rows.

Multilinear hashing (Carter and Wegman, JCSS 1979) of the words of a row, which may be shorter than 8 bytes. Each is
mixed before it is multiplied: a factor carries bits upwards only, and the signs of two numbers, which are the highest
bits of their words, would cancel each other. Slot after slot: the print of those before is where the next begins.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from recckpt.format.buckets import mix64 as mix64_of_many
from recckpt.sparse.table.kernels import compiled, mix64
from recckpt.sparse.table.snapshot import Snapshot
from recckpt.types import SlotSpec

Prints = npt.NDArray[np.uint64]
_PIECE_BYTES = 8 << 20  # of rows at a time, between two looks at what was copied aside
_MIX = np.uint64(0x9E3779B185EBCA87)  # 2 ** 64 over the golden ratio, as a prime: its bits are mixed
_S29, _S32 = np.uint64(29), np.uint64(32)
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
    words = memory.view(kind).reshape(n_rows, -1)
    _mix_rows(words, _factors(words.shape[1]), prints[:n_rows])
    return n_rows


@lru_cache(maxsize=64)
def _factors(n: int) -> Prints:
    """Return random odd numbers, a position in a row each: an odd one loses no bit of what it multiplies."""
    factors: Prints = mix64_of_many(np.arange(1, n + 1, dtype=np.uint64)) | np.uint64(1)
    return factors


@compiled
def _mix_rows(words: Any, factors: Any, prints: Any) -> None:
    """Mix the words of each row into its print: a sum that does not wait for itself, so that it is made in vectors."""
    for row in range(len(words)):
        mixed = prints[row]
        for i in range(words.shape[1]):
            word = np.uint64(words[row, i])
            word = (word ^ (word >> _S32)) * _MIX
            mixed += (word ^ (word >> _S29)) * factors[i]
        prints[row] = mix64(mixed)
