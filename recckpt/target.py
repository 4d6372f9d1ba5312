"""What a load fills, and what a load fills it from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from recckpt import layout
from recckpt.dense.loader import load_state
from recckpt.inventory import checkpoint_inventory, dense_prefix
from recckpt.io_state import Registry
from recckpt.listing import Checkpoint
from recckpt.load_conf import Entry
from recckpt.load_plan import Inventory, Offer, Thing
from recckpt.names import GLOBAL_STEP, ID, SPARSE_OPTIM, Name, slot_name
from recckpt.sparse.source import source_of
from recckpt.split import split_sparse_dense_state_dict, unwrap
from recckpt.storage import Storage
from recckpt.types import HashTable


@dataclass(frozen=True)
class Target:
    """The live state of this rank."""

    model: nn.Module
    sparse_optim: Optimizer | None
    extra: Registry
    io_state: Registry
    shard: int
    shards: int

    def state(self) -> tuple[dict[str, HashTable], dict[str, Any]]:
        """Return the tables and the dense state as they are now."""
        return split_sparse_dense_state_dict(unwrap(self.model).state_dict())

    def inventory(self) -> Inventory:
        """Return the names that can be loaded."""
        tables, dense = self.state()
        things: dict[Name, Thing] = {Name(GLOBAL_STEP, GLOBAL_STEP): Thing()}
        for table in tables.values():
            things[slot_name(table.name, ID)] = Thing("int64", ())
            for slot in source_of(table).slots:
                things[slot_name(table.name, slot.name)] = Thing(slot.dtype, slot.shape)
        things |= {Name("dense", name): _thing(value) for name, value in dense.items()}
        things |= {Name("extra", name): Thing() for name in self.extra}
        things |= {Name("io_state", name): Thing() for name in self.io_state}
        if self.sparse_optim is not None:
            things[Name("sparse_opt", SPARSE_OPTIM)] = Thing()
        return things


@dataclass
class Source:
    """One checkpoint, what is wanted of it, and its small files as far as they have been read."""

    entry: Entry
    storage: Storage
    checkpoint: Checkpoint
    bytes_read: int = 0
    _states: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Where it is."""
        return f"{self.storage.url}/{self.checkpoint.directory}"

    @property
    def shards(self) -> int:
        """How many ranks wrote it."""
        return len(self.checkpoint.manifest.shards)

    def offer(self, model: Inventory) -> Offer:
        """Return what it has of the names of a model."""
        dense = [name.text for name in model if name.group == "dense"]
        return Offer(self.entry, self.label, checkpoint_inventory(self.checkpoint, self.storage, dense))

    def state(self, name: str) -> Mapping[str, Any]:
        """Return the dict in a ``.pt`` file, checked; empty where the checkpoint has no such file."""
        entry = self.checkpoint.manifest.file(name)
        if name not in self._states:
            self._states[name] = load_state(self.storage, self.checkpoint.directory, entry) if entry else {}
            self.bytes_read += entry.n_bytes if entry else 0
        return self._states[name]

    def dense(self, live: Mapping[str, Any]) -> dict[str, Any]:
        """Return the dense state under the model's names."""
        found = self.state(layout.MODEL)
        strip, add = dense_prefix(found, live)
        return {add + name.removeprefix(strip): value for name, value in found.items()}


def _thing(value: Any) -> Thing:
    if isinstance(value, torch.Tensor):
        return Thing(str(value.dtype).removeprefix("torch."), tuple(value.shape), 0, value.nbytes)
    return Thing()
