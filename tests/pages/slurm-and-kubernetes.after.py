"""The script puts back what a signal stopped, and nothing else; Kubernetes waits longer than the save may take."""

import re
import subprocess
from pathlib import Path

import yaml
from support.documents import PAGES, blocks

page = blocks("slurm-and-kubernetes.md")
script, ranks = (block.text for block in page if block.language == "bash")
assert Path("calls").read_text().splitlines() == [
    "python train.py of  of  at ",
    "python train.py of 1 of 2 at host-0",
]
for code, is_requeued in ((0, False), (1, False), (143, True)):
    Path("calls").unlink(missing_ok=True)
    assert subprocess.run(["bash", "-c", script], env={**os.environ, "CODE": str(code)}).returncode == code
    assert ("scontrol requeue 17\n" in Path("calls").read_text()) == is_requeued
job = yaml.safe_load(next(block.text for block in page if block.language == "yaml"))
grace = int(re.search(r"grace_sec=(\d+)", PAGES["slurm-and-kubernetes.md"].read_text())[1])
assert grace < min(job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"], 300)
probe = job["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["exec"]["command"]
alive = Path("alive")
alive.touch()
for age, code in ((0, 0), (3600, 1)):
    os.utime(alive, (alive.stat().st_mtime - age,) * 2)
    assert subprocess.run([*probe[:2], probe[2].replace("/tmp/alive", str(alive))]).returncode == code
