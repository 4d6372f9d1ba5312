"""The examples for torchrun, run by torchrun: ranks die, and any number of others goes on."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from support.paths import ROOT

from recckpt import CheckpointReader

TABLES = ("user", "item", "context")

pytestmark = pytest.mark.slow  # each interpreter takes seconds to import torch


def train(cwd, n_ranks, *options, launch=()):
    """Run the example of sharded tables."""
    small = ["--batch-size", 61, "--save-interval", 5, "--output-dir", "runs"]  # 61 clicks: shares differ in size
    return run("train_torchrun.py", cwd, n_ranks, *small, *options, launch=launch)


def run(example, cwd, n_ranks, *options, launch=()):
    """Run an example under torchrun, or as plain Python for no number of ranks; end all of it in any case."""
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else ranks that start again find the addresses of those before
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", *launch]
    command = [*launcher, "--nproc-per-node", n_ranks] if n_ranks else []
    process = subprocess.Popen(
        [sys.executable, *map(str, [*command, ROOT / "examples" / example, *options])],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        process.send_signal(signal.SIGTERM)  # which torchrun hands on to its ranks
        process.wait()
    return process.returncode, output


def ids_of_steps(n_steps):
    """Return the ids of each table in the first steps, in the example's own order of the data."""
    from click_log import ClickLog, generated_clicks

    log = ClickLog(*generated_clicks(0), batch_size=61)
    seen = np.concatenate([next(log)[0].numpy() for _ in range(n_steps)])
    return [np.unique(seen[:, column]).tolist() for column in range(3)]


def ids_in(checkpoint):
    reader = CheckpointReader(str(checkpoint))
    return [sorted(id_ for batch in reader.table(name, ["id"]) for id_ in batch["id"].to_pylist()) for name in TABLES]


def test_two_ranks_train_and_crash_three_go_on_and_then_one(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))

    code, output = train(tmp_path, 2, "--steps", 12, "--crash-at", 8)
    assert code != 0
    assert "step 8  rank 1 killed" in output
    assert ids_in(tmp_path / "runs/ckpt_5") == ids_of_steps(5)

    code, output = train(tmp_path, 3, "--steps", 12)
    assert code == 0, output
    assert "number of ranks: 3; resuming at step 5" in output
    assert ids_in(tmp_path / "runs/ckpt_12") == ids_of_steps(12)
    positions = [torch.load(tmp_path / f"runs/ckpt_12/io_state_{rank}.pt", weights_only=True) for rank in range(3)]
    assert [position["clicks"]["offset"] for position in positions] == [12 * 61] * 3

    code, output = train(tmp_path, None, "--steps", 16)
    assert code == 0, output
    assert "number of ranks: 1; resuming at step 12" in output
    assert ids_in(tmp_path / "runs/ckpt_16") == ids_of_steps(16)


def test_torchrun_starts_the_ranks_again_where_one_died(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))

    # once is enough, but torchrun chooses a port before it starts the ranks, and others may take it meanwhile
    code, output = train(tmp_path, 2, "--steps", 12, "--crash-at", 8, launch=("--max-restarts", 3))

    assert code == 0, output
    assert output.index("number of ranks: 2; starting") < output.index("step 8  rank 1 killed")
    assert output.index("step 8  rank 1 killed") < output.index("number of ranks: 2; resuming at step 5")
    assert ids_in(tmp_path / "runs/ckpt_12") == ids_of_steps(12)


def test_a_run_of_fsdp_goes_on_with_other_ranks_where_it_was_in_the_data(tmp_path):
    code, output = run("train_fsdp.py", tmp_path, 2, "--steps", 50, "--output-dir", "runs")
    assert code == 0, output
    assert "2 ranks, resuming at step 0, epoch 0" in output
    code, output = run("train_fsdp.py", tmp_path, 3, "--steps", 60, "--output-dir", "runs")
    assert code == 0, output
    assert "3 ranks, resuming at step 50, epoch 1" in output
    for rank in range(3):
        position = torch.load(tmp_path / f"runs/ckpt_60/io_state_{rank}.pt", weights_only=True)["loader"]
        assert (position["epoch"], position["begin"], position["used"]) == (1, 2 * 64 * (50 - 46), 10 * 64)
    reader = CheckpointReader(tmp_path / "runs")
    assert (reader.tables(), reader.read_tensor("top.0.weight").shape) == (["user"], (32, 20))
