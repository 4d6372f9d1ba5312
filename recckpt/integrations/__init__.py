"""Callbacks and logs for trainers and trackers of others, each imported by its own name: nothing is imported here."""
