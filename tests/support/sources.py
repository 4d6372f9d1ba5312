"""What a saver reads of a source of rows, column by column."""

from typing import Any

import numpy as np


def read_column(source: Any, column: int, rows: np.ndarray, target: np.ndarray, *, is_last: bool) -> None:
    """Copy the bytes of rows of the ids, column 0, or of a slot."""
    if column == 0:
        source.ids.gather_into(rows, target)
    else:
        source.read_slots(rows, {source.slots[column - 1].name: target}, is_last=is_last)
