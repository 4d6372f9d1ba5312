"""Lightning's averages of weights are refused where tables are trained; the line to write averages instead."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from recckpt.averages import RowAverage
from recckpt.integrations.lightning import LightningCallback
from recckpt.sparse import HashTable, SparseSGD

averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")

N, DIM, DECAY = 30, 4, 0.9
IDS = torch.arange(N)


class Clicks(pl.LightningModule):
    """Averages its rows, as the page says, and keeps what an average of all rows would be beside it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.top, self.validated = nn.Linear(DIM, 1), []
        self.table = HashTable(DIM, name="t")
        self.table(IDS)
        self.average = RowAverage(self, DECAY)
        self.expected = self.table.lookup(IDS)[0]

    def training_step(self, batch, _):
        ids, clicks = batch
        return nn.functional.mse_loss(self.top(self.table(ids)).squeeze(1), clicks)

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.average.update()
        self.expected = DECAY * self.expected + (1 - DECAY) * self.table.lookup(IDS)[0]

    def validation_step(self, batch, _):
        with self.average.swap():
            self.validated.append(torch.allclose(self.table(IDS), self.expected, rtol=0, atol=1e-6))

    def configure_optimizers(self):
        return torch.optim.SGD(self.top.parameters(), lr=0.5)


def data(shuffle):
    generator = torch.Generator().manual_seed(1)
    clicks = TensorDataset(torch.cat([IDS, IDS]), torch.rand(2 * N, generator=generator))
    return StatefulDataLoader(clicks, batch_size=4, shuffle=shuffle)


def tables_of(module):
    return SparseSGD([module.table], lr=0.5)


def fit(tmp_path, steps, *, name="run", before=()):
    module = Clicks()
    ours = LightningCallback(str(tmp_path / name), 10, sparse_optimizer=tables_of)
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        callbacks=[*before, ours],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(tmp_path / "lightning"),
        num_sanity_val_steps=0,
        max_epochs=100,
        val_check_interval=5,
    )
    torch.manual_seed(0)
    trainer.fit(module, data(True), data(False))
    return module


@pytest.mark.parametrize(
    "callback",
    [
        averaging.WeightAveraging,
        lambda: averaging.EMAWeightAveraging(decay=DECAY),
        lambda: StochasticWeightAveraging(swa_lrs=0.1),
    ],
)
def test_what_averages_parameters_alone_is_refused_by_name(tmp_path, callback):
    callback = callback()
    refusal = rf"^{type(callback).__name__} averages parameters, .*RowAverage\(model, decay\)"
    with pytest.raises(ValueError, match=refusal):
        fit(tmp_path, 10, before=[callback])


def test_validation_looks_up_the_averages_of_the_module(tmp_path):
    module = fit(tmp_path, 40)
    assert module.validated
    assert all(module.validated)
    assert not torch.equal(module.average.tables["t"].lookup(IDS)[0], module.table.lookup(IDS)[0])


def test_a_resumed_run_goes_on_with_the_averages_it_had(tmp_path):
    whole = fit(tmp_path, 40, name="whole")
    fit(tmp_path, 20, name="halves")
    resumed = fit(tmp_path, 40, name="halves")
    for one, other in ((whole.table, resumed.table), (whole.average.tables["t"], resumed.average.tables["t"])):
        assert torch.equal(one.lookup(IDS)[0], other.lookup(IDS)[0])
