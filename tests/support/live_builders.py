"""A training run of live tables: a process as :class:`support.builders.Run`, of which the same is known."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recckpt import CheckpointManager, Saver
from recckpt.live import live_tables
from support.builders import Run, Stream
from support.devices import here


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
