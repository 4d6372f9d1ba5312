"""A model of plain embeddings with optimizers of torch, trained at random, and copies of all that it is."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim

from recckpt import Saver
from recckpt.live import live_tables
from support import spec_reader
from support.devices import here, skip_without_kernel

N_ROWS, DIM = 60, 3
SPARSE: dict[str, Callable[[list[Tensor]], optim.Optimizer]] = {  # of sparse gradients
    "SparseAdam": lambda weights: optim.SparseAdam(weights, lr=0.1),
    "SparseAdam maximize": lambda weights: optim.SparseAdam(weights, lr=0.1, maximize=True),
    "sparse Adagrad": lambda weights: optim.Adagrad(weights, lr=0.1, lr_decay=0.1),
    "sparse SGD": lambda weights: optim.SGD(weights, lr=0.1),
}
DENSE: dict[str, Callable[[list[Tensor]], optim.Optimizer]] = {
    "Adagrad": lambda weights: optim.Adagrad(weights, lr=0.1, initial_accumulator_value=0.1),
    "Adagrad foreach": lambda weights: optim.Adagrad(weights, lr=0.1, foreach=True),
    "Adagrad fused": lambda weights: optim.Adagrad(weights, lr=0.1, fused=True),
    "Adagrad decay": lambda weights: optim.Adagrad(weights, lr=0.1, weight_decay=0.01),
    "SGD": lambda weights: optim.SGD(weights, lr=0.1),
    "SGD fused": lambda weights: optim.SGD(weights, lr=0.1, fused=True),
    "SGD maximize": lambda weights: optim.SGD(weights, lr=0.1, maximize=True),
    "SGD momentum": lambda weights: optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True),
    "SGD decay": lambda weights: optim.SGD(weights, lr=0.1, weight_decay=0.01),
    "Adam": lambda weights: optim.Adam(weights, lr=0.1),
    "Adam fused": lambda weights: optim.Adam(weights, lr=0.1, fused=True),
    "Adam amsgrad": lambda weights: optim.Adam(weights, lr=0.1, amsgrad=True),
    "AdamW": lambda weights: optim.AdamW(weights, lr=0.1),
    "AdamW maximize": lambda weights: optim.AdamW(weights, lr=0.1, maximize=True, foreach=True),
}
OPTIMIZERS = {**SPARSE, **DENSE}
MARKED = [*SPARSE, "Adagrad", "Adagrad foreach", "Adagrad fused", "SGD", "SGD fused"]  # rows by gradient


class Clicks(nn.Module):
    """Users and items, as plain embeddings, and a dense layer."""

    def __init__(self, *, sparse: bool = False, n_rows: int = N_ROWS) -> None:
        super().__init__()
        self.users = nn.Embedding(n_rows, DIM, sparse=sparse)
        self.items = nn.EmbeddingBag(n_rows, DIM, sparse=sparse, mode="sum")
        self.top = nn.Linear(2 * DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.top(torch.cat([self.users(ids[:, 0]), self.items(ids)], -1))
        return x.squeeze(-1)


class Run:
    """A model in training, where models are made: its tables, both optimizers, and a saver of it.

    Args:
        output_dir: of the saver.
        rule: a key of OPTIMIZERS, which trains the tables.
        audit: at every how manyth save the marks are compared with fingerprints; 0 for never.
        options: of the saver.
    """

    def __init__(
        self, output_dir: Any, rule: str = "sparse Adagrad", *, seed: int = 0, audit: int = 0, **options: Any
    ) -> None:
        torch.manual_seed(seed)
        self.url, self.model = Path(output_dir), Clicks(sparse=rule in SPARSE).to(here())
        self.row_optim = OPTIMIZERS[rule]([self.model.users.weight, self.model.items.weight])
        skip_without_kernel(self.row_optim)
        self.dense_optim = optim.Adam(self.model.top.parameters(), lr=0.01)
        self.tables = live_tables(self.model, [self.row_optim], min_rows=10, audit=audit)
        self.saver = self.new_saver(output_dir, **options)
        self.random = torch.Generator().manual_seed(seed)

    def new_saver(self, output_dir: Any, **options: Any) -> Saver:
        """Return a saver of this run."""
        saver = Saver(self.model, output_dir=str(output_dir), tables=self.tables, progress=False, **options)
        saver.register_for_checkpointing("dense_optim", self.dense_optim)
        return saver

    def dense_saver(self, output_dir: Any, *, registered: bool = True, **options: Any) -> Saver:
        """Return a saver to which the weights are dense tensors, and that has both optimizers where ``registered``."""
        saver = Saver(self.model, output_dir=str(output_dir), progress=False, **options)
        saver.register_for_checkpointing("dense_optim", self.dense_optim)
        if registered:
            saver.register_for_checkpointing("row_optim", self.row_optim)
        return saver

    def train(self, n_steps: int = 1, n_ids: int = 4) -> None:
        """Step so often, each time with a few ids."""
        for _ in range(n_steps):
            self.backward(n_ids)
            self.step()

    def backward(self, n_ids: int = 4) -> None:
        """Make gradients."""
        ids = torch.randint(0, N_ROWS, (n_ids, 2), generator=self.random)
        self.model(ids.to(self.model.top.weight.device)).square().sum().backward()

    def step(self) -> None:
        """Step both optimizers."""
        for one in (self.row_optim, self.dense_optim):
            one.step()
            one.zero_grad()

    def state(self) -> dict[str, Any]:
        """Return a copy of all that there is."""
        optimizers = (self.row_optim, self.dense_optim)
        return copy.deepcopy(
            {"model": self.model.state_dict(), **{str(i): o.state_dict() for i, o in enumerate(optimizers)}}
        )

    def rows(self) -> dict[str, dict[int, dict[str, bytes]]]:
        """Return the rows of all tables, as the judge of the page gives them."""
        return {
            name: rows_of({slot: tensor.detach().cpu().numpy() for slot, tensor in table.live.tensors().items()})
            for name, table in self.tables.items()
        }


def rows_of(columns: dict[str, np.ndarray[Any, Any]]) -> dict[int, dict[str, bytes]]:
    """Return id -> slot -> bytes, of columns whose row numbers are the ids."""
    n_rows = len(columns["embedding"])
    return {row: {slot: values[row].tobytes() for slot, values in columns.items()} for row in range(n_rows)}


def assert_same(one: Any, other: Any) -> None:
    """Check that two states are equal, bit by bit."""
    if isinstance(one, Tensor):
        assert isinstance(other, Tensor)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.detach().cpu().numpy().tobytes() == other.detach().cpu().numpy().tobytes()
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def read_rows(run: Run, ckpt_id: str) -> dict[str, dict[int, dict[str, bytes]]]:
    """Return the rows of a checkpoint by the page alone."""
    return {name: spec_reader.read(run.url, ckpt_id, name) for name in run.tables}
