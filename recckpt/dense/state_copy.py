"""Makes the state of a save portable, copies it, and makes digests that ranks compare."""

from __future__ import annotations

import codecs
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

log = logging.getLogger("recckpt")

MAPPINGS = (dict, OrderedDict, Counter)  # mappings allowed in a state, because torch's safe loader can load them
_PLAIN = (type(None), bool, int, float, complex, str, torch.Size, torch.dtype, torch.device)
_MAX_INT_BITS = 255 * 8 - 1  # the largest int that torch's safe loader can load
_LARGE_INT = 1 << 64
_CONTAINERS = (list, tuple, set)
_HOLDERS = frozenset((*MAPPINGS, *_CONTAINERS))
_USUAL = frozenset({type(None), bool, float, str, int})
_HOLDS_NONE = _USUAL | {bytes, complex}  # values of these types hold no tensors
_AS_IT_IS = frozenset({type(None), bool, float, str})
Place = tuple[Any, ...]
Copy = Callable[[Place, Any], Any]
_EVERY = 20  # large states are hashed at each n-th save
_SMALL_BYTES = 1 << 20
_LARGE = 1  # in place of the digest of a large state that this save does not hash
_SAMPLE_ROWS = 4096  # number of rows of a copied table to hash per save, about
_TABLE = "table "  # prefix of digest names of tables that several ranks have copies of
_BY_ROWS = {("dense",), ("sharded",)}  # first items of places whose tensors are in the index, so row-major


class _EmptyBytes(bytes):
    """Empty bytes that torch's safe loader can load; pickle writes plain empty bytes with a function unknown to it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return codecs.encode, ("", "latin1")


def portable(name: str, value: Any, layout: torch.memory_format = torch.contiguous_format) -> Any:
    """Return ``value`` as data that can be loaded without running code.

    Raises ValueError, with its place, for a value that cannot be converted. Tensors become detached CPU tensors in
    row-major order, without the rest of their storage. The layout ``torch.preserve_format`` keeps the order of
    dimensions in memory, because kernels may give other last bits for another order. numpy arrays become tensors, numpy
    scalars numbers, and members of an ``IntEnum`` or ``StrEnum`` their values. Numbers, strings, bytes, None, lists,
    tuples, sets and dicts are allowed too.
    """
    try:
        try:
            return _portable(None, value, layout)
        except ValueError:  # repeat with names for the message; naming all places is slower than the copies
            return _portable(name, value, layout)
    except RecursionError:
        raise ValueError(f"{name[:200]}: the value contains itself, or is nested too deep to be saved") from None


def _portable(name: str | None, value: Any, layout: torch.memory_format) -> Any:
    if type(value) in _HOLDERS:
        return _portable_container(name, value, layout)
    if type(value) is bytes:
        return value or _EmptyBytes()
    if isinstance(value, Tensor):
        return _portable_tensor(name, value, layout)
    if isinstance(value, np.generic | np.ndarray):
        return _portable_numpy(name, value)
    if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
        raise ValueError(
            f"{name}: an int of {value.bit_length()} bits cannot be loaded back safely; save a string instead"
        )
    if isinstance(value, Enum) and isinstance(value, int | str):
        value = value.value
    if type(value) in _PLAIN:
        return value
    raise ValueError(
        f"{name}: a {type(value).__module__}.{type(value).__qualname__} cannot be loaded back safely; a state may hold "
        "tensors, numbers, strings, bytes, None, and lists, tuples, sets and dicts of these"
    )


def _portable_container(name: str | None, value: Any, layout: torch.memory_format) -> Any:
    # Training waits for this function, so values that are already portable cost no call.
    kind, has_plain_members = type(value), are_plain(value)  # for a dict: its keys
    if kind not in MAPPINGS:
        if has_plain_members:
            return kind(value)
        return kind(
            [
                item if type(item) in _AS_IT_IS else _portable(name and f"{name}[{i}]", item, layout)
                for i, item in enumerate(value)
            ]
        )
    keys = value if has_plain_members else [_portable_key(name, key) for key in value]
    items = value.values()
    if not are_plain(items):
        items = []
        for key, item in value.items():
            if type(item) in _AS_IT_IS:
                items.append(item)
            elif type(item) is list and are_plain(item):
                items.append(item[:])
            else:
                items.append(_portable(name and f"{name}[{key!r}]", item, layout))
    elif has_plain_members:
        return kind(value)
    made = dict(zip(keys, items, strict=True))
    return made if kind is dict else kind(made)


def are_plain(values: Collection[Any]) -> bool:
    """Return whether all values are of plain types that need no conversion."""
    kinds = set(map(type, values))
    if int not in kinds:
        return kinds <= _USUAL
    return kinds <= _USUAL and not [one for one in values if type(one) is int and not -_LARGE_INT < one < _LARGE_INT]


def _portable_key(name: str | None, key: Any) -> Any:
    if type(key) in (str, int, float, bool, bytes, type(None)):
        return _portable(name, key, torch.contiguous_format)
    if isinstance(key, np.generic):
        return key.item()
    if type(key) is tuple:
        return key if are_plain(key) else tuple([_portable_key(name, item) for item in key])
    raise ValueError(
        f"{name}: a key of type {type(key).__qualname__} cannot be loaded back safely; use a string or number"
    )


def plain_tensor(name: str | None, value: Tensor) -> Tensor:
    """Return a detached tensor; ValueError if the tensor is not a dense, local tensor with values."""
    if torch.nn.parameter.is_lazy(value):
        raise ValueError(f"{name}: a parameter of a lazy module has no values before its first batch; run one first")
    tensor = value.detach()
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not plain or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        raise ValueError(
            f"{name}: a {type(tensor).__qualname__} of layout {tensor.layout} on {tensor.device} cannot be saved in "
            "one file; save its plain local tensor"
        )
    return tensor


def _portable_tensor(name: str | None, value: Tensor, layout: torch.memory_format) -> Tensor:
    tensor = plain_tensor(name, value).cpu().resolve_conj().resolve_neg()
    is_laid_out = _is_dense(tensor) if layout is torch.preserve_format else tensor.is_contiguous()
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size() or not is_laid_out:
        tensor = tensor.clone(memory_format=layout)
    return tensor


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the values fill their memory without gaps or overlaps, in any order of dimensions."""
    n_values = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != n_values:
            return False
        n_values *= size
    return True


