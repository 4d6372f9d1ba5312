"""The two doors to the disk: how a checkpoint is opened, and how one is written (no torch here)."""
