"""Trainers of others save plain embeddings as live tables, with their optimizer, and resume them bit for bit."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from recckpt import CheckpointManager, CheckpointReader
from recckpt.integrations.lightning import LightningCallback
from recckpt.integrations.transformers import TransformersCallback

N_IDS = 50


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.top = nn.Embedding(N_IDS, 4), nn.Linear(4, 1)

    def forward(self, ids, labels):
        return {"loss": nn.functional.mse_loss(self.top(self.users(ids)).squeeze(1), labels)}


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Clicks()

    def training_step(self, batch, _):
        return self.model(*batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, N_IDS, (64,), generator=generator), torch.rand(64, generator=generator)


def state_of(module, optimizer):
    return [*module.state_dict().values(), *(v for s in optimizer.state_dict()["state"].values() for v in s.values())]


def fit(output_dir, steps):
    torch.manual_seed(0)
    module = Module()
    callback = LightningCallback(str(output_dir), 5, max_keep=None, tables={"min_rows": 10})
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = pl.Trainer(
        max_steps=steps, max_epochs=100, callbacks=[callback], accelerator="cpu", enable_checkpointing=False, **quiet
    )
    trainer.fit(module, StatefulDataLoader(TensorDataset(*data()), batch_size=4, shuffle=True))
    return state_of(module, trainer.optimizers[0])


def test_lightning_resumes_live_tables_bit_for_bit(tmp_path):
    whole = fit(tmp_path / "whole", 20)
    fit(tmp_path / "ended", 13)
    assert all(map(torch.equal, whole, fit(tmp_path / "ended", 20)))
    with CheckpointReader(str(tmp_path / "ended")) as reader:
        table = reader.manifest.table("model.users")
        assert table.rows == N_IDS
        assert [slot.name for slot in table.slots] == ["embedding", "sparse_adagrad_sum"]


class Ended(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 13
        return control


def train(output_dir, hf_dir, *, is_ended=False):
    torch.manual_seed(0)
    model, (ids, labels) = Clicks(), data()
    args = TrainingArguments(
        str(hf_dir), report_to=[], disable_tqdm=True, use_cpu=True, max_steps=20, save_strategy="no"
    )
    callback = TransformersCallback(str(output_dir), 5, tables={"min_rows": 10})
    rows = [{"ids": id_, "labels": label} for id_, label in zip(ids, labels, strict=True)]
    trainer = Trainer(model, args, train_dataset=rows, callbacks=[callback, *([Ended()] if is_ended else [])])
    trainer.train(resume_from_checkpoint=callback.resume_point(trainer))
    assert "users" in callback.checkpoints.saver._live.live_tables
    return state_of(model, trainer.optimizer)


def test_the_trainer_of_hugging_face_resumes_live_tables_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = train(tmp_path / "whole", tmp_path / "hf")
    train(tmp_path / "ended", tmp_path / "hf", is_ended=True)
    assert all(map(torch.equal, whole, train(tmp_path / "ended", tmp_path / "hf")))


def prepared(output_dir):
    torch.manual_seed(0)
    accelerator, plain = Accelerator(cpu=True), Clicks()
    model, optimizer = accelerator.prepare(plain, torch.optim.Adagrad(plain.parameters(), lr=0.1))
    manager = CheckpointManager.attach(
        model, optimizer, output_dir=output_dir, save_interval=5, tables={"min_rows": 10}
    )
    assert "users" in manager.saver._live.live_tables
    return accelerator, model, optimizer, manager


def loop(made, steps):
    accelerator, model, optimizer, manager = made
    while manager.global_step < steps:
        ids = (torch.arange(8) + manager.global_step) % N_IDS
        accelerator.backward(model(ids, torch.ones(8))["loss"])
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        manager.step()
    manager.close()
    return state_of(model, optimizer)


@pytest.mark.parametrize("steps", [13, 15])
def test_a_loop_of_accelerate_resumes_live_tables_bit_for_bit(tmp_path, steps):
    whole = loop(prepared(tmp_path / "whole"), 20)
    loop(prepared(tmp_path / "ended"), steps)
    again = prepared(tmp_path / "ended")
    assert again[-1].restore() in (10, 13, 15)
    assert all(map(torch.equal, whole, loop(again, 20)))
