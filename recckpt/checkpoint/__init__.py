"""Opens and writes checkpoints: all access to their files goes through here (no torch here)."""
