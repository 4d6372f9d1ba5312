"""Callbacks and logs for other trainers and trackers; each is imported by its own name, nothing is imported here."""
