"""Sets of ids as sorted arrays: sorting takes a sixtieth of the time of ``np.unique``, which hashes since numpy 2.3."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def distinct(*values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the different values of arrays of integers, in ascending order."""
    ordered = np.sort(values[0] if len(values) == 1 else np.concatenate(values))
    is_first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return ordered[is_first]


def repeated(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the values that are there more than once, each once, in ascending order."""
    ordered = np.sort(values)
    return distinct(ordered[1:][ordered[1:] == ordered[:-1]])


def is_among(values: npt.NDArray[Any], ordered: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return a mask of the values that are among others, which are sorted."""
    if not len(ordered):
        return np.zeros(len(values), np.bool_)
    mask: npt.NDArray[np.bool_] = ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values
    return mask