def _portable_numpy(name: str | None, value: Any) -> Any:
    item_bytes = value.dtype.itemsize // (2 if value.dtype.kind == "c" else 1)
    if value.dtype.kind not in "biufc" or item_bytes > 8 or isinstance(value, np.ma.MaskedArray):
        kind = f"{type(value).__name__} of {value.dtype}"
        raise ValueError(f"{name}: a numpy {kind} cannot be saved; convert it to a plain array of numbers")
    if isinstance(value, np.generic):
        return value.item()
    native = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("="))
    return torch.from_numpy(native.copy()).view(value.shape)


def as_it_is(place: Place, state: Any) -> Any:  # a copy function for states that do not change
    return state


def without_values(place: Place, state: Any) -> Any:
    return _replaced(place, state, lambda place, tensor: torch.empty(0, device="cpu"))


class DenseBuffers:
    """Copies tensors to reused buffers on the CPU, one per place in the state. Not thread-safe."""

    def __init__(self) -> None:
        self._buffers: dict[Place, Tensor] = {}

    @contextmanager
    def copying(self) -> Iterator[Copy]:
        """Return a context manager that gives a function (place, state) -> state in which all tensors are copies.

        The copies are complete at the end of the ``with`` block, and valid until the next block begins. A tensor that
        occurs several times is copied once.
        """
        used = dict[Place, Tensor]()
        devices = set[torch.device]()
        # (original, copy); the original is kept so that no other tensor gets its address.
        copied = dict[tuple[Any, ...], tuple[Tensor, Tensor]]()

        def copy(place: Place, tensor: Tensor) -> Tensor:
            values = tensor.dtype, tensor.is_conj(), tensor.is_neg()  # how to interpret the memory
            same = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), values
            if tensor.numel() and same in copied:
                return copied[same][1]
            buffer = _buffer_for(place, tensor, self._buffers.get(place))
            buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                devices.add(tensor.device)
            copied[same] = tensor, buffer
            used[place] = buffer
            return buffer

        yield lambda place, state: _replaced(place, state, copy)
        for device in devices:  # copies to pinned memory are asynchronous
            torch.cuda.current_stream(device).synchronize()
        self._buffers = used


def _buffer_for(place: Place, tensor: Tensor, known: Tensor | None) -> Tensor:
    layout = torch.contiguous_format if place[:1] in _BY_ROWS else torch.preserve_format
    strides = torch.empty_like(tensor, device="meta", memory_format=layout).stride()
    if known is not None and (known.shape, known.stride(), known.dtype) == (tensor.shape, strides, tensor.dtype):
        return known
    with torch.inference_mode(False):  # because the buffer is reused outside of inference mode
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, pin_memory=tensor.is_cuda, device="cpu")


def _replaced(place: Place, state: Any, of: Callable[[Place, Tensor], Tensor]) -> Any:
    try:
        return _with_replaced(place, state, of)
    except RecursionError:
        return state  # portable() refuses the state later, with its name


def _with_replaced(place: Place, value: Any, of: Callable[[Place, Tensor], Tensor]) -> Any:
    kind = type(value)
    if kind in _HOLDERS:
        is_mapping = kind in MAPPINGS
        if _HOLDS_NONE.issuperset(map(type, value.values() if is_mapping else value)):
            return value  # no tensor to copy; portable() copies the container
        others = {}
        for key, item in value.items() if is_mapping else enumerate(value):
            if type(item) in _HOLDS_NONE or (type(item) is list and _HOLDS_NONE.issuperset(map(type, item))):
                continue  # without a call, because a state may have 100,000 small lists
            if (other := _with_replaced((*place, key), item, of)) is not item:
                others[key] = other
        if not others:
            return value
        items = {**(value if is_mapping else dict(enumerate(value))), **others}
        return kind(items if is_mapping else items.values())
    if type(value) not in (Tensor, torch.nn.Parameter) or torch.nn.parameter.is_lazy(value):
        return value
    is_block = value.layout == torch.strided and not (value.is_quantized or value.is_nested or value.is_meta)
    return of(place, value) if is_block else value


