"""Threads and ranks; how ranks agree on results, and how they detect that a rank is lost."""
