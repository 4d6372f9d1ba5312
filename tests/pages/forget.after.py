"""Both ways to forget are in the audit."""

import json
from pathlib import Path

audit = Path("runs/forget/forgotten.jsonl").read_text().splitlines()
assert [json.loads(line)["by"] for line in audit] == ["recckpt.rewrite.forget", "manager.forget"]
