"""The values of a stored state: read into new tensors, or into those that are there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from recckpt.checkpointer.pack import span
from recckpt.checkpointer.stored_state import StoredState

_ALIGNMENT = 64  # where a part of a storage begins, so that it suits every dtype


class Filler:
    """Reads tensors, and no bytes that none of them needs; of the parts that are taken whole all at once.

    New tensors go where ``map_location`` says, as ``torch.load`` takes it.
    """

    def __init__(self, stored: StoredState, wholes: Iterable[Any], map_location: Any) -> None:
        self._stored = stored
        self._place = _placing(map_location)
        self._ranges: dict[int, tuple[int, int]] = {}
        seen: set[int] = set()
        for part in wholes:
            self._find_ranges(part, seen)
        self._storages: dict[int, Any] = {}
        self._made: dict[int, Any] = {}

    def whole(self, tree: Any) -> Any:
        """Return a part of the tree with its tensors; those that shared memory when they were saved do so again."""
        if isinstance(tree, Tensor):
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

    def fill(self, target: Tensor, stored: Tensor, where: str) -> None:
        """Read the values of a tensor into another one of its shape and dtype."""
        begin, end = _bytes_of(stored)
        target = target.detach()
        if _is_same_order(target, stored):
            flat = target.as_strided((target.numel(),), (1,)).view(torch.uint8)
            self._stored.read(stored, begin, flat.numpy(), where)
        else:
            target.copy_(_view(self._read(stored, begin, end, where).untyped_storage(), stored, begin))

    def _find_ranges(self, tree: Any, seen: set[int]) -> None:
        """Note which bytes of each storage the tensors of a part need."""
        if isinstance(tree, Tensor):
            begin, end = _bytes_of(tree)
            key = self._stored.storage(tree)
            lowest, highest = self._ranges.get(key, (begin, end))
            self._ranges[key] = (min(lowest, begin), max(highest, end))
        elif (isinstance(tree, dict | list) or type(tree) is tuple) and id(tree) not in seen:
            seen.add(id(tree))
            for item in tree.values() if isinstance(tree, dict) else tree:
                self._find_ranges(item, seen)

    def _new(self, stored: Tensor) -> Tensor:
        key = self._stored.storage(stored)
        begin, end = self._ranges[key]
        begin -= begin % _ALIGNMENT
        if key not in self._storages:
            self._storages[key] = self._place(self._read(stored, begin, end, "a tensor"))
        return _view(self._storages[key], stored, begin)

    def _read(self, stored: Tensor, begin: int, end: int, where: str) -> Tensor:
        memory = torch.empty(end - begin, dtype=torch.uint8)
        self._stored.read(stored, begin, memory.numpy(), where)
        return memory


def _bytes_of(stored: Tensor) -> tuple[int, int]:
    """Return where in its storage a tensor begins and ends."""
    begin = int(stored.storage_offset()) * stored.element_size()
    return begin, begin + span(stored) * stored.element_size()


def _is_same_order(target: Tensor, stored: Tensor) -> bool:
    """Say whether the bytes in the file are those that the memory of a tensor needs, one to one."""
    steps = zip(target.shape, target.stride(), stored.stride(), strict=True)
    dense = target.numel() == span(target) and all(size == 1 or one == other for size, one, other in steps)
    return dense and target.device.type == "cpu" and not target.is_conj() and not target.is_neg()


def _view(storage: Any, stored: Tensor, begin: int) -> Tensor:
    """Return a tensor over memory that holds its storage from byte ``begin`` on."""
    offset = int(stored.storage_offset()) - begin // stored.element_size()
    tensor = torch.empty(0, dtype=stored.dtype, device=storage.device)
    return tensor.set_(storage, offset, stored.shape, stored.stride())


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
