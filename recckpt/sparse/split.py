"""A model's state in two halves: tables, and everything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from recckpt.types import HashTable, check_table_name, is_hashtable


def split_sparse_dense_state_dict(
    state_dict: Mapping[str, Any],
) -> tuple[dict[str, HashTable], dict[str, Any]]:
    """Return (tables by their name, everything else by its key).

    Raises:
        ValueError: two tables share a name, or a table and a dense tensor; names both keys. Or a key is no string.
    """
    sparse: dict[str, HashTable] = {}
    keys: dict[str, str] = {}
    dense: dict[str, Any] = {}
    for key, value in state_dict.items():
        if not isinstance(key, str):
            raise ValueError(f"the keys of a state dict are names, found {key!r}: name it by a string")
        if not is_hashtable(value):
            dense[key] = value
        elif sparse.setdefault(check_table_name(value.name), value) is not value:
            raise ValueError(
                f"two tables are named {value.name!r}, at {keys[value.name]!r} and {key!r}; a name stands for one "
                "table in a checkpoint: rename one"
            )
        else:
            keys.setdefault(value.name, key)
    for name in sparse.keys() & dense.keys():
        raise ValueError(f"{name!r} is a table, at {keys[name]!r}, and a dense tensor too; rename one of them")
    return sparse, dense


def filter_out_sparse_param(model: nn.Module) -> dict[str, HashTable]:
    """Return the tables of a model by name.

    Raises:
        ValueError: two tables share a name.
    """
    return split_sparse_dense_state_dict(unwrap(model).state_dict())[0]


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, DataParallel and torch.compile, whose names are the user's."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(model, torch._dynamo.OptimizedModule):
            model = model._orig_mod
        else:
            return model
