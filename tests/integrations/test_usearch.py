"""An index of usearch is built from an exported table, and finds what is nearest."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
from support.paths import ROOT

from recckpt.convert import export_checkpoint, import_checkpoint


def test_the_example_finds_what_is_nearest_by_ids_of_either_sign(tmp_path):
    angles = np.deg2rad([0, 10, 30, 90])
    rows = {"id": np.array([7, -5, 2**62, -(2**63)]), "embedding": np.stack([np.cos(angles), np.sin(angles)], axis=1)}
    np.savez(tmp_path / "vectors.npz", id=rows["id"], embedding=rows["embedding"].astype(np.float32))
    import_checkpoint(tmp_path / "vectors.npz", tmp_path / "runs", tables=["vectors"])
    export_checkpoint(tmp_path / "runs", tmp_path / "out", to="npy")
    command = [sys.executable, ROOT / "examples/similar_items.py", "out", "vectors", "--count", "3", "--", "7", "3"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["7: 7 (0.000), -5 (0.015), 4611686018427387904 (0.134)", "3: not in the table"]
