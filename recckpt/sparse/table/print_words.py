"""How a row is taken apart for its fingerprint, on whichever device."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from recckpt.format.buckets import mix64

MIX = 0x9E3779B185EBCA87  # 2 ** 64 over the golden ratio, as a prime: the bits of a word are mixed by it


def word_bytes(row_bytes: int) -> int:
    """Return the size of the longest words of which a row is made."""
    return next(n_bytes for n_bytes in (8, 4, 2, 1) if row_bytes % n_bytes == 0)


@lru_cache(maxsize=64)
def factors_of(n_words: int) -> npt.NDArray[np.uint64]:
    """Return random odd numbers, a position in a row each: an odd one loses no bit of what it multiplies."""
    factors: npt.NDArray[np.uint64] = mix64(np.arange(1, n_words + 1, dtype=np.uint64)) | np.uint64(1)
    return factors
