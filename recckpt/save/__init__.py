"""The way of a save: check, stage, write, commit, rotate."""
