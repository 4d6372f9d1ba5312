"""What a checkpoint of the Trainer brings back, the callback's brings back: each case resumes from either."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.rank_processes import run_script
from torch import nn
from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from recckpt import list_checkpoints, load_into
from recckpt.errors import CheckpointNotFoundError
from recckpt.integrations.transformers import TransformersCallback
from recckpt.policies.when import EveryEpochs

STEPS = 6  # of an epoch
LOSSES = [5.0, 2.0, 3.0, 1.0, 4.0, 6.0, 7.0, 8.0, 9.0, 9.5]  # of evaluations


class Clicks(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.clicks = torch.rand(4 * STEPS, 4, generator=generator)

    def __len__(self):
        return len(self.clicks)

    def __getitem__(self, index):
        return {"x": self.clicks[index], "labels": self.clicks[index, 0]}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.top = nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 1))

    def forward(self, x, labels):
        found = self.top(x).squeeze(1)
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


class Scripted(Trainer):
    """Its evaluations find what is written in LOSSES, so that patience ends."""

    def evaluation_loop(self, *args, **options):
        output = super().evaluation_loop(*args, **options)
        output.metrics["eval_scripted"] = LOSSES[self.state.global_step // 2 - 1]
        return output


class Killed(TrainerCallback):
    """Ends a run before a step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise ChildProcessError


class Counts(TrainerCallback, ExportableState):
    """Has a state that changes at each event."""

    def __init__(self, seen=0):
        self.seen = seen

    def on_step_begin(self, args, state, control, **kwargs):
        self.seen += 1

    on_step_end = on_log = on_evaluate = on_epoch_end = on_step_begin

    def state(self):
        return {"args": {"seen": self.seen}, "attributes": {}}


def fit(path, of_us, *, interval=2, killed=None, resume=False, first=False, patience=100, **options):
    """Train, and save by the trainer itself or by the callback, given before the others or after them."""
    torch.manual_seed(0)
    given = {"max_steps": 18, "logging_steps": 1, "per_device_train_batch_size": 4, "eval_strategy": "steps"}
    given |= {"eval_steps": 2, "save_strategy": "no", "metric_for_best_model": "scripted", "greater_is_better": False}
    given |= {"restore_callback_states_from_checkpoint": True, **options}
    callback = TransformersCallback(str(path), interval, max_keep=None)
    if not of_us:
        given |= {"save_strategy": "steps", "save_steps": interval}
    args = TrainingArguments(str(path), report_to=[], disable_tqdm=True, use_cpu=True, **given)
    others = [EarlyStoppingCallback(patience), Counts()] if args.eval_strategy != "no" else []
    if of_us:
        others = [callback, *others] if first else [*others, callback]
    if killed is not None:
        others.append(Killed(killed))
    trainer = Scripted(Model(), args, train_dataset=Clicks(), eval_dataset=Clicks(), callbacks=others)
    point = callback.resume_point(trainer) if of_us else resume
    try:
        trainer.train(resume_from_checkpoint=point or None)
    except ChildProcessError:
        assert killed is not None
        if of_us:
            callback.checkpoints.wait_until_finished()
    return trainer


def history(trainer):
    """The lines of the log without what depends on time, and without the summaries at the end of a training."""
    lines = [line for line in trainer.state.log_history if "train_runtime" not in line]
    return [{k: v for k, v in line.items() if not k.endswith(("_runtime", "_per_second"))} for line in lines]


def counted(trainer):
    return next(c.seen for c in trainer.callback_handler.callbacks if isinstance(c, Counts))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("killed", [8, 12], ids=["within an epoch", "with an epoch"])
def test_a_resumed_run_is_that_of_the_trainers_own_checkpoint(tmp_path, killed, first):
    whole = fit(tmp_path / "whole", False)
    fit(tmp_path / "theirs", False, killed=killed)
    theirs = fit(tmp_path / "theirs", False, resume=True)
    fit(tmp_path / "ours", True, killed=killed, first=first)
    ours = fit(tmp_path / "ours", True, first=first)
    for resumed in (theirs, ours):
        assert history(resumed) == history(whole)
        assert resumed.state.best_metric == whole.state.best_metric
        assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))
    assert counted(ours) == counted(whole)


@pytest.mark.parametrize("first", [False, True])
def test_patience_ends_where_it_does_in_a_run_that_never_ended(tmp_path, first):
    whole = fit(tmp_path / "whole", True, patience=2)
    fit(tmp_path / "ours", True, killed=10, patience=2, first=first)
    ours = fit(tmp_path / "ours", True, patience=2, first=first)
    assert ours.state.global_step == whole.state.global_step == 12


@pytest.mark.parametrize("options", [{}, {"eval_strategy": "epoch"}, {"eval_strategy": "no"}])
def test_the_model_that_is_loaded_is_the_one_that_was_trained(tmp_path, options):
    trainer = fit(tmp_path, True, interval=4, max_steps=7, **options)
    load_into(loaded := Model(), str(tmp_path))
    assert all(map(torch.equal, loaded.parameters(), trainer.model.parameters()))
    assert [one.step for one in list_checkpoints(str(tmp_path))] == [4, 7]


