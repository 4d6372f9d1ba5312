"""What a load fills."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from recckpt.dense.registered import Registry
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.load.matching import PLAIN, Inventory, Thing
from recckpt.load.selection import GLOBAL_STEP, ID, Name, slot_name, state_name
from recckpt.load.source import Needs
from recckpt.sparse.files.table_rows import source_of
from recckpt.sparse.split import state_of
from recckpt.types import HashTable


@dataclass(frozen=True)
class Target:
    """The live state of this rank, for one load: what the model consists of is looked up once."""

    model: nn.Module
    sparse_optim: Optimizer | None
    extra: Registry
    io_state: Registry
    shard: int
    shards: int

    def state(self) -> tuple[dict[str, HashTable], dict[str, Any]]:
        """Return the tables and the dense state."""
        return self._state

    @cached_property
    def _state(self) -> tuple[dict[str, HashTable], dict[str, Any]]:
        return state_of(self.model)

    def needs(self) -> Needs:
        """Return what this rank reads of what each rank reads some of."""
        tables = self.state()[0]
        slices = {name: getattr(tables[name.table], "slice", None) for name in self.inventory() if name.is_slot}
        gathers = any(map(self.extra.gathers, self.extra))
        return Needs(self.shard, self.shards, slices, positions=len(self.io_state) > 0, gathers=gathers)

    def inventory(self) -> Inventory:
        """Return the names that can be loaded."""
        tables, dense = self.state()
        things: dict[Name, Thing] = {Name(GLOBAL_STEP, GLOBAL_STEP): Thing(PLAIN)}
        for table in tables.values():
            things[slot_name(table.name, ID)] = Thing("int64", ())
            for slot in source_of(table).slots:
                things[slot_name(table.name, slot.name)] = Thing(slot.dtype, slot.shape)
        things |= {Name("dense", name): _thing(value) for name, value in dense.items()}
        optimizers = self.extra.optimizers
        things |= {Name("dense_opt" if name in optimizers else "extra", name): Thing(PLAIN) for name in self.extra}
        for name, optimizer in optimizers.items():
            things |= {state_name(parameter, name): Thing(PLAIN) for parameter in optimizer.names}
        things |= {Name("io_state", name): Thing(PLAIN) for name in self.io_state}
        if self.sparse_optim is not None:
            things[Name("sparse_opt", SPARSE_OPTIM)] = Thing(PLAIN)
        return things


def _thing(value: Any) -> Thing:
    if isinstance(value, torch.Tensor):
        return Thing(
            str(value.dtype).removeprefix("torch."),
            tuple(value.shape),
            0,
            math.prod(value.shape) * value.dtype.itemsize,
        )
    return Thing(PLAIN)
