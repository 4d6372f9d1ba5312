"""The nested state in a ``.pt`` file, with a description in place of each tensor; reads no tensor."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from recckpt.dense.stored_tensor import FUNCTIONS, StoredTensor, find_global, run
from recckpt.dense.torch_pickle import MAX_KEY_ITEMS, Function, RefusedError, refuse_type
from recckpt.dense.torch_zip import TorchZip

MAX_DEPTH = 120  # what pack() makes is less deep; far from what the interpreter's stack takes
_V3 = "torch._utils._rebuild_tensor_v3"


def read_tree(archive: TorchZip, path: str) -> dict[Any, Any]:
    """Return the state in a file: containers and plain values as they were, a StoredTensor for each tensor.

    Nothing in the file is run or imported: only the names that torch.save writes for such a state are known.

    Raises:
        CorruptCheckpointError: it is damaged, or holds something else.
    """
    data = archive.read("data.pkl", most=archive.n_bytes)
    types = _Types()
    tree = run(data, path, "data.pkl", types.find, types.finish)
    for tensor in tensors_in([tree]):
        archive.check_storage(tensor, f"storage {tensor.storage_key}")
    return tree


class _Types:
    """Knows the types of plain values, which those who only look at tensors need not tell apart."""

    def __init__(self) -> None:
        self._ordered: list[dict[Any, Any]] = []
        self._made: dict[int, Any] = {}
        self._open: set[int] = set()
        self._functions = {
            "collections.OrderedDict": Function(self._ordered_dict),
            "__builtin__.set": Function(_set),
            "torch.Size": Function(_size),
            "torch.device": Function(_device),
            _V3: Function(_untyped),
        }

    def find(self, name: str) -> object:
        """Return what stands for a global."""
        if name in self._functions:
            return self._functions[name]
        module, _, attribute = name.partition(".")
        found = getattr(torch, attribute, None) if module == "torch" else None
        return found if isinstance(found, torch.dtype) else find_global(name)

    def finish(self, root: Any) -> dict[Any, Any]:
        """Return the state, in which every container is a new one and none holds itself."""
        self._ordered_ids = {id(made) for made in self._ordered}
        if not isinstance(root, dict):
            refuse_type(root, "a dict")
        made: dict[Any, Any] = self._copy(root, 0)
        return made

    def _copy(self, value: Any, depth: int) -> Any:
        if not isinstance(value, dict | list) and type(value) is not tuple:
            return self._leaf(value)
        if id(value) in self._open or depth > MAX_DEPTH:
            raise RefusedError("a value that holds itself, or is nested too deep", f"at most {MAX_DEPTH} levels")
        if id(value) in self._made:
            return self._made[id(value)]
        self._open.add(id(value))
        made: Any
        if isinstance(value, dict):
            items = ((key, self._copy(item, depth + 1)) for key, item in value.items())
            made = OrderedDict(items) if id(value) in self._ordered_ids else dict(items)
        else:
            made = type(value)([self._copy(item, depth + 1) for item in value])
        self._open.discard(id(value))
        self._made[id(value)] = made
        return made

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return value
        return refuse_type(value, "a tensor or a plain value")

    def _ordered_dict(self) -> dict[Any, Any]:
        self._ordered.append({})
        return self._ordered[-1]


_PLAIN = (type(None), int, float, complex, str, bytes, set, torch.Size, torch.dtype, torch.device, StoredTensor)


def _set(items: Any = ()) -> set[Any]:
    if type(items) is not list:
        refuse_type(items, "a list of what is in a set")
    _check_hashable(items, [len(items) + MAX_KEY_ITEMS])
    return set(items)


def _check_hashable(items: Any, budget: list[int], depth: int = 0) -> None:
    """Refuse what takes long to hash: a few bytes of tuples that share their items may stand for very many."""
    budget[0] -= len(items)
    if budget[0] < 0 or depth > MAX_DEPTH:
        raise RefusedError("a set of tuples that are too large", f"at most {MAX_KEY_ITEMS} items in them")
    for item in items:
        if type(item) is tuple:
            _check_hashable(item, budget, depth + 1)
        elif not isinstance(item, _PLAIN) or type(item) in (set, StoredTensor):
            refuse_type(item, "a plain value in a set")


def _size(sizes: Any = ()) -> torch.Size:
    if type(sizes) is not tuple or not all(type(size) is int for size in sizes):
        refuse_type(sizes, "a tuple of sizes")
    return torch.Size(sizes)


def _device(kind: Any, index: Any = None) -> torch.device:
    if type(kind) is not str or type(index) not in (int, type(None)):
        refuse_type(kind, "a device and its number")
    try:
        return torch.device(kind) if index is None else torch.device(kind, index)
    except RuntimeError:
        raise RefusedError(f"the device {kind!r:.200}", "one that torch knows") from None


def _untyped(*args: Any) -> Any:
    """Rebuild a tensor of a dtype without a storage class, whose name the reader of tensors wants."""
    return FUNCTIONS[_V3].call(*(str(arg) if isinstance(arg, torch.dtype) else arg for arg in args))


def tensors_in(trees: list[Any]) -> list[StoredTensor]:
    """Return the tensors in some trees; what several of them share is looked through once."""
    found: list[StoredTensor] = []
    seen: set[int] = set()
    left = list(trees)
    while left:
        value = left.pop()
        if isinstance(value, StoredTensor):
            found.append(value)
        elif (isinstance(value, dict | list) or type(value) is tuple) and id(value) not in seen:
            seen.add(id(value))
            left.extend(value.values() if isinstance(value, dict) else value)
    return found