@pytest.mark.parametrize("interval", [STEPS, 100, EveryEpochs(1)])
def test_epochs_are_counted_once(tmp_path, interval):
    fit(tmp_path, True, interval=interval, max_steps=STEPS + 3)  # ends within its second epoch
    fit(tmp_path, True, interval=interval, max_steps=3 * STEPS)
    saved = {one.step: one.state.get("epochs", 0) for one in list_checkpoints(str(tmp_path))}
    assert saved[STEPS + 3] == 1
    assert saved[3 * STEPS] in ((3,) if interval != STEPS else (2, 3))


def test_a_callback_whose_state_would_be_lost_is_refused(tmp_path):
    args = TrainingArguments(str(tmp_path), save_strategy="no", report_to=[], use_cpu=True)
    callbacks = [TransformersCallback(str(tmp_path), 2), Counts()]
    trainer = Trainer(Model(), args, train_dataset=Clicks(), callbacks=callbacks)
    with pytest.raises(ValueError, match=r"^Counts has a state .*callback\.resume_point\(trainer\)\), also"):
        trainer.train()


@pytest.mark.parametrize("end", [{"max_steps": 5}, {"max_steps": -1, "num_train_epochs": 1.5}], ids=["steps", "epochs"])
def test_a_run_that_is_over_is_not_trained_further_when_it_is_started_again(tmp_path, end):
    first, again = (fit(tmp_path, True, **end) for _ in range(2))
    assert again.state.global_step == first.state.global_step
    assert all(map(torch.equal, first.model.parameters(), again.model.parameters()))
    longer = fit(tmp_path, True, max_steps=12)
    assert longer.state.global_step == 12


def test_an_epoch_whose_last_step_was_saved_has_its_evaluation_after_a_resume(tmp_path):
    options = {"eval_strategy": "epoch", "patience": 2, "interval": STEPS}
    whole = fit(tmp_path / "whole", True, **options)
    fit(tmp_path / "ours", True, killed=STEPS + 2, **options)
    ours = fit(tmp_path / "ours", True, **options)
    assert history(ours) == history(whole)
    [saved, *_] = list_checkpoints(str(tmp_path / "ours"))
    assert saved.state["eval_scripted"] == LOSSES[STEPS // 2 - 1]


class SavesByHand(TrainerCallback):
    """Saves in the middle of a step's events, by its number or not."""

    def __init__(self, callback, *numbers):
        self.callback, self.numbers = callback, numbers

    def on_evaluate(self, args, state, control, **kwargs):
        self.callback.checkpoints.save(*(state.global_step for _ in self.numbers))


def trainer_with(path, *others, datasets=None, **options):
    given = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 2, "per_device_train_batch_size": 4, **options}
    args = TrainingArguments(str(path), save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, **given)
    return Trainer(Model(), args, train_dataset=Clicks(), eval_dataset=datasets or Clicks(), callbacks=list(others))


def test_a_step_is_saved_by_hand_under_its_number_and_not_under_another(tmp_path):
    callback = TransformersCallback(str(tmp_path), 100)
    trainer = trainer_with(tmp_path, callback, SavesByHand(callback, "numbered"))
    trainer.train(resume_from_checkpoint=callback.resume_point(trainer))
    assert [one.step for one in list_checkpoints(str(tmp_path))] == [4, 6]
    callback = TransformersCallback(str(tmp_path / "other"), 100)
    trainer = trainer_with(tmp_path, callback, SavesByHand(callback))
    with pytest.raises(ValueError, match=r"^the trainer is at step 2, .* step 1: .*checkpoints\.save\(2\)$"):
        trainer.train(resume_from_checkpoint=callback.resume_point(trainer))


def test_the_metrics_of_all_datasets_are_kept(tmp_path):
    callback = TransformersCallback(str(tmp_path), 2)
    trainer = trainer_with(tmp_path, callback, datasets={"old": Clicks(), "new": Clicks()})
    trainer.train(resume_from_checkpoint=callback.resume_point(trainer))
    assert all({"eval_old_loss", "eval_new_loss"} <= {*one.state} for one in list_checkpoints(str(tmp_path)))


def test_a_run_that_must_resume_is_refused_where_there_is_nothing(tmp_path):
    callback = TransformersCallback(str(tmp_path), 2, restore={"required": True})
    with pytest.raises(CheckpointNotFoundError, match="found no committed checkpoint"):
        callback.resume_point(trainer_with(tmp_path, callback))


@pytest.mark.slow
def test_two_ranks_that_were_killed_resume_as_if_they_had_not_been(tmp_path):
    run_script(Path(__file__).with_name("trainer_ranks.py"), tmp_path, "transformers")
