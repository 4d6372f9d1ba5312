"""Fingerprints of rows, 8 bytes each over all slots: two moments are compared by them, whoever has written the rows.

Multilinear hashing (Carter and Wegman, JCSS 1979) of the words of a row, which may be shorter than 8 bytes. Each is
mixed before it is multiplied: a factor carries bits upwards only, and the signs of two numbers, which are the highest
bits of their words, would cancel each other. Slot after slot: the print of those before is where the next begins.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from recckpt.sparse.table.device_prints import prints_on_device
from recckpt.sparse.table.kernels import compiled, mix64
from recckpt.sparse.table.print_words import MIX, factors_of, word_bytes
from recckpt.sparse.table.snapshot import Snapshot
from recckpt.types import SlotSpec

Prints = npt.NDArray[np.uint64]
# Of rows at a time, between two looks at what was copied aside; a device does more before it is asked again, and makes
# words of 8 bytes of them.
_PIECE_BYTES, _DEVICE_PIECE_BYTES = 8 << 20, 64 << 20
_MIX = np.uint64(MIX)
_S29, _S32 = np.uint64(29), np.uint64(32)
_WORDS = {8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}


def fingerprints(rows: Snapshot) -> Prints:
    """Return the prints of all rows of a snapshot, none of which has been read for the last time. Thread-safe.

    Rows are read where they lie, without a copy; those that were copied aside meanwhile once more.
    """
    prints = np.empty(rows.n_rows, np.uint64)
    in_place = None if not rows.is_in_place else _prints_on_cpu if rows.is_on_cpu else prints_on_device
    n_bytes = _DEVICE_PIECE_BYTES if in_place is prints_on_device else _PIECE_BYTES
    n_piece = max(1, n_bytes // max(1, sum(spec.row_bytes for spec in rows.slots)))
    for begin in range(0, rows.n_rows, n_piece):
        end = min(rows.n_rows, begin + n_piece)
        again = np.arange(begin, end)
        if in_place is not None:
            prints[begin:end] = in_place(rows, begin, end)
            again = rows.kept_among(begin, end)
        if len(again):
            prints[again] = _prints_of(rows, again)
    return prints


def _prints_on_cpu(rows: Snapshot, begin: int, end: int) -> Prints:
    """Return the prints of rows on the CPU, in one pass over their memory."""
    prints = np.zeros(end - begin, np.uint64)
    for spec in rows.slots:
        done = 0
        for memory in rows.memory(spec.name, begin, end):
            done += _mix(memory.numpy(), spec, prints[done:])
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
    n_rows = len(memory) // spec.row_bytes
    words = memory.view(_WORDS[word_bytes(spec.row_bytes)]).reshape(n_rows, -1)
    _mix_rows(words, factors_of(words.shape[1]), prints[:n_rows])
    return n_rows


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
