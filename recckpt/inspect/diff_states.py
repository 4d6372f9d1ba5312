"""What lies in ``.pt`` files, such as the state of an optimizer, key by key; no code of a pickle is run (no torch)."""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from recckpt.checkpoint.chain import OpenChain
from recckpt.dense.torch_archive import HEADER_BYTES, LENGTHS_AT, LoadableArchive, check_loadable
from recckpt.errors import CheckpointRemovedError
from recckpt.format import layout
from recckpt.format.manifest import FileEntry
from recckpt.format.tensor_index import NUMPY_DTYPES, STORAGES, widened
from recckpt.inspect.diff_result import KeyDiff
from recckpt.inspect.diff_tensors import Array, Comparable, compare_tensors

_SHOWN = 200  # characters of a value that is no number
Keys = Mapping[str, Any]  # what an object holds, by the place in its state: plain values, and tensors to be read


def states_in(side: OpenChain, files: Iterable[FileEntry]) -> dict[str, Keys]:
    """Return what each name in some files holds, by key; {} where a file is of another form than the format's."""
    states: dict[str, dict[str, Any]] = {}
    for file in files:
        path = layout.join(side.directory, file.name)
        rank = file.name.rpartition("_")[2].partition(".")[0] if layout.content_of_rank(file.name) else None
        try:
            with side.files.open(path) as content:
                state = _StateReader(check_loadable(content, path), partial(side.files.read, path)).load()
            for name, value in state.items():
                states.setdefault(name, {}).update(_leaves("" if rank is None else f" of rank {rank}: ", value))
        except (OSError, CheckpointRemovedError):
            raise
        except Exception:  # whatever was written there: its bytes are those of its checksum
            return {}
    return dict(states)


def compare_keys(before: Keys, after: Keys, tolerance: float) -> Iterator[KeyDiff]:
    """Yield the keys that differ; tensors by their values, as those of the model."""
    for key in {**before, **after}:
        if key not in before or key not in after:
            one, other = _shown(before.get(key)), _shown(after.get(key))
            yield KeyDiff(key, "gone" if key in before else "added", one, other)
            continue
        one, other = before[key], after[key]
        if isinstance(one, Comparable) and isinstance(other, Comparable):
            [tensor] = compare_tensors([one], [other], tolerance, lambda n_bytes: None)
            if tensor.status != "same":
                yield KeyDiff(key, "changed", tensor.before, tensor.after, tensor.largest)
        elif repr(one) != repr(other) and not (type(one) is set and one == other):  # as texts, two NaN are the same
            yield KeyDiff(key, "changed", _shown(one), _shown(other))


def _shown(value: Any) -> Any:
    if isinstance(value, Comparable):
        return value.kind
    return value if value is None or isinstance(value, bool | int | float) else f"{value!s:.{_SHOWN}}"


def _leaves(at: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a state holds, by key; a list of nothing but plain values is one of these."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            is_name = isinstance(key, str) and key.isidentifier()
            yield from _leaves(f"{at}.{key}" if is_name else f"{at}[{key!r}]", item)
    elif type(value) in (list, tuple) and any(isinstance(item, dict | list | tuple | Comparable) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(f"{at}[{number}]", item)
    else:
        yield at, value


class _StateReader(pickle.Unpickler):
    """Knows what :func:`check_loadable` lets pass, and gives each tensor as what reads it."""

    def __init__(self, archive: LoadableArchive, read: Callable[[int, int], bytes]) -> None:
        super().__init__(io.BytesIO(archive.pickle))
        self._archive, self._read = archive, read
        self._known: Mapping[str, Any] = {
            "torch._utils _rebuild_tensor_v2": lambda storage, *args: self._tensor(*storage, *args[:3]),
            "torch._utils _rebuild_tensor_v3": lambda storage, *args: self._tensor(storage[0], args[5], *args[:3]),
            "torch._utils _rebuild_parameter": lambda values, *_: values,
            "torch.storage UntypedStorage": "uint8",
            "torch Size": partial(tuple),
            "torch device": lambda *names: ":".join(map(str, names)),
            "_codecs encode": lambda text, encoding: text.encode("latin1"),
            "__builtin__ set": partial(set),
            "__builtin__ complex": partial(complex),
            "collections OrderedDict": partial(OrderedDict),  # partial: attributes that a file sets go with it
            "collections Counter": partial(Counter),
            **{f"torch {kind}": dtype for dtype, kind in STORAGES.items()},
            **{f"torch {dtype}": dtype for dtype in NUMPY_DTYPES},
        }

    def find_class(self, module: str, name: str) -> Any:
        return self._known[f"{module} {name}"]

    def persistent_load(self, pid: Any) -> tuple[zipfile.ZipInfo, str]:
        _, dtype, number, *_ = pid
        return self._archive.entries[f"{self._archive.root}/data/{number}"], dtype

    def _tensor(
        self, record: zipfile.ZipInfo, dtype: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Comparable:
        kind = NUMPY_DTYPES[dtype]
        n_bytes = (offset + _span(shape, strides)) * kind.itemsize
        if min(offset, *shape, *strides, 0) < 0 or not n_bytes <= record.file_size == record.compress_size:
            raise ValueError(f"a tensor of {shape} in a record of {record.file_size} bytes")

        def rows(begin: int, end: int) -> Array:
            """Read all bytes between the first value of some rows and the last."""
            sizes = (end - begin, *shape[1:]) if shape else ()
            first = offset + (begin * strides[0] if shape else 0)
            header = self._read(HEADER_BYTES, record.header_offset)
            at = record.header_offset + HEADER_BYTES + sum(struct.unpack_from("<HH", header, LENGTHS_AT))
            data = self._read(_span(sizes, strides) * kind.itemsize, at + first * kind.itemsize)
            values = np.ndarray(sizes, kind, data, strides=[stride * kind.itemsize for stride in strides])
            return widened(values) if dtype == "bfloat16" else values

        return Comparable("extra", "", dtype, shape, rows)


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the values between the first and the last of a tensor, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if math.prod(shape) else 0
