"""Stored values brought to the rank that needs them: each tensor of the model takes the pieces that lie here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recckpt.dense.sharded import Pieces, is_sharded, may_be_sharded, planned_reads, with_values
from recckpt.dense.sharded_state import STAND_IN
from recckpt.dense.tensors import DenseTensors
from recckpt.dense.tiling import StoredTensor

Found = Tensor | StoredTensor


def as_live(found: Found, live: Tensor | None, reader: DenseTensors, dtype: torch.dtype | None = None) -> Tensor:
    """Return stored values in the form of a tensor of the model, on the CPU; of a sharded one only what is here.

    Where sizes differ the values are cut, or padded by those of the model.

    Args:
        found: a plain tensor, or one whose chunks lie in the checkpoint.
        live: the model's; None for a plain tensor of all values.
        reader: of the checkpoint.
        dtype: to cast to; None for that of the model.

    Raises:
        CorruptCheckpointError: the bytes are damaged.
    """
    if live is None:
        return _box(found, (0,) * len(found.shape), tuple(found.shape), reader)
    parts = []
    for piece in Pieces().of("", live):
        sizes = tuple(piece.values.shape)
        ends = [min(begin + size, whole) for begin, size, whole in zip(piece.offsets, sizes, found.shape, strict=True)]
        inside = tuple(max(0, end - begin) for begin, end in zip(piece.offsets, ends, strict=True))
        values = _box(found, piece.offsets, inside, reader).to(dtype or piece.values.dtype)
        if inside != sizes:
            padded = piece.values.detach().clone().cpu()
            padded[tuple(map(slice, inside))] = values
            values = padded
        parts.append(values)
    return with_values(live, parts) if is_sharded(live) else parts[0]


def fitted(saved: Any, like: Any, reader: DenseTensors) -> Any:
    """Return the state of a registered object with the tensors in it that are sharded, there or here, as here.

    Args:
        saved: the state, as ``extra.pt`` has it.
        like: state of the same form whose tensors lie as they are to lie; what it lacks comes as plain tensors.
        reader: of the checkpoint.

    Raises:
        CorruptCheckpointError: the bytes are damaged, or a tensor is not there.
    """
    if stands_in(saved):
        stored = reader.of_extra(saved[STAND_IN])
        fits = isinstance(like, Tensor) and tuple(like.shape) == stored.shape
        return as_live(stored, like if fits else None, reader, _dtype(stored))
    if isinstance(saved, Tensor):
        fits = may_be_sharded() and is_sharded(like) and like.shape == saved.shape
        return as_live(saved, like, reader, saved.dtype) if fits else saved
    if type(saved) in (dict, OrderedDict):
        return type(saved)((key, fitted(item, _below(like, key), reader)) for key, item in saved.items())
    if type(saved) in (list, tuple):
        return type(saved)(fitted(item, _below(like, i), reader) for i, item in enumerate(saved))
    return saved


def stands_in(value: Any) -> bool:
    """Say whether a value of ``extra.pt`` stands for a sharded tensor."""
    return type(value) is dict and value.keys() == {STAND_IN} and isinstance(value[STAND_IN], str)


def has_stand_ins(state: Any) -> bool:
    """Say whether a state has sharded tensors in it."""
    if isinstance(state, Mapping):
        return stands_in(state) or any(map(has_stand_ins, state.values()))
    return type(state) in (list, tuple) and any(map(has_stand_ins, state))


def _below(like: Any, key: Any) -> Any:
    if isinstance(like, Mapping):
        return like.get(key)
    return like[key] if isinstance(like, list | tuple) and isinstance(key, int) and key < len(like) else None


def _box(found: Found, offsets: Sequence[int], sizes: tuple[int, ...], reader: DenseTensors) -> Tensor:
    """Return a box of a stored tensor."""
    if isinstance(found, StoredTensor):
        values = reader.read_box(found, sizes, planned_reads(found, offsets, sizes))
        return torch.from_numpy(values).view(_dtype(found))
    place = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
    return found[place].clone() if place else found


def _dtype(stored: StoredTensor) -> torch.dtype:
    dtype = getattr(torch, stored.dtype)
    assert isinstance(dtype, torch.dtype)  # of the allow-list
    return dtype
