"""The state of a run, read from its output dir again and again, and how it is shown."""
