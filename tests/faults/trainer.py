"""A trainer whose whole state is one number, which is also in the manifests of its checkpoints."""

from __future__ import annotations

from itertools import count

import torch
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.format.manifest import Manifest
from recckpt.sparse import HashTable, SparseAdagrad

_values = count(1)


class Stream:
    """A position in the data; without one, nobody would look at the file of positions."""

    position = 0

    def dump_io_state(self) -> dict[str, int]:
        return {"position": self.position}

    def load_io_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Trainer:
    """A process that trains: each save is of another value, which is also in the manifest."""

    def __init__(self, url: str, max_keep: int | None = 1) -> None:
        self.table = HashTable(1, name="t")
        self.top = nn.Linear(1, 1, bias=False)
        model = nn.ModuleDict({"t": self.table, "top": self.top})
        self.saver = Saver(model, SparseAdagrad([self.table]), url, max_keep=max_keep, concurrency=1)
        self.saver.register_io_state("stream", Stream())
        self.manager = CheckpointManager(self.saver, 10**9)

    @property
    def value(self) -> float | None:
        """The number that all of the state is of; None where it is of several."""
        found = {self.top.weight.item(), *self.table.embeddings().flatten().tolist()}
        found |= {value - 1 for value in self.table.slots["sparse_adagrad_sum"].flatten().tolist()}
        return found.pop() if len(found) == 1 else None

    def take_value(self) -> float:
        """Become of a value that nobody else has had, and return it."""
        value = float(next(_values))
        rows = torch.full((2, 1), value)
        self.table.clear()
        self.table.insert(torch.tensor([3, 7]), rows, {"sparse_adagrad_sum": rows + 1})
        with torch.no_grad():
            self.top.weight.fill_(value)
        return value

    def save(self) -> Manifest:
        """Train a step, and save."""
        self.manager.step()
        manifest = self.manager.save(state={"value": self.take_value()})
        assert manifest is not None
        return manifest

    def save_as(self, ckpt_id: str) -> Manifest:
        """Train, and save under an id without a step."""
        return self.saver.save(ckpt_id, state={"value": self.take_value()}, overwrite=True)
