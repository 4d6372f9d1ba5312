"""Exponential moving averages (EMA) of table rows over the steps of training."""

from recckpt.averages.row_average import RowAverage

__all__ = ["RowAverage"]
