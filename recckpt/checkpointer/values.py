"""The tensors of a ``.pt`` file: read into new ones, or into those that are there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recckpt.checkpointer.pack import span
from recckpt.checkpointer.tree import tensors_in
from recckpt.dense.stored_tensor import StoredTensor
from recckpt.dense.torch_zip import TorchZip

_ALIGNMENT = 64  # where a part of a storage begins, so that it suits every dtype


class Values:
    """Reads tensors, and no bytes that none of them needs.

    Args:
        archive: the file.
        wholes: the parts of its tree that :meth:`whole` will be asked for.
        map_location: where new tensors go, as ``torch.load`` takes it.
    """

    def __init__(self, archive: TorchZip, wholes: list[Any], map_location: Any) -> None:
        self._archive = archive
        self._place = _placing(map_location)
        self._ranges: dict[str, tuple[int, int]] = {}
        for tensor in tensors_in(wholes):
            begin, end = _bytes_of(tensor)
            lowest, highest = self._ranges.get(tensor.storage_key, (begin, end))
            self._ranges[tensor.storage_key] = (min(lowest, begin), max(highest, end))
        self._storages: dict[str, Any] = {}
        self._made: dict[int, Any] = {}

    def whole(self, tree: Any) -> Any:
        """Return a part of the tree with its tensors; those that shared memory when they were saved do so again."""
        if isinstance(tree, StoredTensor):
            return self._new(tree)
        if not isinstance(tree, dict | list) and type(tree) is not tuple:
            return tree
        if id(tree) not in self._made:
            if isinstance(tree, dict):
                items = ((key, self.whole(item)) for key, item in tree.items())
                self._made[id(tree)] = OrderedDict(items) if type(tree) is OrderedDict else dict(items)
            else:
                self._made[id(tree)] = type(tree)([self.whole(item) for item in tree])
        return self._made[id(tree)]

    def fill(self, target: Tensor, stored: StoredTensor, where: str) -> None:
        """Read the values of a tensor into another one of its shape and dtype."""
        begin, end = _bytes_of(stored)
        target = target.detach()
        if _is_same_order(target, stored):
            flat = target.as_strided((target.numel(),), (1,)).view(torch.uint8)
            self._archive.fill(flat.numpy(), stored, begin, where)
        else:
            target.copy_(_view(self._read(stored, begin, end, where).untyped_storage(), stored, begin))

    def _new(self, stored: StoredTensor) -> Tensor:
        key = stored.storage_key
        begin, end = self._ranges[key]
        begin -= begin % _ALIGNMENT
        if key not in self._storages:
            self._storages[key] = self._place(self._read(stored, begin, end, f"storage {key}"))
        return _view(self._storages[key], stored, begin)

    def _read(self, stored: StoredTensor, begin: int, end: int, where: str) -> Tensor:
        memory = torch.empty(end - begin, dtype=torch.uint8)
        self._archive.fill(memory.numpy(), stored, begin, where)
        return memory


def _bytes_of(tensor: StoredTensor) -> tuple[int, int]:
    """Return where in its storage a tensor begins and ends."""
    begin = tensor.offset * tensor.item_bytes
    return begin, begin + tensor.span * tensor.item_bytes


def _is_same_order(target: Tensor, stored: StoredTensor) -> bool:
    """Say whether the bytes in the file are those that the memory of a tensor needs, one to one."""
    steps = zip(target.shape, target.stride(), stored.strides, strict=True)
    dense = target.numel() == span(target) and all(size == 1 or one == other for size, one, other in steps)
    return dense and target.device.type == "cpu" and not target.is_conj() and not target.is_neg()


def _view(storage: Any, stored: StoredTensor, begin: int) -> Tensor:
    """Return a tensor over memory that holds its storage from byte ``begin`` on."""
    offset = (stored.offset * stored.item_bytes - begin) // stored.item_bytes
    tensor = torch.empty(0, dtype=getattr(torch, stored.dtype), device=storage.device)
    return tensor.set_(storage, offset, stored.shape, stored.strides)


def _placing(map_location: Any) -> Callable[[Tensor], Any]:
    """Return what moves a block of bytes, all of which were saved from a CPU, and gives its storage."""
    if isinstance(map_location, dict):
        map_location = map_location.get("cpu")
    if map_location is None:
        return lambda memory: memory.untyped_storage()
    if isinstance(map_location, str | torch.device):
        device = torch.device(map_location)
        return lambda memory: memory.to(device).untyped_storage()
    if not callable(map_location):
        raise TypeError(
            "default_map_location is a device, a dict from device to device, a function of (storage, device) or None, "
            f"found a {type(map_location).__name__}"
        )

    def ask(memory: Tensor) -> Any:
        storage = memory.untyped_storage()
        placed = map_location(storage, "cpu")
        return storage if placed is None else placed

    return ask
