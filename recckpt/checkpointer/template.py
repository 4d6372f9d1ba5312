"""Fill a state dict from a file: all that does not fit is found before anything is changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from recckpt.checkpointer.filler import Filler
from recckpt.checkpointer.pack import child, span


class Comparison:
    """What a template asks of a tree, as a :class:`~recckpt.checkpointer.stored_state.StoredState` has it.

    Args:
        template: a state dict; None takes what is in the tree, whatever it is.
        tree: what is in the file.

    Attributes:
        missing: dotted paths that the tree lacks.
        mismatched: dotted path -> (found, expected).
        wholes: the parts of the tree that are taken whole.
    """

    def __init__(self, template: Any, tree: Any) -> None:
        self.missing: list[str] = []
        self.mismatched: dict[str, tuple[str, str]] = {}
        self.wholes: list[Any] = []
        self._compare("", template, tree)

    def _compare(self, name: str, template: Any, tree: Any) -> None:
        if template is None:
            self.wholes.append(tree)
        elif isinstance(template, dict) and isinstance(tree, dict):
            for key, value in template.items():
                if key in tree:
                    self._compare(child(name, key), value, tree[key])
                else:
                    self.missing.append(child(name, key))
        elif _are_sequences(template, tree) and len(template) == len(tree):
            for i, (value, item) in enumerate(zip(template, tree, strict=True)):
                self._compare(f"{name}[{i}]", value, item)
        else:
            found, expected = _found(tree), _expected(template)
            if found != expected:
                self.mismatched[name] = found, expected


def fill(name: str, template: Any, tree: Any, values: Filler) -> Any:
    """Return a template with the values of a tree that it was compared with; containers and tensors stay the same.

    A tuple that holds more than tensors is made anew.
    """
    if template is None:
        return values.whole(tree)
    if isinstance(template, Tensor | np.ndarray):
        target = template if isinstance(template, Tensor) else torch.from_numpy(template)
        values.fill(target, tree, f"tensor {name!r}")
        return template
    if isinstance(template, dict):
        for key in [key for key in template if key in tree]:
            template[key] = fill(child(name, key), template[key], tree[key], values)
        return template
    if _are_sequences(template, tree):
        items = [fill(f"{name}[{i}]", *pair, values) for i, pair in enumerate(zip(template, tree, strict=True))]
        if type(template) is tuple:
            return tuple(items)
        template[:] = items
        return template
    return tree


def _are_sequences(template: Any, tree: Any) -> bool:
    return type(template) in (list, tuple) and type(tree) is type(template)


def _found(tree: Any) -> str:
    if isinstance(tree, Tensor):
        return f"{str(tree.dtype).removeprefix('torch.')} {tuple(tree.shape)}"
    if type(tree) in (list, tuple):
        return f"a {type(tree).__name__} of {len(tree)}"
    return "a dict" if isinstance(tree, dict) else f"a value of type {type(tree).__name__}"


def _expected(template: Any) -> str:
    """Return what a part of a template takes, in the words of :func:`_found`."""
    if isinstance(template, np.ndarray):
        if not template.flags.writeable:
            return "a read-only numpy array, not to be filled"
        try:
            template = torch.from_numpy(template)
        except (TypeError, ValueError):
            return f"a numpy array of {template.dtype}, not to be filled"
    if isinstance(template, Tensor):
        shape = tuple(template.shape)
        kind = f"{str(template.dtype).removeprefix('torch.')} {shape}"
        plain = type(template) in (Tensor, torch.nn.Parameter) and template.layout == torch.strided
        if not plain or template.is_quantized or template.is_nested or template.is_meta:
            return f"a {type(template).__name__} of layout {template.layout} on {template.device}, not to be filled"
        return kind if template.numel() <= span(template) else f"{kind}, expanded, so not to be filled"
    if isinstance(template, np.generic):
        template = template.item()
    return _found(template)
