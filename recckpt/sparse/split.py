"""Splits a model's state into tables and everything else, the dense state."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from recckpt.types import GEOMETRY, SavableTable, check_table_name, is_hashtable

_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_CHECKPOINTED = "_checkpoint_wrapped_module"  # torch's wrapper adds this to module names, but not to state dict keys


def split_sparse_dense_state_dict(
    state_dict: Mapping[str, Any],
) -> tuple[dict[str, SavableTable], dict[str, Any]]:
    """Return (tables by table name, everything else by its key in the state dict).

    Raises:
        ValueError: two tables share a name, a table and a dense tensor share a name, or a key is not a string.
    """
    sparse: dict[str, SavableTable] = {}
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
                "table in a checkpoint: rename one, by table.name = ... before anything is saved or restored"
            )
        else:
            keys.setdefault(value.name, key)
    for name in sparse.keys() & dense.keys():
        raise ValueError(f"{name!r} is a table, at {keys[name]!r}, and a dense tensor too; rename one of them")
    return sparse, dense


def filter_out_sparse_param(model: nn.Module) -> dict[str, SavableTable]:
    """Return the trained tables of a model by name; tables with counts of ids without a row are left out.

    Raises:
        ValueError: two tables share a name.
    """
    return {name: table for name, table in state_of(model)[0].items() if getattr(table, "is_trained", True)}


# Packages whose modules load any state dict with the expected names, shapes and dtypes.
LOADS_AS_TORCH = frozenset({"torch", "recckpt", "torchrec", "fbgemm_gpu"})


def state_of(model: nn.Module) -> tuple[dict[str, SavableTable], dict[str, Any]]:
    """Return (tables by name, dense state by names without wrappers); raise as split_sparse_dense_state_dict."""
    state, (wrappers, parameters) = model.state_dict(), _walked(model)
    for name, parameter in parameters:  # state_dict() drops attributes
        if name in state and all(hasattr(parameter, attribute) for attribute in GEOMETRY):
            state[name] = parameter
    return split_sparse_dense_state_dict({unwrapped(key, wrappers): value for key, value in state.items()})


def parameters_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name without wrappers, parameter); a tied parameter once per name."""
    wrappers, named = _walked(model)
    return ((unwrapped(name, wrappers), parameter) for name, parameter in named)


def _walked(model: nn.Module) -> tuple[list[tuple[str, str]], list[tuple[str, nn.Parameter]]]:
    """Return :func:`wrappers_in` and all (name, parameter) in one pass over modules; a tied parameter once per name."""
    wrappers, parameters = list[tuple[str, str]](), list[tuple[str, nn.Parameter]]()
    own_way = getattr(model.named_parameters, "__func__", None)
    has_own_way = own_way is not nn.Module.named_parameters  # FSDP overrides it to hide its wrappers
    plain = set[type]()  # classes that wrap nothing; cached because a check per module would be slow for 10,000 tables
    for path, module in model.named_modules(remove_duplicate=False):
        if type(module) not in plain:
            if inner := inner_name(module):
                wrappers.append((behind(path), inner))
            else:
                plain.add(type(module))
        if module._parameters and not has_own_way:
            prefix = f"{path}." if path else ""
            parameters += [(prefix + name, one) for name, one in module._parameters.items() if one is not None]
    return wrappers, list(model.named_parameters(remove_duplicate=False)) if has_own_way else parameters


def load_dense(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load dense state whose names have no wrappers; parameters without an entry in ``state`` stay unchanged."""
    wrappers = wrappers_in(model)
    named: dict[str, Any] = {}
    for name, value in state.items():
        full = name
        for before, inner in wrappers:
            full = before + inner + full[len(before) :] if full.startswith(before) else full
        named[full] = value
    if getattr(model.load_state_dict, "__func__", None) is not nn.Module.load_state_dict:
        model.load_state_dict(named, strict=False)
        return
    errors: list[str] = []
    _load_below(model, named, "", errors)
    if errors:
        raise RuntimeError("\n".join(errors))


def _load_below(module: nn.Module, state: dict[str, Any], prefix: str, errors: list[str]) -> None:
    """Do what ``load_state_dict`` does, but do not scan all keys of a module once per child."""
    keys = _IncompatibleKeys([], [])
    module._load_from_state_dict(state, prefix, {}, True, keys.missing_keys, keys.unexpected_keys, errors)
    of_children: dict[str, dict[str, Any]] = {}
    for key in (key for key in state if key.startswith(prefix)):  # hooks may have added keys
        of_children.setdefault(key[len(prefix) :].partition(".")[0], {})[key] = state[key]
    for name, child in module._modules.items():
        if child is not None:
            _load_below(child, of_children.get(name, {}), f"{prefix}{name}.", errors)
    for hook in module._load_state_dict_post_hooks.values():
        hook(module, keys)


def wrappers_in(model: nn.Module) -> list[tuple[str, str]]:
    """Return (prefix, inner name) of each wrapped module, outer ones first."""
    return _walked(model)[0]


def behind(module: str) -> str:
    path = _without_checkpoints(module)
    return f"{path}." if path else ""


def inner_name(module: nn.Module) -> str:
    """Return the prefix that a wrapper adds to the names of the wrapped module; "" if ``module`` is not a wrapper."""
    if isinstance(module, _PARALLEL):
        return "module."
    dynamo = sys.modules.get("torch._dynamo")  # the import takes seconds; if it was never done, no module is compiled
    return "_orig_mod." if dynamo is not None and isinstance(module, dynamo.OptimizedModule) else ""


def unwrapped(name: Any, wrappers: list[tuple[str, str]]) -> Any:
    if isinstance(name, str):
        name = _without_checkpoints(name)
    for before, inner in reversed(wrappers):
        if isinstance(name, str) and name.startswith(before + inner):
            name = before + name[len(before + inner) :]
    return name


def _without_checkpoints(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != _CHECKPOINTED) if _CHECKPOINTED in name else name
