"""Copies of an output dir in another store, which follow it: mirrors."""