class RankDigests:
    """Makes digests of one rank's state while a save stages it; one object for all saves of a saver.

    Small registered objects are hashed at every save, large ones and dense tensors at every 20th save. If several ranks
    have copies of a table, each save hashes another sample of its rows.
    """

    def __init__(self) -> None:
        self._n_saves = 0
        self._known: set[str] = set()  # names whose difference was logged

    def begin(self) -> RankDigest:
        self._n_saves += 1
        return RankDigest(self._known, self._n_saves)


class RankDigest:
    def __init__(self, known: set[str], number: int) -> None:
        self._known, self._number, self._is_whole = known, number, number % _EVERY == 1
        self.by_name: dict[str, int] = {}

    def noting(self, copy: Copy) -> Copy:
        """Return a copy function that records the digest of each state before it copies the state."""

        def noted(place: tuple[Any, ...], state: Any) -> Any:
            name = " ".join([*map(str, place[:-1]), repr(place[-1])])
            is_dense = place[0] == "dense"
            if name not in self._known and (self._is_whole or (not is_dense and _n_bytes(state) <= _SMALL_BYTES)):
                self.by_name[name] = digest(state)
            elif name not in self._known and not is_dense:
                self.by_name[name] = _LARGE
            return copy(place, state)

        return noted

    def note_rows(self, table: str, first: int, slots: Mapping[str, Tensor], *, audit: int) -> None:
        """Record a digest of rows of a table, if several ranks have copies of the table.

        Args:
            table: name of the table.
            first: index of the first row in ``slots``.
            slots: slot -> values of one or more consecutive rows that other ranks also have.
            audit: at each n-th save, hash all of these rows, not a sample; 0 for never.
        """
        n_rows = len(next(iter(slots.values())))
        name = f"{_TABLE}{table!r} from row {first} to {first + n_rows - 1}"
        if name not in self._known:
            is_all = audit and self._number % audit == 0
            step = 1 if is_all else max(1, n_rows // _SAMPLE_ROWS)
            self.by_name[name] = digest({slot: values[self._number % step :: step] for slot, values in slots.items()})

    @property
    def summary(self) -> int:
        return xxhash.xxh3_64_intdigest(repr(sorted(self.by_name.items())).encode())

    def warn(self, ranks: Sequence[Mapping[str, int]], own_rank: int) -> None:
        """On rank 0, log each name whose digests differ between ranks, unless it was logged before. Collective."""
        for name in sorted({name for digests in ranks for name in digests}):
            has_all = not name.startswith(_TABLE)  # only some ranks have copies of a table
            those = {rank: own.get(name) for rank, own in enumerate(ranks) if has_all or name in own}
            first = next(iter(those.values()))
            others = [rank for rank, of_rank in those.items() if of_rank != first]
            if others and name not in self._known:
                self._known.add(name)
                if own_rank == 0:
                    log.warning("%s", _difference(name, others, is_saved=first is not None))


def digest(state: Any) -> int:
    hasher = xxhash.xxh3_64()
    try:
        _feed(hasher, state)
    except Exception:  # the save refuses the state later, with its name
        return 0
    return hasher.intdigest()


def _difference(name: str, others: Sequence[int], *, is_saved: bool) -> str:
    ranks = (
        f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others[:5]))}{', ...' if len(others) > 5 else ''}"
    )
    if not is_saved:
        return f"{name} is registered on {ranks} but not on rank 0, and is not saved: register it on all ranks"
    if name.startswith(_TABLE):
        return (
            f"{name} differs on {ranks} from the other copies, and each rank saves a part of its copy: keep the copies "
            "equal, such as with DistributedDataParallel, and without max_norm"
        )
    mend = "register it with per_rank=True" if not name.startswith("dense ") else "keep it equal on all ranks"
    kept = "only the state of rank 0 is saved, and restored on all ranks"
    return f"{name} differs on {ranks}: {kept}; if this is not intended, {mend}"


def _feed(hasher: Any, value: Any) -> None:
    hasher.update(type(value).__name__.encode())
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, Tensor):
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        hasher.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        hasher.update(plain.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        hasher.update(str(len(value)).encode())
        for key, item in sorted(value.items(), key=lambda pair: repr(pair[0])):
            hasher.update(repr(key).encode())
            _feed(hasher, item)
    elif isinstance(value, list | tuple):
        hasher.update(str(len(value)).encode())
        for item in value:
            _feed(hasher, item)
    else:
        hasher.update(repr(sorted(value, key=repr) if isinstance(value, set) else value).encode())


def _n_bytes(value: Any) -> int:
    if isinstance(value, Tensor | np.ndarray):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_n_bytes, value.values()))
    return sum(map(_n_bytes, value)) if isinstance(value, list | tuple) else 0
