"""Compares the contents of ``.pt`` files, such as optimizer states, key by key; runs no code of a pickle (no torch)."""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import numpy as np

from recckpt.checkpoint.chain import OpenChain
from recckpt.dense.torch_archive import HEADER_BYTES, LoadableArchive, check_loadable, data_begin
from recckpt.errors import CheckpointRemovedError
from recckpt.format import layout
from recckpt.format.manifest import FileEntry
from recckpt.format.tensor_index import MAX_DIMS, NUMPY_DTYPES, STORAGES, widened
from recckpt.inspect.diff_result import KeyDiff
from recckpt.inspect.diff_tensors import Array, Comparable, compare_tensors

_SHOWN = 200  # most characters to show of a value that is not a number
_MOST_BYTES = 32 << 20  # largest pickle that is parsed; larger files are not looked into
_MOST_OPCODES = 2_000_000  # a tensor takes about 35
_MOST_WORK = 64 << 20  # limit on characters of keys and values, plus a fixed cost for each:
_KEY_COST, _ITEM_COST, _TENSOR_COST = 200, 16, 1000
_MOST_READINGS = 16  # how often the bytes of a file may be read, because tensors may share some
_MOST_DEPTH = 200
_REORDERED_BYTES = 16 << 20  # largest tensor that is read whole if its two sides have different orders


class PickledTensor(NamedTuple):
    """A tensor whose values fill one block of a file. ``read(begin, end)`` returns values in the block's order."""

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]  # dimensions with more than one value, outermost first
    read: Callable[[int, int], Array]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize

    def by_index(self) -> Array:
        values = self.read(0, prod(self.shape)).reshape([self.shape[dim] for dim in self.order])
        by_index: Array = values.transpose(np.argsort(self.order)).reshape(-1)
        return by_index


class State(NamedTuple):
    leaves: dict[str, Any]  # path -> number, text, bytes or tensor; anything else as :class:`_Text`
    containers: dict[str, str]  # path -> kind of each container that has leaves


class _Text(str):
    pass


class _Items(list[tuple[Any, Any]]):
    """Items of a dict, as a list: hashing keys of a file, such as deeply nested tuples, could take forever."""

    kind = "dict"


class _Members(list[Any]):
    """Members of a set."""


def states_in(side: OpenChain, files: Iterable[FileEntry]) -> dict[str, State]:
    """Return name -> its state in some files; {} if a file is not as recckpt writes it, or is too large."""
    states: dict[str, State] = {}
    left = _MOST_WORK  # for the files of all ranks together
    for file in files:
        path = layout.join(side.directory, file.name)
        rank = file.name.rpartition("_")[2].partition(".")[0] if layout.content_of_rank(file.name) else None
        try:
            with side.files.open(path) as content:
                archive = check_loadable(content, path, _MOST_BYTES)
            reader = _StateReader(archive, partial(side.files.read, path), file.n_bytes, left)
            for name, value in reader.load():
                if type(name) is not str:
                    raise ValueError("a name that is not text")
                into = states.setdefault(name, State({}, {}))
                reader.fill(into, "" if rank is None else f" of rank {rank}: ", value)
            left = reader.left
        except (OSError, CheckpointRemovedError):
            raise
        except Exception:  # any content is possible, and its bytes match the checksum
            return {}
    return states


def compare_keys(before: State, after: State, tolerance: float) -> Iterator[KeyDiff]:
    """Yield the keys that differ; tensors are compared by their values, like those of the model."""
    for at, kind in before.containers.items():
        if (other_kind := after.containers.get(at, kind)) != kind:
            yield KeyDiff(at, "changed", kind, other_kind)
    for key in {**before.leaves, **after.leaves}:
        one, other = before.leaves.get(key), after.leaves.get(key)
        if key not in before.leaves or key not in after.leaves:
            yield KeyDiff(key, "gone" if key in before.leaves else "added", _shown(one), _shown(other))
        elif isinstance(one, PickledTensor) and isinstance(other, PickledTensor):
            is_same, largest = _compared(one, other, tolerance)
            if not is_same:
                yield KeyDiff(key, "changed", _shown(one), _shown(other), largest)
        elif type(one) is not type(other) or (
            one != other if isinstance(one, str | bytes) else repr(one) != repr(other)  # as text, two NaN are equal
        ):
            yield KeyDiff(key, "changed", _shown(one), _shown(other))
    orders = [[key for key in side.leaves if key in other.leaves] for side, other in ((before, after), (after, before))]
    first = next((n for n, pair in enumerate(zip(*orders, strict=True)) if pair[0] != pair[1]), None)
    if first is not None:
        one, other = (f"the order {', '.join(islice(order, first, first + 10)):.{_SHOWN}}" for order in orders)
        yield KeyDiff("", "changed", one, other)


