"""Lightning clips, accumulates and scales a model with a table as it does the same model with an ``nn.Embedding``."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from support import twins
from torch.amp import GradScaler
from torch.utils.data import DataLoader, TensorDataset

from recckpt.integrations.lightning import LightningCallback
from recckpt.sparse import JointOptimizer, clip_grad_norm_

BOTH_SPOILT = {1: twins.TABLE, 4: twins.DENSE}


class Module(pl.LightningModule):
    def __init__(self, model, fused=False):
        super().__init__()
        self.model = model
        self.dense, self.sparse = twins.optimizers(model, fused)

    def training_step(self, batch, _):
        return self.model(*batch)

    def configure_optimizers(self):
        return self.dense


class Half(MixedPrecision):
    """The scaler of mixed precision, on the CPU and without its rounding, which would differ from row to row."""

    def __init__(self, scale):
        super().__init__("16-mixed", "cpu", GradScaler("cpu", init_scale=scale, growth_interval=3))

    def forward_context(self):
        return torch.autocast("cpu", enabled=False)


def fit(tmp_path, module, *, scale=None, spoilt=None, beside=(), max_epochs=2, **options):
    callbacks = []
    if module.sparse is not None:
        callbacks = [LightningCallback(str(tmp_path / "runs"), 2, sparse_optimizer=lambda module: module.sparse)]
    plugins = [] if scale is None else [Half(scale)]
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    options = {"logger": False, "enable_checkpointing": False, **options}
    trainer = pl.Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        callbacks=[*callbacks, *beside],
        plugins=plugins,
        **quiet,
        **options,
    )
    trainer.fit(module, DataLoader(TensorDataset(*twins.samples(spoilt)), batch_size=twins.BATCH))
    return trainer


CASES = {
    "clipped": {"gradient_clip_val": 1.0},
    "clipped to next to nothing": {"gradient_clip_val": 1e-3},
    "clipped by value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
    "accumulated, and the last window is short": {"accumulate_grad_batches": 3},
    "both": {"gradient_clip_val": 1.0, "accumulate_grad_batches": 3},
    "scaled": {"scale": 256.0},
    "scaled and all": {"scale": 256.0, "gradient_clip_val": 1.0, "accumulate_grad_batches": 3},
    "overflows": {"scale": 256.0, "spoilt": BOTH_SPOILT},
    "overflows and all": {
        "scale": 2.0**16,
        "spoilt": BOTH_SPOILT,
        "gradient_clip_val": 1.0,
        "accumulate_grad_batches": 2,
    },
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_table_learns_what_an_embedding_does(tmp_path, case):
    gain = 100.0 if "gradient_clip_val" in case else 1.0  # gradients far beyond the limit, where there is one
    ours, theirs = Module(twins.with_table(gain)), Module(twins.with_embedding(gain))
    our_trainer, their_trainer = (fit(tmp_path, module, **case) for module in (ours, theirs))
    twins.assert_equal(ours.model, theirs.model)
    assert our_trainer.precision_plugin.state_dict() == their_trainer.precision_plugin.state_dict()
    assert our_trainer.optimizers == [ours.dense]


def test_a_scaled_run_that_was_ended_and_resumed_is_one_that_never_was(tmp_path):
    def run(name, epochs):
        module = Module(twins.with_table())
        trainer = fit(tmp_path / name, module, scale=2.0**16, spoilt=BOTH_SPOILT, max_epochs=epochs)
        return twins.trained(module.model), trainer.precision_plugin.state_dict()

    whole = run("whole", 4)
    run("ended", 2)
    resumed = run("ended", 4)
    assert resumed[1] == whole[1]
    assert all(torch.equal(resumed[0][name], value) for name, value in whole[0].items())


class ByItself(Module):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")


class ByOneLine(Module):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        clip_grad_norm_(self, optimizer, 0.5)


def test_a_fused_optimizer_is_scaled_with_the_table(tmp_path):
    ours, theirs = (Module(make(), fused=True) for make in (twins.with_table, twins.with_embedding))
    for module in (ours, theirs):
        fit(tmp_path, module, scale=256.0, spoilt=BOTH_SPOILT)
    twins.assert_equal(ours.model, theirs.model)


@pytest.mark.parametrize("kind", [ByItself, ByOneLine])
def test_a_module_that_clips_by_itself_clips_tables_too_and_is_warned(tmp_path, kind, caplog):
    ours, theirs = kind(twins.with_table(100.0)), ByItself(twins.with_embedding(100.0))
    for module in (ours, theirs):
        fit(tmp_path, module)
    twins.assert_equal(ours.model, theirs.model)
    warnings = [record.getMessage() for record in caplog.records if record.name == "recckpt"]
    assert len(warnings) == 1
    assert f"{kind.__name__}.configure_gradient_clipping: tables are in optimizer.param_groups" in warnings[0]


class WithJoint(Module):
    def configure_optimizers(self):
        return JointOptimizer(self.dense, self.sparse) if self.sparse is not None else self.dense


class ByHand(WithJoint):
    """Manual optimization; mixed precision scales and unscales there too."""

    def __init__(self, model):
        super().__init__(model)
        self.automatic_optimization = False

    def training_step(self, batch, _):
        optim = self.optimizers()
        optim.zero_grad()
        self.manual_backward(self.model(*batch))
        optim.step()


class InTwo(ByHand):
    def configure_optimizers(self):
        return [self.dense]


@pytest.mark.parametrize("kind", [WithJoint, ByHand])
def test_a_module_may_give_the_joint_optimizer_itself(tmp_path, kind, caplog):
    ours, theirs = kind(twins.with_table()), kind(twins.with_embedding())
    trainers = [fit(tmp_path, module, scale=2.0**16, spoilt=BOTH_SPOILT) for module in (ours, theirs)]
    twins.assert_equal(ours.model, theirs.model)
    assert trainers[0].precision_plugin.state_dict() == trainers[1].precision_plugin.state_dict()
    assert not [record for record in caplog.records if record.name == "recckpt"]


def test_manual_optimization_whose_scale_would_reach_the_tables_is_warned_of(tmp_path, caplog):
    fit(tmp_path, InTwo(twins.with_table()), scale=256.0)
    assert "return recckpt.sparse.JointOptimizer(dense, sparse) there" in caplog.text


def test_tables_that_count_batches_by_themselves_are_refused(tmp_path):
    module = Module(twins.with_table())
    module.sparse.set_grad_accum_steps(2)
    with pytest.raises(ValueError, match=r"set_grad_accum_steps\(2\).*accumulate_grad_batches"):
        fit(tmp_path, module, accumulate_grad_batches=2)


def test_a_strategy_that_steps_by_an_engine_of_its_own_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(SingleDeviceStrategy, "handles_gradient_accumulation", True)
    with pytest.raises(ValueError, match="SingleDeviceStrategy steps in its own engine"):
        fit(tmp_path, Module(twins.with_table()))


class TablesOnly(Module):
    def configure_optimizers(self):
        return self.sparse if self.sparse is not None else torch.optim.SGD(self.model.rows.parameters(), lr=0.1)


def test_an_optimizer_of_tables_may_be_the_only_one(tmp_path):
    ours, theirs = TablesOnly(twins.with_table()), TablesOnly(twins.with_embedding())
    for module in (ours, theirs):
        fit(tmp_path, module, gradient_clip_val=0.5, accumulate_grad_batches=2)
    twins.assert_equal(ours.model, theirs.model)


class Warmup(Module):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        for group in optimizer.param_groups:
            assert group["lr"] > 0
            group["lr"] = 0.01
        optimizer.step(closure=optimizer_closure)


def test_a_hook_that_sets_learning_rates_sets_those_of_the_module_s_own_optimizer(tmp_path):
    module = Warmup(twins.with_table())
    fit(tmp_path, module)
    assert module.dense.param_groups[0]["lr"] == 0.01
    assert module.sparse.param_groups[0]["lr"] == 0.1


class Finetuning(BackboneFinetuning):
    def __init__(self):
        super().__init__(
            unfreeze_backbone_at_epoch=1, lambda_func=lambda _: 1.0, backbone_initial_lr=0.1, verbose=False
        )


class WithBackbone(Module):
    """Its backbone is the upper part, which the optimizer gets in the second epoch."""

    def __init__(self, model):
        super().__init__(model)
        self.backbone = model.top

    def configure_optimizers(self):
        return torch.optim.SGD([self.model.shift, *self.model.rows.parameters()], lr=0.1)


def test_other_callbacks_see_the_optimizer_of_the_module(tmp_path):
    ours, theirs = WithBackbone(twins.with_table()), WithBackbone(twins.with_embedding())
    for module in (ours, theirs):
        beside = [Finetuning(), LearningRateMonitor(), ModelCheckpoint(tmp_path / "kept")]
        trainer = fit(
            tmp_path,
            module,
            beside=beside,
            gradient_clip_val=0.5,
            logger=CSVLogger(tmp_path),
            enable_checkpointing=True,
        )
    twins.assert_equal(ours.model, theirs.model)
    assert len(trainer.optimizers[0].param_groups) == 2


def test_a_finder_of_learning_rates_that_sets_the_optimizers_anew_leaves_the_tables_stepping(tmp_path):
    module = Module(twins.with_table())
    seen = []

    class Reset(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            trainer.optimizers = trainer.optimizers
            seen.append(twins.trained(module.model)["rows"].clone())

    fit(tmp_path, module, beside=[Reset()])
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], twins.trained(module.model)["rows"])
