"""The file is where the page says."""

from pathlib import Path

assert Path("runs/plain/checkpoint_0.pt").exists()
