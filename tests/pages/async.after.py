"""Every save leaves a line, the last of them that by hand."""

import json
from pathlib import Path

lines = [json.loads(line) for line in Path("runs/async/timeline.jsonl").read_text().splitlines()]
saved = [line["ckpt_id"] for line in lines if line["kind"] != "ended"]
assert saved[-2:] == ["ckpt_25", "by_hand"]
assert len(saved) == len(pauses)
