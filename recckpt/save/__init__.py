"""The steps of a save: check, stage, write, commit, rotate."""
