"""Models of live tables trained at random, and what of them has changed, bit for bit, beside what was saved."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim

from recckpt import CheckpointManager, CheckpointReader, Saver
from recckpt.live import live_tables
from support import spec_reader
from support.builders import Run, Stream
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


def rows_of(tables):
    """Return the bytes of all rows by table and slot."""
    return {
        (name, slot): values.detach().cpu().numpy().tobytes()
        for name, table in tables.items()
        for slot, values in table.live.tensors().items()
    }


class Rows:
    """Notes what live tables announce from now on, and compares with copies what has changed since; a context."""

    def __init__(self, tables):
        self._tables, self._announced, self._removers = tables, {name: set() for name in tables}, []
        self._before = {name: self._bits(table) for name, table in tables.items()}

    def __enter__(self):
        for name, table in self._tables.items():
            self._removers.append(self._noting(table.store, self._announced[name]))
        return self

    def __exit__(self, *error):
        for remove in self._removers:
            remove()

    def announced(self):
        """Return the rows that were announced, by table."""
        return {name: set(rows) for name, rows in self._announced.items()}

    def changed(self):
        """Return the rows that differ by a bit from those at the beginning, by table."""
        return {
            name: set(np.flatnonzero((self._bits(table) != self._before[name]).any(1)).tolist())
            for name, table in self._tables.items()
        }

    @staticmethod
    def _bits(table):
        tensors = [values.detach().cpu().contiguous() for values in table.live.tensors().values()]
        return np.concatenate(
            [values.flatten(1).view(torch.uint8).numpy().copy() for values in map(_matrix, tensors)], 1
        )

    @staticmethod
    def _noting(store, rows):
        announce, announce_all = store.announce, store.announce_all

        def noting(some):  # numbers of rows, or a bool for each
            rows.update((some.nonzero() if some.dtype == torch.bool else some).flatten().tolist())
            announce(some)

        store.announce = noting
        store.announce_all = lambda: (rows.update(range(len(store))), announce_all())

        def remove():
            del store.announce, store.announce_all

        return remove


def _matrix(values):
    """Return a tensor of two dimensions: of scalars, with a column."""
    return values[:, None] if values.dim() == 1 else values


def assert_saved(tables, output_dir, rows=None):
    """Check that the newest checkpoint has these rows of all tables, by default those of now."""
    rows = rows_of(tables) if rows is None else rows
    with CheckpointReader(str(output_dir)) as reader:
        for (name, slot), expected in rows.items():
            values, is_there = reader.lookup(name, np.arange(tables[name].live.n_rows), slot)
            assert is_there.all(), name
            assert values.tobytes() == expected, (name, slot)


class LiveClickModel(nn.Module):
    """Two plain embeddings, one with sparse gradients, and a dense part with buffers and dropout."""

    tables = ()  # of ours

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.users = nn.Embedding(41, dim, sparse=True)
        self.items = nn.EmbeddingBag(200, dim)
        self.norm = nn.BatchNorm1d(2 * dim)
        self.top = nn.Linear(2 * dim, 1)
        self.drop = nn.Dropout(0.1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        x = torch.cat([self.users(users.abs()), self.items(items[:, None])], -1)
        return self.top(self.drop(self.norm(x))).squeeze(-1)


class LiveRun(Run):
    """A run whose tables are live ones: of users, marked by hooks, and of items, by fingerprints."""

    lies_in_place = True

    def __init__(
        self, url: Path | str, interval: int = 10, max_keep: int | None = 1, seed: int = 0, **options: Any
    ) -> None:
        self.seed(seed)
        self.model = LiveClickModel().to(here())
        self.sparse = torch.optim.Adagrad([self.model.users.weight, self.model.items.weight], lr=0.05)
        self.dense = torch.optim.Adam([*self.model.norm.parameters(), *self.model.top.parameters()], lr=0.01)
        self.stream = Stream()
        names, marks = {"users": "user/1", "items": "item"}, {"item": "fingerprints"}
        tables = live_tables(self.model, self.sparse, min_rows=1, names=names, marks=marks)
        self.saver = Saver(self.model, None, str(url), max_keep=max_keep, concurrency=2, tables=tables, **options)
        self.saver.register_for_checkpointing("dense_optim", self.dense)
        self.saver.register_io_state("stream", self.stream)
        self.manager = CheckpointManager(self.saver, interval)

    def change(self, items: Tensor) -> None:
        """Write rows of which no hook knows."""
        self.model.items.weight.data[items[:8]] *= 0.5


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
        saver = Saver(self.model, output_dir=str(output_dir), tables=self.tables, **options)
        saver.register_for_checkpointing("dense_optim", self.dense_optim)
        return saver

    def dense_saver(self, output_dir: Any, *, registered: bool = True, **options: Any) -> Saver:
        """Return a saver to which the weights are dense tensors, and that has both optimizers where ``registered``."""
        saver = Saver(self.model, output_dir=str(output_dir), **options)
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
            name: rows_by_id({slot: tensor.detach().cpu().numpy() for slot, tensor in table.live.tensors().items()})
            for name, table in self.tables.items()
        }


def rows_by_id(columns: dict[str, np.ndarray[Any, Any]]) -> dict[int, dict[str, bytes]]:
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
