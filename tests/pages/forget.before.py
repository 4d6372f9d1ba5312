"""The page forgets three ids of the quick start."""

from pathlib import Path

Path("gone.txt").write_text("7\n42\n99\n")
