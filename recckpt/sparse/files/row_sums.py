"""Sums over rows, by which two sets of rows are compared in whatever order they come (no torch here)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recckpt.format.buckets import mix64
from recckpt.format.catalog import Batch
from recckpt.sparse.files.arrow_format import column_buffer
from recckpt.sparse.files.link_cursors import row_of
from recckpt.types import SlotSpec

_Words = npt.NDArray[np.uint64]
_LARGEST = 1 << 64
_WORD_BYTES = 4


class RowSums:
    """A sum of 64 bits for each table, to which every row adds a hash of its id and its values together.

    A row that is missing, there twice, or has the values of another id changes the sum; the order of rows does not.
    """

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowSums) and self._sums == other._sums

    __hash__ = None  # type: ignore[assignment]  # it changes

    def add(self, table: str, columns: Sequence[npt.NDArray[Any]], rows: npt.NDArray[np.int64] | slice) -> None:
        """Add those of the rows in these columns, of which each item is the bytes of a row, and the first the ids."""
        ids, *slots = columns
        hashes = mix64(ids.view(np.uint64))
        first = 0
        for column in slots:
            words = _words(column)
            hashes += np.einsum("ij,j->i", words, _factors(first, words.shape[1]))
            first += words.shape[1]
        self._sums[table] = (self._sums[table] + int(mix64(hashes)[rows].sum())) % _LARGEST

    def add_batch(self, specs: Sequence[SlotSpec], batch: Batch, values: pa.RecordBatch) -> None:
        """Add all rows of a batch of a part."""
        columns = [np.frombuffer(column_buffer(values.column(spec.name)), row_of(spec)) for spec in specs]
        self.add(batch.table, columns, slice(None))


def _words(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the bytes of rows as unsigned numbers, a line a row: of at most 32 bits, as the rows can be divided into.

    Of a number of 64 bits the highest would meet the lowest bit of its factor only: it would add 2 ** 63, whatever the
    factor is, and two of them nothing.
    """
    n_bytes = column.dtype.itemsize
    word = gcd(n_bytes, _WORD_BYTES)
    return column.view(f"u{word}").reshape(len(column), n_bytes // word)


@lru_cache(maxsize=64)
def _factors(first: int, n: int) -> _Words:
    """Return random odd numbers of 64 bits: an odd one loses no bit of what it multiplies."""
    factors: _Words = mix64(np.arange(first + 1, first + n + 1, dtype=np.uint64)) | np.uint64(1)
    return factors
