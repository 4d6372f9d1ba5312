"""A trainer whose whole state is one number, which is also in the manifests of its checkpoints."""

from __future__ import annotations

from itertools import count

import torch
from torch import nn

from recckpt import CheckpointManager, Deltas, Saver
from recckpt.format.manifest import Manifest
from recckpt.sparse import HashTable, SparseAdagrad

_values = count(1)
_MOVING = torch.tensor([3, 4, 7])  # ids that change, and of which two at a time are there
_STEADY = torch.arange(100, 107)  # those that never do, and are in full checkpoints only
_DELTAS = Deltas(full_every=6, max_chain_bytes=99.0)


class Stream:
    """A position in the data; without one, nobody would look at the file of positions."""

    position = 0

    def dump_io_state(self) -> dict[str, int]:
        return {"position": self.position}

    def load_io_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Trainer:
    """A process that trains: each save is of another value, which is also in the manifest."""

    def __init__(self, url: str, max_keep: int | None = 1, *, deltas: bool = False) -> None:
        self.table, self._steady = HashTable(1, name="t"), _STEADY if deltas else _STEADY[:0]
        self.top = nn.Linear(1, 1, bias=False)
        model = nn.ModuleDict({"t": self.table, "top": self.top})
        optim, kind = SparseAdagrad([self.table]), _DELTAS if deltas else False
        self.saver = Saver(model, optim, url, max_keep=max_keep, concurrency=1, deltas=kind)
        self._insert(self._steady, self._steady[:, None].float())
        self.saver.register_io_state("stream", Stream())
        self.manager = CheckpointManager(self.saver, 10**9)

    @property
    def value(self) -> float | None:
        """The number that all of the state is of, but for what never changes; None where it is of several."""
        ids, rows = self.table.ids(), self.table.embeddings().flatten()
        is_moving = torch.isin(ids, _MOVING)
        found = {self.top.weight.item(), *rows[is_moving].tolist()}
        found |= set((self.table.slots["sparse_adagrad_sum"].flatten() - 1)[is_moving].tolist())
        steady = sorted(zip(ids[~is_moving].tolist(), rows[~is_moving].tolist(), strict=True))
        is_whole = steady == [(id_, float(id_)) for id_ in self._steady.tolist()] and is_moving.sum() == 2
        return found.pop() if len(found) == 1 and is_whole else None

    def take_value(self) -> float:
        """Become of a value that nobody else has had, and return it."""
        value = float(next(_values))
        gone = int(value) % 2
        self.table.erase(_MOVING[gone : gone + 1])
        self._insert(_MOVING[[1 - gone, 2]], torch.full((2, 1), value))
        with torch.no_grad():
            self.top.weight.fill_(value)
        return value

    def _insert(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        if len(ids):
            self.table.insert(ids, rows, {"sparse_adagrad_sum": rows + 1})

    def save(self) -> Manifest:
        """Train a step, and save."""
        self.manager.step()
        manifest = self.manager.save(state={"value": self.take_value()})
        assert manifest is not None
        return manifest

    def save_as(self, ckpt_id: str) -> Manifest:
        """Train, and save under an id without a step."""
        return self.saver.save(ckpt_id, state={"value": self.take_value()}, overwrite=True)
