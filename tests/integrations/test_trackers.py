"""What is said of saves to trackers that are really installed, and read back from their files."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.integrations import trackers
from recckpt.sparse import HashTable, SparseAdamW


def train(output_dir, on_save, steps=4, **options):
    table = HashTable(4, name="t")
    model = nn.ModuleDict({"t": table, "top": nn.Linear(4, 1)})
    saver = Saver(model, SparseAdamW([table]), str(output_dir), on_save=on_save)
    with CheckpointManager(saver, 2, **options) as manager:
        for step in range(steps):
            table.insert(torch.tensor([step]), torch.ones(1, 4))
            manager.step()


def test_tensorboard_gets_each_save_at_its_step(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "log")) as writer:
        train(tmp_path / "runs", trackers.to_tensorboard(writer))
    events = accumulator.EventAccumulator(str(tmp_path / "log")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("recckpt/n_rows")] == [(2, 2), (4, 4)]
    assert [event.value for event in events.Scalars("recckpt/delta")] == [0, 0]


def test_mlflow_gets_each_save_at_its_step_though_another_thread_saves(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient((tmp_path / "mlflow").as_uri())
    run_id = client.create_run(client.create_experiment("clicks")).info.run_id
    train(tmp_path / "runs", trackers.to_mlflow(client, run_id), async_save=True)
    found = client.get_metric_history(run_id, "recckpt/n_rows")
    assert [(metric.step, metric.value) for metric in found] == [(2, 2), (4, 4)]


def test_wandb_gets_each_save_over_its_own_step_and_without_a_network(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=str(tmp_path), project="clicks") as run:
        run.log({"loss": 1.0}, step=100)  # a save of an older step is logged all the same
        train(tmp_path / "runs", trackers.to_wandb(run))
        assert run.summary["recckpt/n_rows"] == 4
        assert run.summary["recckpt/step"] == 4


def test_numbers_hold_no_text():
    from recckpt import SaveInfo

    found = trackers.numbers(SaveInfo("ckpt_7", step=7, kind="delta", n_rows=3))
    assert found["recckpt/n_rows"] == 3
    assert found["recckpt/delta"] == 1
    assert all(isinstance(value, float) for value in found.values())
