"""The Trainer of Hugging Face clips, accumulates and scales a table as it does an ``nn.Embedding`` in its place."""

from __future__ import annotations

import math

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import AutocastKwargs
from support import twins
from torch.amp import GradScaler
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from recckpt.integrations.transformers import TransformersCallback


class Samples(Dataset):
    def __init__(self, spoilt):
        self.columns = twins.samples(spoilt)

    def __len__(self):
        return len(self.columns[0])

    def __getitem__(self, index):
        return dict(zip(("ids", "labels", "spoilt"), (column[index] for column in self.columns), strict=True))


class Model(torch.nn.Module):
    def __init__(self, twin):
        super().__init__()
        self.twin = twin

    def forward(self, ids, labels, spoilt):
        return {"loss": self.twin(ids, labels, spoilt)}


class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return None


def half(trainer, scale):
    """Let accelerate scale as with fp16, which it refuses on a CPU."""
    accelerator = trainer.accelerator
    accelerator.native_amp, accelerator.scaler = True, GradScaler("cpu", init_scale=scale, growth_interval=3)
    accelerator.state._mixed_precision = "fp16"
    accelerator.autocast_handler = AutocastKwargs(enabled=False)  # whose rounding would differ from row to row


def trainer_of(tmp_path, twin, *, scale=None, spoilt=None, callbacks=(), accumulated=1, fused=False, **options):
    dense, sparse = twins.optimizers(twin, fused=fused)
    given = {"max_grad_norm": 0.0, "num_train_epochs": 2, "save_strategy": "no", "logging_steps": 1, **options}
    args = TrainingArguments(
        str(tmp_path / "hf"),
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        per_device_train_batch_size=twins.BATCH,
        lr_scheduler_type="constant",
        **given,
    )
    if sparse is not None:
        sparse.set_grad_accum_steps(accumulated)
        callbacks = [TransformersCallback(str(tmp_path / "runs"), 2, sparse_optimizer=sparse), *callbacks]
    trainer = InOrder(
        Model(twin), args, train_dataset=Samples(spoilt), callbacks=[*callbacks], optimizers=(dense, None)
    )
    if scale is not None:
        half(trainer, scale)
    return trainer


BOTH_SPOILT = {1: twins.TABLE, 4: twins.DENSE}
CASES = {
    "neither": {},
    "clipped": {"max_grad_norm": 1.0},
    "clipped to next to nothing": {"max_grad_norm": 1e-3},
    "accumulated, and the last window is short": {"gradient_accumulation_steps": 3},
    "both": {"max_grad_norm": 1.0, "gradient_accumulation_steps": 3},
    "scaled": {"scale": 256.0},
    "scaled and all": {"scale": 256.0, "max_grad_norm": 1.0, "gradient_accumulation_steps": 3},
    "overflows": {"scale": 256.0, "spoilt": BOTH_SPOILT},
    "overflows and all": {
        "scale": 2.0**16,
        "spoilt": BOTH_SPOILT,
        "max_grad_norm": 1.0,
        "gradient_accumulation_steps": 2,
    },
    "overflows of a fused optimizer": {"scale": 256.0, "spoilt": BOTH_SPOILT, "fused": True},
}


def logged_norms(trainer):
    """The norms that were logged, NaN where one is not finite."""
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    return [norm if math.isfinite(norm) else math.nan for norm in norms]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_table_learns_what_an_embedding_does(tmp_path, case):
    gain = 100.0 if "max_grad_norm" in case else 1.0  # gradients far beyond the limit, where there is one
    ours, theirs = twins.with_table(gain), twins.with_embedding(gain)
    our_trainer, their_trainer = (trainer_of(tmp_path, twin, **case) for twin in (ours, theirs))
    for trainer in (our_trainer, their_trainer):
        trainer.train()
    twins.assert_equal(ours, theirs)
    logs = [logged_norms(trainer) for trainer in (our_trainer, their_trainer)]
    assert len(logs[0]) > 4
    torch.testing.assert_close(*logs, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert our_trainer.args.max_grad_norm == case.get("max_grad_norm", 0.0)
    if "scale" in case:
        assert our_trainer.accelerator.scaler.state_dict() == their_trainer.accelerator.scaler.state_dict()


class Interrupted(TrainerCallback):
    """Ends the first training by an exception in its step 2."""

    def __init__(self):
        self.seen = 0

    def on_step_begin(self, args, state, control, **kwargs):
        self.seen += 1
        if self.seen == 2:
            raise KeyboardInterrupt


def test_after_an_exception_the_same_arguments_clip_as_before(tmp_path):
    first = trainer_of(tmp_path, twins.with_table(100.0), max_grad_norm=1.0, callbacks=[Interrupted()])
    with pytest.raises(KeyboardInterrupt):
        first.train()
    ours, theirs = twins.with_table(100.0), twins.with_embedding(100.0)
    trainers = [trainer_of(tmp_path, twin, max_grad_norm=1.0) for twin in (ours, theirs)]
    trainers[0].args.__dict__.update(vars(first.args))  # as of a notebook whose cell of arguments is not run again
    for trainer in trainers:
        trainer.train()
    twins.assert_equal(ours, theirs)
    assert trainers[0].args.max_grad_norm == 1.0


def test_the_same_trainer_goes_on_after_an_exception(tmp_path):
    ours, theirs = twins.with_table(100.0), twins.with_embedding(100.0)
    for twin in (ours, theirs):
        trainer = trainer_of(tmp_path, twin, max_grad_norm=1.0, callbacks=[Interrupted()])
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.train()
    twins.assert_equal(ours, theirs)


def test_a_table_that_counts_batches_itself_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, twins.with_table(), gradient_accumulation_steps=2, accumulated=2)
    with pytest.raises(ValueError, match=r"set_grad_accum_steps\(2\).*let the trainer accumulate"):
        trainer.train()


class Ended(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 8
        return control


def test_a_scaled_run_that_was_ended_and_resumed_is_one_that_never_was(tmp_path):
    def run(name, *callbacks):
        twin = twins.with_table()
        trainer = trainer_of(tmp_path / name, twin, scale=2.0**16, spoilt=BOTH_SPOILT, callbacks=callbacks)
        callback = next(c for c in trainer.callback_handler.callbacks if isinstance(c, TransformersCallback))
        trainer.train(resume_from_checkpoint=callback.resume_point(trainer))
        return twins.trained(twin), trainer.accelerator.scaler.state_dict()

    whole = run("whole")
    run("ended", Ended())
    resumed = run("ended")
    assert resumed[1] == whole[1]
    assert all(torch.equal(resumed[0][name], value) for name, value in whole[0].items())


class Engine(AcceleratedOptimizer):
    """Such as those of DeepSpeed and Megatron, whose step is done elsewhere."""

    def step(self, closure=None):
        pass


def test_an_engine_that_steps_by_itself_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, twins.with_table(), max_grad_norm=1.0)
    prepare = trainer.accelerator.prepare_optimizer
    trainer.accelerator.prepare_optimizer = lambda *given, **named: Engine(prepare(*given, **named).optimizer)
    with pytest.raises(ValueError, match="found Engine as the trainer's optimizer, expected one of torch"):
        trainer.train()
    assert trainer.args.max_grad_norm == 1.0
