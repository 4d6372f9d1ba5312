"""Averages of the rows of tables over the steps of training, as EMA and SWA keep them of dense parameters."""
