"""Tables as the parameters of an optimizer, their groups, and how saved groups are matched with the live ones."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recckpt.errors import StateMismatchError
from recckpt.sparse.table.table import HashTable

Group = dict[str, Any]
REMEDY = "recckpt.filter_out_sparse_param(model) gives the tables of a model; its parameters are for a dense optimizer"


class TableParameter(Tensor):
    """An empty tensor whose ``grad`` is the gradients that wait in a table for the optimizer's step.

    torch keeps its books by tensor, and asks of a parameter no more than that it is one and has a ``grad``.
    """

    table: HashTable
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as nn.Parameter

    def __new__(cls, table: HashTable) -> TableParameter:
        """Return a parameter for a table."""
        self = torch.empty(0, device="cpu").as_subclass(cls)
        self.table = table
        return self

    @property
    def grad(self) -> Tensor | None:
        """The gradients of the rows, shape (rows with one, *embedding_shape), which may be changed in place."""
        return self.table.grad

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        self.table.grad = grad

    @property
    def requires_grad(self) -> bool:
        """Whether the table is trained; setting it freezes or thaws the table."""
        return self.table.requires_grad

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.table.requires_grad = requires_grad

    def requires_grad_(self, requires_grad: bool = True) -> TableParameter:
        """Freeze or thaw the table, and return this."""
        self.table.requires_grad = requires_grad
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TableParameter:
        twin = memo[id(self)] = TableParameter(copy.deepcopy(self.table, memo))
        return twin


def plain(value: Any) -> Any:
    """Return ``value`` with scalar tensors and numpy scalars as the Python numbers that checkpoints hold."""
    if isinstance(value, (Tensor, np.generic)):
        return value.item()
    if isinstance(value, (list, tuple)):
        return type(value)(plain(item) for item in value)
    return value


def options(group: Mapping[str, Any], *without: str) -> Group:
    """Return the entries of a group in plain values, less the tensors and those named in ``without``."""
    return {key: plain(value) for key, value in group.items() if key != "params" and key not in without}


def check_number(group: Group, name: str, below: float = float("inf")) -> None:
    """Raise ValueError unless the hyper-parameter ``name`` lies in [0, below)."""
    value = group[name]
    if not isinstance(value, (int, float)) or not 0 <= value < below:
        raise ValueError(f"found {name}={value!r}, expected a number of [0, {below})")


def check_betas(group: Group) -> None:
    """Raise ValueError unless ``betas`` are two numbers of [0, 1)."""
    betas = group["betas"]
    if not isinstance(betas, (list, tuple)) or len(betas) != 2:
        raise ValueError(f"found betas={betas!r}, expected two numbers of [0, 1)")
    for number, beta in enumerate(betas):
        check_number({f"betas[{number}]": beta}, f"betas[{number}]", below=1.0)


def match(saved: Mapping[str, Any], live: Sequence[Group], slots: Sequence[str], keys: Iterable[str]) -> list[Group]:
    """Return the groups of a saved ``state_dict()`` in the order of the live ones, and their tables likewise.

    Every group must have the hyper-parameters ``keys``, and the optimizer these slots.

    Raises:
        StateMismatchError: they are of different tables, rules or groups.
    """
    if not _is_well_formed(saved):
        raise StateMismatchError(
            "the state dict", remedy="it is not one of a recckpt sparse optimizer: save and load the same one"
        )
    saved_groups = {frozenset(group["tables"]): group for group in saved["param_groups"]}
    have, need = frozenset().union(*saved_groups), [name for group in live for name in group["tables"]]
    mismatched: dict[str, tuple[object, object]] = {}
    if list(saved["slots"]) != list(slots):
        mismatched["slots"] = (saved["slots"], list(slots))
    matched = []
    for number, group in enumerate(live):
        own = saved_groups.get(frozenset(group["tables"]), {})
        if have == set(need) and not own:
            others = [sorted(tables) for tables in saved_groups if tables & set(group["tables"])]
            mismatched[f"tables of group {number}"] = (others, group["tables"])
        elif own and not set(keys) <= set(own):
            mismatched[f"hyper-parameters of group {number}"] = (sorted(own), sorted(keys))
        matched.append({**options(group), **own, "tables": group["tables"]})
    missing, unexpected = sorted(set(need) - have), sorted((have | set(saved["state"])) - set(need))
    if missing or unexpected or mismatched:
        raise StateMismatchError(
            "the state of the sparse optimizer", missing=missing, unexpected=unexpected, mismatched=mismatched
        )
    return matched


def _is_well_formed(saved: Any) -> bool:
    return (
        isinstance(saved, Mapping)
        and {"slots", "state", "param_groups"} <= set(saved)
        and isinstance(saved["slots"], (list, tuple))
        and isinstance(saved["param_groups"], (list, tuple))
        and all(isinstance(group, Mapping) and "tables" in group for group in saved["param_groups"])
        and isinstance(saved["state"], Mapping)
        and all(_is_step(state) for state in saved["state"].values())
    )


def _is_step(state: Any) -> bool:
    return isinstance(state, Mapping) and type(state.get("step")) is int and state["step"] >= 0


def as_list(tables: Any) -> list[Any]:
    """Return tables that are given one by one, in a list or by name; TypeError where they are something else."""
    if isinstance(tables, HashTable):
        return [tables]
    if not isinstance(tables, Iterable):
        raise TypeError(f"a sparse optimizer takes tables, found a {type(tables).__name__}: {REMEDY}")
    return list(tables.values() if isinstance(tables, Mapping) else tables)