def _compared(one: PickledTensor, other: PickledTensor, tolerance: float) -> tuple[bool, float | None]:
    """Return whether two tensors are equal, and their largest difference; None if it is not computed."""
    if one.shape != other.shape:
        return False, None
    reads = [one.read, other.read]
    try:
        if one.order != other.order:
            if max(one.nbytes, other.nbytes) > _REORDERED_BYTES:
                return False, None
            values, others = one.by_index(), other.by_index()
            reads = [lambda begin, end: values[begin:end], lambda begin, end: others[begin:end]]
        flat = [Comparable("", "", one.dtype, (prod(one.shape),), reads[0])]
        other_flat = [Comparable("", "", other.dtype, (prod(one.shape),), reads[1])]
        [tensor] = compare_tensors(flat, other_flat, tolerance, lambda n_bytes: None)
    except EOFError:  # a record is not where the file says
        return False, None
    return tensor.status == "same", tensor.largest


def _shown(value: Any) -> Any:
    if isinstance(value, PickledTensor):
        return f"{value.dtype}{list(value.shape)}"
    return f"{value[:_SHOWN]!s:.{_SHOWN}}" if isinstance(value, str | bytes) else value


class _StateReader:
    """Interprets the few opcodes that :func:`check_loadable` allows, in bounded time and memory.

    Raises ValueError, or another error, for anything that recckpt does not write.
    """

    def __init__(self, archive: LoadableArchive, read: Callable[[int, int], bytes], n_bytes: int, left: int) -> None:
        self._archive, self._read, self._n_bytes = archive, read, n_bytes
        self.left, self._to_read = left, _MOST_READINGS * n_bytes
        self._known: Mapping[str, Any] = {
            "torch._utils _rebuild_tensor_v2": lambda storage, *args: self._tensor(*storage, *args[:3]),
            "torch._utils _rebuild_tensor_v3": lambda storage, *args: self._tensor(storage[0], args[5], *args[:3]),
            "torch._utils _rebuild_parameter": lambda values, *_: values,
            "torch.storage UntypedStorage": "uint8",
            "torch Size": tuple,
            "torch device": lambda kind, *index: f"{_of(kind, str)}{''.join(f':{_of(one, int)}' for one in index)}",
            "_codecs encode": lambda text, encoding: _of(text, str).encode("latin1"),
            "__builtin__ set": lambda members: _Members(_of(members, list)),
            "__builtin__ complex": lambda real, imag: complex(_of(real, float), _of(imag, float)),
            "collections OrderedDict": partial(_items, "OrderedDict"),
            "collections Counter": partial(_items, "Counter"),
            **{f"torch {kind}": dtype for dtype, kind in STORAGES.items()},
            **{f"torch {dtype}": dtype for dtype in NUMPY_DTYPES},
        }

    def load(self) -> _Items:
        stack: list[Any] = []
        outer: list[list[Any]] = []  # stacks below each mark
        memo: dict[int, Any] = {}
        for opcode, arg, _ in islice(pickletools.genops(self._archive.pickle), _MOST_OPCODES):
            name = opcode.name
            if name in _VALUES:
                stack.append(self._known[_of(arg, str)] if name == "GLOBAL" else arg)
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[_of(arg, int)] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[_of(arg, int)])
            elif name in _NEW:
                stack.append(_NEW[name]())
            elif name == "MARK":
                outer.append(stack)
                stack = []
            elif name in _HOLDS:
                if n_members := _HOLDS[name]:
                    members = stack[-n_members:]
                    del stack[-n_members:]
                else:
                    members, stack = stack, outer.pop()
                _hold(name, stack, members)
            elif name in ("BINPERSID", "REDUCE"):
                args = _of(stack.pop(), tuple)
                stack.append(self._stored(*args) if name == "BINPERSID" else self._called(stack.pop(), args))
            elif name == "STOP":
                state: _Items = _of(stack.pop(), _Items)
                return state
            elif name != "PROTO":
                raise ValueError(f"the opcode {name}")
        raise ValueError("too many opcodes")

    def _called(self, function: Any, args: tuple[Any, ...]) -> Any:
        self._take(sum(len(each) for each in args if isinstance(each, str | list | tuple)))
        return function(*args)

    def _stored(self, storage: Any, dtype: Any, number: Any, *_: Any) -> tuple[zipfile.ZipInfo, str]:
        return self._archive.entries[f"{self._archive.root}/data/{_of(number, str)}"], _of(dtype, str)

    def fill(self, state: State, at: str, value: Any, depth: int = 0) -> None:
        """Add the leaves of a value to a state, by path; a list of only plain values is one leaf."""
        self._take(len(at) + _KEY_COST, depth)
        if type(value) in (list, tuple):
            self._take(len(value))
        if type(value) is _Items and value:
            state.containers[at] = value.kind
            for key, item in value:
                is_name = type(key) is str and key.isidentifier()
                self.fill(state, f"{at}.{key}" if is_name else f"{at}[{self._text(key, depth)}]", item, depth + 1)
        elif type(value) in (list, tuple) and any(type(item) in (list, tuple, _Items, PickledTensor) for item in value):
            state.containers[at] = type(value).__name__
            for number, item in enumerate(value):
                self.fill(state, f"{at}[{number}]", item, depth + 1)
        elif type(value) is PickledTensor:
            self._take(_TENSOR_COST)
            self._to_read -= value.nbytes
            if self._to_read < 0:
                raise ValueError("the same bytes as many tensors")
            state.leaves[at] = value
        else:
            is_plain = value is None or type(value) in (bool, int, float, str, bytes)
            state.leaves[at] = value if is_plain else _Text(self._text(value, depth))

    def _text(self, value: Any, depth: int) -> str:
        self._take(_ITEM_COST + (4 * len(value) if isinstance(value, str | bytes) else 0), depth)
        if value is None or type(value) in (bool, int, float, complex, str, bytes):
            return repr(value)
        if type(value) is _Items and not value:
            return "{}" if value.kind == "dict" else f"{value.kind}()"
        if type(value) not in (list, tuple, _Members):
            raise ValueError(f"a {type(value).__name__} among plain values")
        texts = [self._text(item, depth + 1) for item in value]
        if type(value) is _Members:
            return f"{{{', '.join(sorted(texts))}}}" if texts else "set()"
        text = ", ".join(texts)
        self._take(len(text))
        return f"[{text}]" if type(value) is list else f"({text},)" if len(texts) == 1 else f"({text})"

    def _take(self, work: int, depth: int = 0) -> None:
        self.left -= work
        if self.left < 0 or depth > _MOST_DEPTH:
            raise ValueError("too much, or nested too deep")

    def _tensor(self, record: Any, dtype: Any, offset: Any, shape: Any, strides: Any) -> PickledTensor:
        kind = NUMPY_DTYPES[_of(dtype, str)]
        counts = (offset, *_of(shape, tuple), *_of(strides, tuple))
        if set(map(type, counts)) != {int} or min(counts) < 0 or not len(shape) == len(strides) <= MAX_DIMS:
            raise ValueError("a tensor of an invalid shape")
        n_values = prod(shape)
        dims = [dim for dim, size in enumerate(shape) if size != 1] if n_values else []
        order = tuple(sorted(dims, key=lambda dim: strides[dim], reverse=True))
        if any(strides[dim] != prod(shape[inner] for inner in order[n + 1 :]) for n, dim in enumerate(order)):
            raise ValueError("a tensor that is not contiguous")
        is_plain = _of(record, zipfile.ZipInfo).compress_type == zipfile.ZIP_STORED and record.header_offset >= 0
        n_bytes = (offset + n_values) * kind.itemsize
        if not is_plain or not n_bytes <= record.file_size == record.compress_size:
            raise ValueError("a tensor that is larger than its record")
        read, end_of_file = self._read, self._n_bytes

        def values(begin: int, end: int) -> Array:
            at = data_begin(record, read(HEADER_BYTES, record.header_offset))
            at, size = at + (offset + begin) * kind.itemsize, (end - begin) * kind.itemsize
            data = read(size, at) if at + size <= end_of_file else b""
            if len(data) != size:
                raise EOFError
            numbers = np.frombuffer(data, kind)
            return widened(numbers) if dtype == "bfloat16" else numbers

        return PickledTensor(dtype, shape, order, values)


_VALUES = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "GLOBAL"})
_NEW: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": _Items,
}
_HOLDS = {  # opcode -> number of values it takes; 0: all up to the mark
    **{"TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3},
    **{"APPEND": 1, "APPENDS": 0, "SETITEM": 2, "SETITEMS": 0},
}


def _hold(opcode: str, stack: list[Any], members: list[Any]) -> None:
    if opcode.startswith("TUPLE"):
        stack.append(tuple(members))
    elif opcode.startswith("APPEND"):
        _of(stack[-1], list).extend(members)
    else:
        _of(stack[-1], _Items).extend(zip(members[::2], members[1::2], strict=True))


def _of(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__}, expected a {kind.__name__}")
    return value


def _items(kind: str, items: Any = None) -> _Items:
    made = _Items([] if items is None else _of(items, _Items))
    made.kind = kind
    return made
