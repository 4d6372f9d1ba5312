"""Lightning trains, is ended and resumes; what it has then is what an unbroken run has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.paths import ROOT
from support.rank_processes import run_script
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from recckpt import list_checkpoints
from recckpt.inspect import connect
from recckpt.integrations.lightning import LightningCallback
from recckpt.policies import Transfers
from recckpt.policies.keep import Best, Newest
from recckpt.policies.when import EveryEpochs
from recckpt.sparse import HashTable, SparseAdamW

N_IDS = 50


class Clicks(pl.LightningModule):
    def __init__(self, automatic=True, lr=0.01):
        super().__init__()
        self.automatic_optimization = automatic
        self.strict_loading = False  # or Lightning refuses its own files, which have no tables
        self.table, self.top = HashTable(4, name="t"), nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 1))
        self.lr, self.sparse_optim = lr, SparseAdamW([self.table], lr=lr)
        self.seen = []

    def training_step(self, batch, _):
        ids, clicks = batch
        self.seen.append(ids.tolist())
        loss = nn.functional.mse_loss(self.top(self.table(ids)).squeeze(1), clicks)
        if not self.automatic_optimization:
            dense = self.optimizers()
            dense.zero_grad(), self.sparse_optim.zero_grad()
            self.manual_backward(loss)
            dense.step(), self.sparse_optim.step()
        return loss

    def configure_optimizers(self):
        optim = torch.optim.Adam(self.top.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.StepLR(optim, 7, 0.5)
        return [optim], [{"scheduler": schedule, "interval": "step"}]


def clicks(loader):
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randint(0, N_IDS, (64,), generator=generator), torch.rand(64, generator=generator))
    return loader(data, batch_size=4, shuffle=True)


def fit(
    tmp_path, name, steps, *, automatic=True, callbacks=(), loader=StatefulDataLoader, path=None, interval=5, **options
):
    torch.manual_seed(0)
    module, restore = Clicks(automatic, options.pop("lr", 0.01)), options.pop("restore", {})
    sparse = options.pop("sparse", lambda module: module.sparse_optim)
    own = options.pop("own", {})
    callback = LightningCallback(str(tmp_path / name), interval, sparse_optimizer=sparse, restore=restore, **own)
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 100, **options}
    options["default_root_dir"] = str(tmp_path / "lightning")
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_steps=steps, callbacks=[*callbacks, callback], **quiet, **options)
    trainer.fit(module, clicks(loader), ckpt_path=path)
    return module, trainer


@pytest.mark.parametrize(("automatic", "accumulate"), [(True, 1), (True, 2), (False, 1)])
def test_a_run_that_was_ended_and_resumed_is_one_that_never_was(tmp_path, automatic, accumulate):
    options = {"automatic": automatic, "accumulate_grad_batches": accumulate}
    whole, _ = fit(tmp_path, "whole", 40, **options)
    fit(tmp_path, "ended", 23, **options)
    resumed, trainer = fit(tmp_path, "ended", 40, **options)
    assert trainer.global_step == 40
    assert resumed.seen == whole.seen[-17 * accumulate :]
    ids = torch.arange(N_IDS)
    assert torch.equal(whole.eval().table(ids), resumed.eval().table(ids))
    assert all(map(torch.equal, whole.top.parameters(), resumed.top.parameters()))


def test_the_optimizer_that_was_made_for_the_tables_is_found_and_stepped(tmp_path):
    whole, _ = fit(tmp_path, "whole", 20)
    fit(tmp_path, "ended", 13, sparse=None)
    found, trainer = fit(tmp_path, "ended", 20, sparse=None)
    assert (trainer.global_step, found.sparse_optim.state_dict()) == (20, whole.sparse_optim.state_dict())
    ids = torch.arange(N_IDS)
    assert torch.equal(whole.eval().table(ids), found.eval().table(ids))


@pytest.mark.parametrize(("hyper_parameters", "lr"), [("load", 0.01), ("keep", 0.04)])
def test_a_resumed_run_has_the_learning_rates_that_it_asks_for(tmp_path, hyper_parameters, lr):
    fit(tmp_path, "runs", 5)
    module, trainer = fit(tmp_path, "runs", 6, lr=0.04, restore={"hyper_parameters": hyper_parameters})
    assert module.sparse_optim.param_groups[0]["lr"] == pytest.approx(lr)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(lr)


class Batches(pl.Callback):
    """Counts what it has seen."""

    def __init__(self):
        self.seen = 0

    def on_train_batch_end(self, *_):
        self.seen += 1

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def test_callbacks_go_on_where_they_were(tmp_path):
    fit(tmp_path, "runs", 23, callbacks=[Batches()])
    fit(tmp_path, "runs", 40, callbacks=[batches := Batches()])
    assert batches.seen == 40


def test_model_checkpoint_beside_it_writes_all_but_the_tables(tmp_path):
    fit(tmp_path, "runs", 16, callbacks=[kept := ModelCheckpoint(tmp_path / "kept")], enable_checkpointing=True)
    found = torch.load(kept.best_model_path, weights_only=False)["state_dict"]
    assert set(found) == {"top.1.weight", "top.1.bias"}


def test_a_second_place_to_restore_from_is_refused(tmp_path):
    fit(tmp_path, "runs", 16, callbacks=[kept := ModelCheckpoint(tmp_path / "kept")], enable_checkpointing=True)
    with pytest.raises(ValueError, match="would both restore: omit ckpt_path"):
        fit(tmp_path, "others", 20, path=kept.best_model_path)


def test_a_loader_without_a_position_begins_its_epoch_anew_and_lightning_says_so(tmp_path):
    fit(tmp_path, "runs", 5, loader=DataLoader)
    with pytest.warns(UserWarning, match="your dataloader is not resumable"):
        fit(tmp_path, "runs", 10, loader=DataLoader)


def test_the_example_goes_on_where_it_was(tmp_path):
    def run(steps):
        command = [sys.executable, str(ROOT / "examples/train_lightning.py"), "--output-dir", str(tmp_path / "runs")]
        command += ["--steps", str(steps), "--save-interval", "2"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    run(3)
    run(5)
    steps = [json.loads(line)["step"] for line in (tmp_path / "runs/timeline.jsonl").read_text().splitlines()]
    assert steps == [2, 3, 4, 5]


class Fails(pl.Callback):
    """Raises in one of its hooks, at a step of the trainer."""

    def __init__(self, hook, step, error):
        def fail(trainer, *_):
            if trainer.global_step == step:
                raise error

        setattr(self, hook, fail)


SAVES, BOOM = {"save_on_exception": True}, RuntimeError("boom")


def fit_that_fails(tmp_path, hook, step, *callbacks, error=BOOM, own=SAVES, **options):
    callbacks = [*callbacks, Fails(hook, step, error)]
    with pytest.raises(type(error)) as raised:
        fit(tmp_path, "runs", 100, callbacks=callbacks, own=own, **options)
    assert raised.value is error
    return [(one.step, one.state.get("emergency")) for one in list_checkpoints(str(tmp_path / "runs"))]


@pytest.mark.parametrize(
    ("hook", "step", "is_within"),
    [
        ("on_train_batch_start", 13, False),
        ("on_before_backward", 13, True),  # of the step after
        ("on_train_batch_end", 13, False),  # of that step, which the manager has not counted
        ("on_before_optimizer_step", 14, True),
        ("on_train_batch_end", 16, False),
        ("on_train_epoch_end", 16, False),
    ],
)
def test_a_fit_that_fails_saves_what_it_has_trained_and_a_restart_goes_on_from_it(tmp_path, hook, step, is_within):
    mark = {"error": "RuntimeError: boom", "within_step": is_within}
    assert fit_that_fails(tmp_path, hook, step)[-1] == (step, mark)
    module, trainer = fit(tmp_path, "runs", 21)
    assert (trainer.global_step, len(module.seen)) == (21, 21 - step)
    assert list_checkpoints(str(tmp_path / "runs"))[-1].state.get("emergency") is None


def test_a_fit_that_failed_between_two_steps_goes_on_as_one_that_did_not(tmp_path):
    whole, _ = fit(tmp_path, "whole", 40)
    fit_that_fails(tmp_path, "on_train_batch_end", 13)
    resumed, _ = fit(tmp_path, "runs", 40)
    assert resumed.seen == whole.seen[-27:]
    ids = torch.arange(N_IDS)
    assert torch.equal(whole.eval().table(ids), resumed.eval().table(ids))
    assert all(map(torch.equal, whole.top.parameters(), resumed.top.parameters()))


def test_a_batch_that_fails_at_the_end_of_an_epoch_is_passed_over(tmp_path):
    _, whole = fit(tmp_path, "whole", 20)
    fit_that_fails(tmp_path, "on_before_backward", 15, interval=100)
    module, trainer = fit(tmp_path, "runs", 20)
    assert (len(module.seen), trainer.current_epoch) == (5, whole.current_epoch)


@pytest.mark.parametrize(("own", "step"), [({}, 13), (SAVES, 10)])  # which is saved already
def test_a_fit_that_fails_saves_nothing_unless_asked_or_what_is_saved(tmp_path, own, step):
    assert fit_that_fails(tmp_path, "on_before_backward", step, own=own) == [(5, None), (10, None)]


def test_a_fit_that_fails_before_its_first_step_saves_nothing(tmp_path):
    fit(tmp_path, "runs", 5)
    assert fit_that_fails(tmp_path, "on_train_start", 5) == [(5, None)]


def test_an_interrupt_is_an_exception_too(tmp_path):
    with pytest.raises(SystemExit):  # which is Lightning's answer
        fit(tmp_path, "runs", 9, callbacks=[Fails("on_train_batch_end", 7, KeyboardInterrupt())], own=SAVES)
    mark = {"error": "KeyboardInterrupt: ", "within_step": False}
    assert list_checkpoints(str(tmp_path / "runs"))[-1].state["emergency"] == mark


class Logs(pl.Callback):
    def on_train_batch_end(self, trainer, module, *_):
        module.log("made", float(trainer.global_step))


def test_an_emergency_checkpoint_is_never_the_best_and_rotates_as_any_other(tmp_path):
    own = {**SAVES, "deltas": False, "max_keep": Newest(1) | Best(1, "made")}
    kept = fit_that_fails(tmp_path, "on_before_backward", 13, Logs(), own=own)
    assert [(step, mark is not None) for step, mark in kept] == [(10, False), (13, True)]
    assert connect(tmp_path / "runs").sql("select step from checkpoints where emergency.within_step").fetchall() == [
        (13,)
    ]
    fit(tmp_path, "runs", 15, callbacks=[Logs()], own=own)
    assert [one.step for one in list_checkpoints(str(tmp_path / "runs"))] == [15]


def test_an_emergency_save_that_fails_is_logged_with_the_step_that_a_restart_goes_on_from(tmp_path, caplog):
    fit(tmp_path, "runs", 5)
    own = {**SAVES, "transfers": Transfers(min_free_bytes=1 << 60)}
    assert fit_that_fails(tmp_path, "on_before_backward", 8, own=own, interval=100) == [(5, None)]
    [text] = [record.getMessage() for record in caplog.records if "no emergency checkpoint" in record.getMessage()]
    assert text.startswith("fit ended by RuntimeError: boom, and no emergency checkpoint is saved: SaveFailedError: ")
    assert text.endswith("a restart resumes from step 5")


@pytest.mark.slow
def test_a_rank_that_fails_alone_saves_nothing_and_says_so(tmp_path):
    run_script(Path(__file__).with_name("trainer_ranks.py"), tmp_path, "failing")


@pytest.mark.parametrize("automatic", [True, False])
def test_nothing_that_trains_is_said_to_be_missing(tmp_path, caplog, automatic):
    fit(tmp_path, "run", 10, automatic=automatic)
    manifest = tmp_path / "run/ckpt_10/manifest.json"
    assert not [record for record in caplog.records if "trains" in record.getMessage()]
    assert json.loads(manifest.read_text())["training"] == {"optimizers": {"optimizer_0": ["Adam"]}}


@pytest.mark.parametrize("loader", [StatefulDataLoader, DataLoader])
def test_a_run_that_was_saved_at_the_end_of_an_epoch_goes_on_with_all_batches_of_the_next(tmp_path, loader):
    fit(tmp_path, "ended", 32, loader=loader, interval=16)
    resumed, trainer = fit(tmp_path, "ended", 48, loader=loader, interval=16)
    assert (trainer.global_step, trainer.current_epoch) == (48, 3)
    seen = sorted(number for batch in resumed.seen for number in batch)
    assert seen == sorted(clicks(loader).dataset.tensors[0].tolist())


class Validated(Clicks):
    """Logs in validation what is best in the second epoch."""

    def validation_step(self, batch, _):
        self.log("val_auc", [0.5, 0.9, 0.7, 0.6][self.current_epoch], on_epoch=True)


def fit_epochs(output_dir, n_epochs):
    torch.manual_seed(0)
    module = Validated()
    keep = Newest(1) | Best(1, "val_auc")
    callback = LightningCallback(str(output_dir), EveryEpochs(1), max_keep=keep, deltas=False)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = pl.Trainer(
        max_epochs=n_epochs, callbacks=[callback], accelerator="cpu", enable_checkpointing=False, **quiet
    )
    trainer.fit(module, clicks(DataLoader), clicks(DataLoader))
    return module, callback.checkpoints


def test_epochs_are_saved_after_their_validation_and_the_best_is_kept(tmp_path):
    whole, _ = fit_epochs(tmp_path / "whole", 4)
    fit_epochs(tmp_path / "runs", 2)
    resumed, manager = fit_epochs(tmp_path / "runs", 4)
    assert (manager.global_step, manager.epochs) == (64, 4)
    assert resumed.seen == whole.seen[-32:]
    assert all(map(torch.equal, whole.top.parameters(), resumed.top.parameters()))
    kept = list_checkpoints(str(tmp_path / "runs"))
    assert [(one.step, round(one.state["val_auc"], 6)) for one in kept] == [(32, 0.9), (64, 0.6)]


def test_arguments_of_a_model_checkpoint_are_answered_with_what_to_write():
    with pytest.raises(TypeError) as refused:
        LightningCallback(dirpath="runs", monitor="val_auc", save_top_k=3, max_keep=3, save_on_signal="TERM")
    for part in (
        "LightningCallback() got an unexpected keyword argument 'dirpath'; 'dirpath': write output_dir=",
        "'monitor', 'save_top_k': write max_keep=3, or a policy",
        "is LightningCallback('runs/clicks', 1000, max_keep=3, save_on_signal=('SIGTERM',))",
    ):
        assert part in str(refused.value)
    with pytest.raises(TypeError, match="did you mean 'sparse_optimizer'"):
        LightningCallback("runs", 1, sparse_optimiser=None)


def test_a_model_checkpoint_alone_names_the_callback(tmp_path):
    with pytest.raises(TypeError, match=r"table 't' cannot be pickled.* in a trainer with a callback of recckpt"):
        torch.save(Clicks(), tmp_path / "module.ckpt")
