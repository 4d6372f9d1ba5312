"""The resumed run is the one that was not stopped, and the loop starts a command again until it ends well."""

from pathlib import Path

from recckpt.cli import main

assert main(["diff", "runs/straight", "runs/resumed"]) == 0
assert "restored ckpt_40, step 40" in what_was_said()
assert Path("calls").read_text().split("\n") == [*["python train.py", "sleep 10"] * 2, "python train.py", ""]
