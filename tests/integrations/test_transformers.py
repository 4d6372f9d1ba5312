"""The Trainer of Hugging Face trains, is ended and resumes; what it has then is what an unbroken run has."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from recckpt import Deltas, Near, list_checkpoints
from recckpt.integrations.transformers import TransformersCallback
from recckpt.policies.keep import Best
from recckpt.policies.when import EveryEpochs
from recckpt.sparse import HashTable, SparseAdamW

N_IDS = 50


class Clicks(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, N_IDS, (64,), generator=generator)
        self.clicks = torch.rand(64, generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"ids": self.ids[index], "labels": self.clicks[index]}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = HashTable(4, name="t")
        self.top = nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 1))

    def forward(self, ids, labels):
        found = self.top(self.table(ids)).squeeze(1)
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


class Killed(TrainerCallback):
    """Ends a run within a step, by an exception."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise ChildProcessError


class Ended(TrainerCallback):
    """Ends a run at a step, which is the end of its training."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step
        return control


class Unhurried(TrainerCallback):
    """Begins each step once what is saved of the step before has ended."""

    def __init__(self, callback):
        self.callback = callback

    def on_step_begin(self, args, state, control, **kwargs):
        self.callback.checkpoints.wait_until_finished()
        if self.callback.checkpoints.saver.near_saves is not None:
            self.callback.checkpoints.saver.near_saves.settle()


def fit(
    tmp_path,
    name,
    *,
    killed=0,
    ended=0,
    callbacks=(),
    resume=True,
    restore=None,
    lr=0.001,
    is_given=True,
    interval=5,
    saves=None,
    **options,
):
    torch.manual_seed(0)
    model = Model()
    given = {"max_steps": 40, "save_strategy": "no", "logging_steps": 10, "per_device_train_batch_size": 4, **options}
    args = TrainingArguments(str(tmp_path / "hf"), report_to=[], disable_tqdm=True, use_cpu=True, **given)
    sparse = SparseAdamW([model.table], lr=lr)
    given = sparse if is_given else None
    callback = TransformersCallback(
        str(tmp_path / name),
        interval,
        sparse_optimizer=given,
        restore=restore or {},
        **(saves or {}),
    )
    ends = [kind(step) for kind, step in ((Killed, killed), (Ended, ended)) if step]
    callbacks = [*callbacks, callback, Unhurried(callback), *ends]
    trainer = Trainer(model, args, train_dataset=Clicks(), eval_dataset=Clicks(), callbacks=callbacks)
    with suppress(ChildProcessError):
        trainer.train(resume_from_checkpoint=callback.resume_point(trainer) if resume else None)
    trainer.sparse = sparse
    return trainer


def near_options(tmp_path):
    """Return options of a run with near saves, however many rows have changed."""
    saves = {"near": Near(tmp_path / "near", interval=2), "max_keep": 2, "deltas": Deltas(max_dirty=1.0)}
    return {"saves": saves, "interval": 20}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_that_was_ended_and_resumed_is_one_that_never_was(tmp_path, monkeypatch, accumulate):
    whole = fit(tmp_path, "whole", gradient_accumulation_steps=accumulate)
    fit(tmp_path, "ended", killed=23, gradient_accumulation_steps=accumulate)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    resumed = fit(tmp_path, "ended", gradient_accumulation_steps=accumulate)
    ids = torch.arange(N_IDS)
    assert torch.equal(whole.model.eval().table(ids), resumed.model.eval().table(ids))
    assert all(map(torch.equal, whole.model.top.parameters(), resumed.model.top.parameters()))
    assert whole.state.global_step == resumed.state.global_step == 40
    assert not list(tmp_path.glob("recckpt-resume-*")), "the point that was resumed from is left"
    losses = [[line.get("loss") for line in trainer.state.log_history] for trainer in (whole, resumed)]
    assert losses[0][-2] == pytest.approx(losses[1][-2])


def test_a_run_goes_on_from_a_near_save(tmp_path, caplog):
    whole = fit(tmp_path, "whole")
    near = near_options(tmp_path)
    fit(tmp_path, "ended", killed=31, **near)
    with caplog.at_level("INFO", "recckpt"):
        resumed = fit(tmp_path, "ended", **near)
    assert "restored near_30, step 30" in caplog.text
    ids = torch.arange(N_IDS)
    assert torch.equal(whole.model.eval().table(ids), resumed.model.eval().table(ids))
    assert all(map(torch.equal, whole.model.top.parameters(), resumed.model.top.parameters()))
    assert not [record for record in caplog.records if "near" in record.message and record.levelname == "WARNING"]


def test_near_saves_are_passed_over_where_a_restore_is_to_take_none(tmp_path, caplog):
    near = near_options(tmp_path)
    fit(tmp_path, "ended", killed=31, **near)
    with caplog.at_level("INFO", "recckpt"):
        fit(tmp_path, "ended", restore={"near": False}, **near)
    assert "restored ckpt_20, step 20" in caplog.text


def test_epochs_are_counted_and_the_best_by_an_evaluation_is_kept(tmp_path):
    options = {"interval": EveryEpochs(1), "saves": {"max_keep": Best(1, "eval_loss", "min"), "deltas": False}}
    run = fit(tmp_path, "runs", max_steps=48, eval_strategy="epoch", **options)
    measured = {line["step"]: line["eval_loss"] for line in run.state.log_history if "eval_loss" in line}
    kept = list_checkpoints(str(tmp_path / "runs"))
    best = min(measured, key=measured.get)
    assert [(one.step, one.state["eval_loss"]) for one in kept] == [
        (step, measured[step])
        for step in sorted({best, 48})  # the newest is always kept
    ]
    assert kept[-1].state["epochs"] == 3


def test_the_optimizer_that_was_made_for_the_tables_is_found_and_stepped(tmp_path):
    whole = fit(tmp_path, "whole", max_steps=10)
    fit(tmp_path, "ended", max_steps=10, killed=7, is_given=False)
    found = fit(tmp_path, "ended", max_steps=10, is_given=False)
    assert found.sparse.state_dict() == whole.sparse.state_dict()
    ids = torch.arange(N_IDS)
    assert torch.equal(whole.model.eval().table(ids), found.model.eval().table(ids))


@pytest.mark.parametrize(("hyper_parameters", "lr"), [("load", 0.001), ("keep", 0.004)])
def test_a_resumed_run_has_the_learning_rates_that_it_asks_for(tmp_path, hyper_parameters, lr):
    constant = {"lr_scheduler_type": "constant"}
    fit(tmp_path, "runs", ended=5, learning_rate=0.001, **constant)
    resumed = fit(
        tmp_path,
        "runs",
        ended=6,
        lr=0.004,
        learning_rate=0.004,
        restore={"hyper_parameters": hyper_parameters},
        **constant,
    )
    assert resumed.sparse.param_groups[0]["lr"] == pytest.approx(lr)
    assert resumed.optimizer.param_groups[0]["lr"] == pytest.approx(lr)


def test_a_run_that_would_begin_anew_over_its_own_checkpoints_is_refused(tmp_path):
    fit(tmp_path, "runs")
    with pytest.raises(ValueError, match="has checkpoints, but training begins at step 0: call"):
        fit(tmp_path, "runs", resume=False)


def test_checkpoints_of_the_trainer_which_would_lose_rows_are_refused(tmp_path):
    with pytest.raises(ValueError, match="save_strategy='no'"):
        fit(tmp_path, "runs", save_strategy="steps")


def test_nothing_that_trains_is_said_to_be_missing(tmp_path, caplog):
    fit(tmp_path, "run", max_steps=10)
    manifest = tmp_path / "run/ckpt_10/manifest.json"
    assert not [record for record in caplog.records if "trains" in record.getMessage()]
    assert json.loads(manifest.read_text())["training"] == {"optimizers": {"optimizer": ["AdamW", "Adam"]}}


def test_a_trainer_that_tells_of_no_exception_refuses_to_save_on_one(tmp_path):
    call = r"call callback\.checkpoints\.save\(trainer\.state\.global_step\)"
    with pytest.raises(ValueError, match=rf"does not report exceptions to callbacks: {call} where"):
        fit(tmp_path, "runs", saves={"save_on_exception": True})
