"""The quick start leaves the checkpoints that it speaks of."""

from pathlib import Path

assert Path("runs/clicks/ckpt_300/manifest.json").exists()
