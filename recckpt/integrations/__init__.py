"""Callbacks and logs for trainers and trackers; import each module by its own name: this package imports nothing."""
