"""Lightning averages weights, tables too: in validation, in checkpoints, in the end, and across a resume."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from recckpt.integrations.lightning import LightningCallback
from recckpt.sparse import HashTable, SparseSGD
from recckpt.sparse.table.first_values import first_embeddings

averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")

N, DIM = 30, 4
IDS = torch.arange(N)


class Clicks(pl.LightningModule):
    """With a table, or with an nn.Embedding of the same rows."""

    def __init__(self, is_dense=False):
        super().__init__()
        self.strict_loading = False
        torch.manual_seed(0)
        self.top, self.validated = nn.Linear(DIM, 1), []
        self.table = HashTable(DIM, name="t")
        self.table(IDS)  # an id without a row would read zeros in validation
        if is_dense:
            rows = first_embeddings(self.table, IDS.numpy())
            self.table = nn.Embedding(N, DIM, _weight=rows)

    def training_step(self, batch, _):
        ids, clicks = batch
        return nn.functional.mse_loss(self.top(self.table(ids)).squeeze(1), clicks)

    def validation_step(self, batch, _):
        self.validated.append(self.top(self.table(batch[0])).detach().clone())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def rows(self):
        return self.table.weight.data if isinstance(self.table, nn.Embedding) else self.table.lookup(IDS)[0]


def data(shuffle):
    generator = torch.Generator().manual_seed(1)
    clicks = TensorDataset(torch.cat([IDS, IDS]), torch.rand(2 * N, generator=generator))
    return StatefulDataLoader(clicks, batch_size=4, shuffle=shuffle)


def fit(tmp_path, steps, *, is_dense=False, name="run", before=(), after=(), **options):
    module = Clicks(is_dense)
    average = averaging.EMAWeightAveraging(decay=0.9, use_buffers=False)
    ours = [] if is_dense else [LightningCallback(str(tmp_path / name), 10, sparse_optimizer=tables_of)]
    options = {"enable_checkpointing": False, "val_check_interval": 5, **options}
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        callbacks=[*before, average, *ours, *after],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(tmp_path / "lightning"),
        num_sanity_val_steps=0,
        max_epochs=100,
        **options,
    )
    torch.manual_seed(0)
    trainer.fit(module, data(True), data(False))
    return module, average


def tables_of(module):
    return SparseSGD([module.table], lr=0.5)


def test_validation_and_the_end_have_the_averaged_rows_as_with_an_embedding(tmp_path):
    (ours, average), (dense, _) = fit(tmp_path, 40), fit(tmp_path, 40, is_dense=True)
    assert len(ours.validated) == len(dense.validated) > 0
    for one, other in zip(ours.validated, dense.validated, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert torch.allclose(ours.rows(), dense.rows(), rtol=0, atol=1e-6)
    assert torch.equal(ours.rows(), average._average_model.module.table.lookup(IDS)[0])
    assert type(ours.table) is HashTable


def test_a_resumed_run_goes_on_with_the_averages_it_had(tmp_path):
    whole, _ = fit(tmp_path, 40, name="whole")
    fit(tmp_path, 20, name="halves")
    resumed, _ = fit(tmp_path, 40, name="halves")
    assert torch.equal(whole.rows(), resumed.rows())
    assert all(map(torch.equal, whole.top.parameters(), resumed.top.parameters()))


def test_the_files_of_a_model_checkpoint_hold_no_tables(tmp_path):
    files = ModelCheckpoint(str(tmp_path / "files"), every_n_train_steps=5)
    fit(tmp_path, 10, after=[files], enable_checkpointing=True)
    found = torch.load(files.best_model_path, weights_only=False)
    assert set(found["state_dict"]) == set(found["current_model_state"]) == {"top.weight", "top.bias"}


def test_what_averages_parameters_alone_or_too_late_is_refused(tmp_path):
    with pytest.raises(ValueError, match="StochasticWeightAveraging"):
        fit(tmp_path, 10, before=[StochasticWeightAveraging(swa_lrs=0.1)])
    with pytest.raises(ValueError, match="comes after LightningCallback"):
        fit(tmp_path, 10, after=[averaging.WeightAveraging()])
