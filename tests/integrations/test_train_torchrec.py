"""The example of TorchRec: killed, and restored under another plan, it ends where a run that was not killed does."""

import os
import re
import subprocess
import sys

from support import paths

from recckpt import CheckpointReader


def run(output_dir, *options):
    """Run the example on two ranks, and return what it printed."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    example = [str(paths.ROOT / "examples" / "train_torchrec.py"), "--dir", str(output_dir), "--steps", "40", *options]
    env = {**os.environ, "PYTHONPATH": paths.PYTHONPATH, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *example], capture_output=True, text=True, timeout=240, env=env, cwd=paths.ROOT)
    return done.returncode, done.stdout + done.stderr


def loss(text):
    return float(re.search(r"step 40, loss (\S+)", text)[1])


def test_a_killed_run_goes_on_under_another_plan_and_ends_alike(tmp_path):
    code, text = run(tmp_path / "killed", "--kill-at", "27")
    assert code != 0
    with CheckpointReader(tmp_path / "killed") as reader:
        assert reader.manifest.step in {10, 20}
        assert reader.manifest.kind == ("delta" if reader.manifest.step == 20 else "full")
    code, text = run(tmp_path / "killed", "--plan", "table_wise")
    assert code == 0, text
    code, whole = run(tmp_path / "whole")
    assert code == 0, whole
    assert abs(loss(text) - loss(whole)) < 1e-4
