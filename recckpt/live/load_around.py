"""Load the dense state of a model around its live tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from recckpt.live.torchrec_modules import inner_of
from recckpt.sparse.split import load_dense


def load_around(model: nn.Module, state: Mapping[str, Any], collections: Mapping[nn.Module, Collection[str]]) -> None:
    """Load dense state by the names that it has without wrappers; the rest of the model stays as it is.

    TorchRec's sharded collections load all their tables or fail, so those of which nothing is dense are not asked, and
    the others get the live tables that they have, by which nothing changes.

    Args:
        model: the model.
        state: dense state by name.
        collections: collections, with the keys of their live tables, as the state dict of the collection has them.
    """
    if model in collections:
        own = model.state_dict()
        if own.keys() - collections[model]:
            load_dense(model, {**{key: own[key] for key in collections[model]}, **state})
        return
    if not any(module in collections for module in model.modules()):
        load_dense(model, state)
        return
    inner = inner_of(model)
    if inner is not None:
        load_around(inner, state, collections)
        return
    direct = {key: value for key, value in state.items() if "." not in key}
    errors: list[str] = []
    model._load_from_state_dict(direct, "", {}, False, [], [], errors)
    if errors:
        raise RuntimeError("; ".join(errors))
    for name, child in model.named_children():
        of_child = {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
        load_around(child, of_child, collections)
