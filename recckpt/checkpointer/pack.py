"""A nested state dict as a pickle without its tensors, and the bytes of these, each stored once."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recckpt.dense.saver import Placed, Record, pickled
from recckpt.dense.state_copy import plain_tensor, portable
from recckpt.dense.torch_archive import ArchiveContents

MAX_DEPTH = 100  # of containers in containers; what is saved can be walked again when it is loaded


@dataclass(frozen=True)
class Packed:
    """A state ready to be written."""

    pickle: bytes  # in which tensors refer to pieces by number
    pieces: list[Tensor]  # of bytes, one dimension each, on the device of the state and mostly its own memory

    def contents(self) -> ArchiveContents:
        """Return what goes into a file; pieces on other devices are copied one at a time, as they are asked for."""
        return ArchiveContents(self.pickle, (piece.cpu().numpy().data for piece in self.pieces))


def pack(state_dict: Mapping[str, Any]) -> Packed:
    """Look through a state dict once.

    Tensors that share memory share it in the file too, unless that would store more than they hold: of a tensor that
    is a part of a larger one, only its own part is stored.

    Raises:
        TypeError: it is not a dict.
        ValueError: there is something in it that cannot be loaded back safely; names the place.
    """
    if type(state_dict) not in (dict, OrderedDict):
        raise TypeError(f"a state dict is a dict or OrderedDict, found a {type(state_dict).__name__}")
    tensors: list[_Reference] = []
    tree = _walk("", state_dict, tensors, 0)
    pieces = [_piece(number, members) for number, members in enumerate(_stored_together(tensors))]
    return Packed(pickled(tree, lambda obj: obj.placed() if type(obj) is _Reference else None), pieces)


class _Reference:
    """Stands for a tensor in the pickle."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.dtype = tensor, str(tensor.dtype).removeprefix("torch.")
        self.begin = int(tensor.storage_offset())
        self.end = self.begin + span(tensor)
        self.record, self.offset = Record(0, 0), 0  # known when all have been seen

    def use(self, contiguous: Tensor) -> None:
        """Stand for a contiguous copy of the tensor."""
        self.tensor, self.begin = contiguous, 0

    def place(self, record: Record, begin: int) -> None:
        """Note the record that the tensor lies in, whose first item is at ``begin`` in its storage."""
        self.record, self.offset = record, self.begin - begin

    def placed(self) -> Placed:
        """Return where the tensor lies."""
        return Placed(self.dtype, self.record, self.offset, tuple(self.tensor.shape), self.tensor.stride())


def span(tensor: Tensor) -> int:
    """Return the items from the first value of a tensor up to its last."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def child(name: str, key: object) -> str:
    """Return the dotted path of an entry of a dict."""
    return f"{name}.{key}" if name else str(key)


def _walk(name: str, value: Any, tensors: list[_Reference], depth: int) -> Any:
    """Return a copy of the containers, with references for tensors and plain data otherwise."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{name[:200]}: it holds itself, or is nested deeper than {MAX_DEPTH}")
    if type(value) is str:
        return sys.intern(value)  # pickle writes one and the same object once: so equal states make equal files
    if isinstance(value, np.ndarray):
        value = portable(name, value)
    if isinstance(value, Tensor):
        tensors.append(_Reference(_stored_form(name, value)))
        return tensors[-1]
    if type(value) in (dict, OrderedDict):
        made = type(value)()
        for key, item in value.items():
            (portable_key,) = (sys.intern(key),) if type(key) is str else portable(name, {key: None})
            made[portable_key] = _walk(child(name, key), item, tensors, depth + 1)
        return made
    if type(value) in (list, tuple):
        return type(value)([_walk(f"{name}[{i}]", item, tensors, depth + 1) for i, item in enumerate(value)])
    plain = portable(name, value)
    if type(plain) is set and _holds_tensor(plain):
        raise ValueError(f"{name}: a tensor in a set has no place to be loaded into; use a list")
    return plain


def _holds_tensor(values: Iterable[Any]) -> bool:
    return any(isinstance(value, Tensor) or (type(value) is tuple and _holds_tensor(value)) for value in values)


def _stored_form(name: str, value: Tensor) -> Tensor:
    """Return a tensor whose items are one to one with items of its storage."""
    tensor = plain_tensor(name, value).resolve_conj().resolve_neg()
    return tensor.contiguous() if tensor.numel() > span(tensor) else tensor


def _piece(number: int, members: list[_Reference]) -> Tensor:
    """Return the bytes that overlapping tensors are stored in, and give each its place there."""
    tensor, begin, end = members[0].tensor, members[0].begin, max(member.end for member in members)
    if len(_by_place(members)) == 1 and end - begin > tensor.numel():  # gaps that nothing else lies in
        tensor = tensor.contiguous()
        begin, end = 0, tensor.numel()
        for member in members:
            member.use(tensor)
    item_bytes = tensor.element_size()
    record = Record(number, (end - begin) * item_bytes)
    for member in members:
        member.place(record, begin)
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(tensor.untyped_storage(), begin * item_bytes, (record.n_bytes,), (1,))


def _stored_together(tensors: list[_Reference]) -> Iterator[list[_Reference]]:
    """Yield tensors that overlap together, but apart where that would store more than they hold."""
    for members in _overlapping(tensors):
        places = _by_place(members)
        n_spanned = max(member.end for member in members) - members[0].begin
        if n_spanned > sum(same[0].tensor.numel() for same in places):
            yield from places
        else:
            yield members


def _by_place(members: list[_Reference]) -> list[list[_Reference]]:
    """Return tensors in groups of those that are one and the same part of memory."""
    places: dict[Any, list[_Reference]] = defaultdict(list)
    for member in members:
        places[member.begin, member.tensor.shape, member.tensor.stride()].append(member)
    return list(places.values())


def _overlapping(tensors: list[_Reference]) -> Iterator[list[_Reference]]:
    """Yield groups of tensors that share memory, each sorted by where it begins."""
    by_storage: dict[Any, list[_Reference]] = defaultdict(list)
    for number, reference in enumerate(tensors):
        tensor, storage = reference.tensor, reference.tensor.untyped_storage()
        shared = (tensor.device, storage.data_ptr(), storage.nbytes(), tensor.dtype) if tensor.numel() else number
        by_storage[shared].append(reference)
    for members in by_storage.values():
        members.sort(key=lambda member: member.begin)
        group, end = [members[0]], members[0].end
        for member in members[1:]:
            if member.begin >= end:
                yield group
                group = []
            group.append(member)
            end = max(end, member.end)
        yield group
