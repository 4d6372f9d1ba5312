"""Forgetting: the rows of some ids go from every checkpoint of an output dir (no torch here)."""
