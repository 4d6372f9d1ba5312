"""Lightning clips, accumulates and scales a model with a table as it does the same model with an ``nn.Embedding``."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
import twins
from lightning.pytorch.plugins import MixedPrecision
from torch.amp import GradScaler
from torch.utils.data import DataLoader, TensorDataset

from recckpt.integrations.lightning import RecckptCallback
from recckpt.sparse import JointOptimizer, clip_grad_norm_

BOTH_SPOILT = {1: twins.TABLE, 4: twins.DENSE}


class Module(pl.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.dense, self.sparse = twins.optimizers(model)

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


def fit(tmp_path, module, *, scale=None, spoilt=None, **options):
    callbacks = []
    if module.sparse is not None:
        callbacks = [RecckptCallback(str(tmp_path / "runs"), 1000, sparse_optimizer=lambda module: module.sparse)]
    plugins = [] if scale is None else [Half(scale)]
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        callbacks=callbacks,
        plugins=plugins,
        enable_checkpointing=False,
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
