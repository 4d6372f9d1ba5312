"""Runs whose checkpoints make a model bank: small models whose every value tells which run it is from."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recckpt import Saver
from recckpt.sparse import Constant, HashTable
from support.builders import OPTIMIZERS, bits, frozen, table_state

INITIAL = 0.5  # of embeddings that nobody has set


def table(name: str, ids: Iterable[int] = (), value: float = 1.0, dim: int = 4, **options: Any) -> HashTable:
    """Return a table in which every row has one value."""
    made = HashTable(dim, name=name, initializer=Constant(INITIAL), **options)
    ids = torch.tensor(list(ids), dtype=torch.int64)
    made.insert(ids, torch.full((len(ids), dim), value, dtype=made.dtype))
    return made


def values_of(made: HashTable) -> dict[int, float]:
    """Return the first value of every row."""
    return dict(zip(made.ids().tolist(), made.embeddings()[:, 0].tolist(), strict=True))


def slots_of(made: HashTable) -> dict[str, list[float]]:
    """Return the sums of the optimizer slots, in the order of the ids."""
    order = torch.argsort(made.ids())
    return {name: slot[order].flatten(1).sum(1).tolist() for name, slot in made.slots.items()}


class Model(nn.Module):
    """Tables, and modules under the names that are given."""

    def __init__(self, *tables: HashTable, **modules: nn.Module) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)
        for name, module in modules.items():
            self.add_module(name, module)


def run(
    url: Path | str,
    *tables: HashTable,
    value: float = 0.0,
    optimizer: str | None = None,
    steps: int = 0,
    **modules: nn.Module,
) -> Saver:
    """Return the saver of a run whose dense weights all have one value, and whose tables are trained some steps."""
    model = Model(*tables, **modules)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    optim = OPTIMIZERS[optimizer](list(tables)) if optimizer else None
    for _ in range(steps):
        for each in tables:
            each(each.ids()).sum().backward()
        optim.step()
    return Saver(model, optim, str(url))


def saved(url: Path | str, *tables: HashTable, ckpt_id: str = "c", step: int | None = None, **run_options: Any) -> str:
    """Save such a run, and return where it is."""
    saver = run(url, *tables, **run_options)
    saver.save(ckpt_id, step=step)
    return str(url)


def live_bytes(saver: Saver) -> Any:
    """Return all that a load may change, as bytes."""
    live = saver.loader.live_state()
    return (
        {name: table_state(made) for name, made in live.tables.items()},
        {name: bits(tensor) for name, tensor in live.dense.items()},
        saver.sparse_optim and frozen(saver.sparse_optim.state_dict()),
        {name: frozen(saver._extra._state(saver._extra.get(name))) for name in saver._extra},
        {name: frozen(saver._io_state._state(saver._io_state.get(name))) for name in saver._io_state},
    )
