"""State as the pickle that torch.save writes, in which each tensor says where in the records its values lie."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3  # part of the format: torch.save refers to them

from recckpt.format.dtypes import STORAGES


@dataclass(frozen=True)
class Record:
    """The bytes of one or more tensors of one dtype, by its number among the records of the file."""

    number: int
    n_bytes: int


@dataclass(frozen=True)
class Placed:
    """Where in a record the values of a tensor lie; offset and strides count items."""

    dtype: str
    record: Record
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def pickled(state: Any, placed: Callable[[Any], Placed | None]) -> bytes:
    """Return the pickle of a state; ``placed`` tells where the tensor lies that an object stands for, if it does."""
    file = io.BytesIO()
    _Pickler(file, placed).dump(state)
    return file.getvalue()


@dataclass(frozen=True)
class _Storage:
    dtype: str
    record: Record


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, placed: Callable[[Any], Placed | None]) -> None:
        super().__init__(file, protocol=2)
        self._placed = placed

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not _Storage:
            return None
        kind, number, n_bytes = STORAGES.get(obj.dtype), str(obj.record.number), obj.record.n_bytes
        if kind is None:
            return "storage", torch.UntypedStorage, number, "cpu", n_bytes
        return "storage", getattr(torch, kind), number, "cpu", n_bytes // getattr(torch, obj.dtype).itemsize

    def reducer_override(self, obj: Any) -> Any:
        placed = self._placed(obj)
        if placed is None:
            return NotImplemented
        hooks: OrderedDict[Any, Any] = OrderedDict()
        args = (_Storage(placed.dtype, placed.record), placed.offset, placed.shape, placed.strides, False, hooks)
        if placed.dtype in STORAGES:
            return _rebuild_tensor_v2, args
        return _rebuild_tensor_v3, (*args, getattr(torch, placed.dtype))
