"""Slots with one value for each range of the columns of a row: brought to other ranges, or to whole rows."""

from __future__ import annotations

import torch
from torch import Tensor

Ranges = tuple[tuple[int, int], ...]  # [begin, end) in order and without gaps; () of one value for the whole row


def regrouped(values: Tensor, before: Ranges, after: Ranges) -> Tensor:
    """Return values of other ranges; of row-wise Adagrad, whose sums are means of squares over columns.

    A whole row gets what it would have summed itself: the mean of the parts, by their widths. Each range gets the value
    of the whole row.

    Args:
        values: shape (rows, ranges), or (rows,) where there are none before.
        before: the ranges that they are of.
        after: those that they become values of.
    """
    if before == after:
        return values
    if before:
        widths = torch.tensor([end - begin for begin, end in before], dtype=torch.float64, device="cpu")
        values = (values.to(torch.float64) @ (widths / widths.sum())).to(values.dtype)
    return values[:, None].expand(len(values), len(after)).contiguous() if after else values
