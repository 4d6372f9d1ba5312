"""Read the file of one rank: all of it, or what a state dict asks for and no other bytes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recckpt.checkpointer.pack import child, span
from recckpt.checkpointer.stored_state import StoredState, TensorFiller
from recckpt.checkpointer.writer import RankInfo, storage_at
from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, StateMismatchError
from recckpt.storage import Storage

_log = logging.getLogger(__name__)
_MAX_SHOWN = 10


class StateReader:
    """Reads ``<path>/checkpoint_<rank>.pt``, without running any code from it.

    Args:
        rank_info: this rank.
    """

    def __init__(self, rank_info: RankInfo) -> None:
        self._name = rank_info.file_name

    def read(
        self,
        path: str | os.PathLike[str],
        state_dict: dict[str, Any] | None = None,
        *,
        map_location: Any = None,
        strict: bool = False,
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the state and the dotted paths that are missing; as :meth:`Checkpointer.load` does."""
        if state_dict is not None and not isinstance(state_dict, dict):
            raise TypeError(f"state_dict is a dict or None, found a {type(state_dict).__name__}")
        storage = storage_at(path)
        place = storage.url_of(self._name)
        try:
            file = storage.open(self._name)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(self._missing(storage, place)) from error
        with file, _remedy_of_a_state():
            stored = StoredState(file, place)
            asked = Comparison(state_dict, stored.tree)
            if asked.mismatched or (strict and asked.missing):
                remedy = "pass strict=False to load what is there" if not asked.mismatched else ""
                raise StateMismatchError(place, missing=asked.missing, mismatched=asked.mismatched, remedy=remedy)
            state = fill("", state_dict, stored.tree, TensorFiller(stored, asked.wholes, map_location))
        if asked.missing:
            shown = ", ".join(asked.missing[:_MAX_SHOWN]) + (", ..." if len(asked.missing) > _MAX_SHOWN else "")
            _log.warning("%s: %d keys are missing and stay as they are: %s", place, len(asked.missing), shown)
        return state, asked.missing

    def _missing(self, storage: Storage, place: str) -> str:
        """Say what is there instead; another number of ranks has written other files."""
        try:
            others = [name for name in storage.list_files("") if "/" not in name]
        except OSError:
            others = []
        hint = f"found {', '.join(others[:_MAX_SHOWN])}" if others else "there is nothing at all"
        return f"{place}: no such file; {hint}. A state is loaded by as many ranks as saved it"


@contextmanager
def _remedy_of_a_state() -> Iterator[None]:
    """Say of damage what helps here: the commands know no such files."""
    try:
        yield
    except CorruptCheckpointError as error:
        if error.remedy != CorruptCheckpointError.REMEDY:
            raise
        raise CorruptCheckpointError(
            error.path, error.where, found=error.found, expected=error.expected, remedy="load another checkpoint"
        ) from error


class Comparison:
    """What a template, a state dict, asks of a tree, as a StoredState has it; None takes all that is there."""

    def __init__(self, template: Any, tree: Any) -> None:
        self.missing: list[str] = []  # dotted paths that the tree lacks
        self.mismatched: dict[str, tuple[str, str]] = {}  # dotted path -> (found, expected)
        self.wholes: list[Any] = []  # the parts of the tree that are taken whole
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


def fill(name: str, template: Any, tree: Any, values: TensorFiller) -> Any:
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
