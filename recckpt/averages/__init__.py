"""Averages of the rows of tables over the steps of training, as EMA keeps them of dense parameters."""

from recckpt.averages.row_average import RowAverage

__all__ = ["RowAverage"]
