"""Nested tensors of two dimensions: rows of any lengths, with or without holes between them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class NestedRows(NamedTuple):
    """The values of rows one after another, and the length of each row."""

    values: Tensor
    lengths: Tensor


def rows_of_nested(table: str, what: str, nested: Any) -> NestedRows:
    """Return the rows of a nested tensor without what lies between them, differentiable.

    Raises:
        ValueError: it is not of the layout torch.jagged and of two dimensions, or its offsets are not those of its
            values; torch checks neither where it makes one.
    """
    if nested.layout != torch.jagged:
        raise ValueError(f"table {table!r}: found nested {what} of {nested.layout}, expected layout=torch.jagged")
    if nested.dim() != 2:
        raise ValueError(f"table {table!r}: found nested {what} of {nested.dim()} dimensions, expected 2: (bags, ids)")
    values, offsets, lengths = nested.values(), nested.offsets(), nested.lengths()
    starts, has_holes = offsets[:-1], lengths is not None
    lengths = lengths if has_holes else offsets.diff()
    ends = starts + lengths
    is_inside = bool(((starts >= 0) & (lengths >= 0) & (ends <= len(values))).all())
    if not is_inside or (not has_holes and (int(offsets[0]), int(offsets[-1])) != (0, len(values))):
        raise ValueError(
            f"table {table!r}: found {len(values)} values and offsets {offsets[:3].tolist()}...{offsets[-3:].tolist()} "
            f"in nested {what}, expected the first 0, each at least the one before, and the last {len(values)}: values "
            "outside of all rows need lengths too, or are to be cut off"
        )
    if has_holes:
        firsts = starts - (lengths.cumsum(0) - lengths)  # of each row here, less that among the rows alone
        places = torch.arange(int(lengths.sum()), device=values.device) + firsts.repeat_interleave(lengths)
        values = values[places]
    return NestedRows(values, lengths)


def weights_alike(table: str, nested: Tensor, lengths: Tensor) -> Tensor:
    """Return the values of nested weights; ValueError where their rows have other lengths than those of the ids."""
    rows = rows_of_nested(table, "weights", nested)
    own, expected = rows.lengths.tolist(), lengths.tolist()
    if own != expected:
        row = next((row for row, pair in enumerate(zip(own, expected, strict=False)) if len({*pair}) > 1), None)
        what = f"{len(own)} rows of weights, expected {len(expected)}"
        if row is not None:
            what = f"{own[row]} weights in row {row}, expected {expected[row]}"
        raise ValueError(f"table {table!r}: found {what}, as many as of the ids")
    return rows.values
