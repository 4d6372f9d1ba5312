"""A file as torch.save writes it, written tensor by tensor: values are asked for when their turn comes."""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from recckpt.dense.stored_tensor import STORAGES
from recckpt.format.dtypes import NUMPY_DTYPES
from recckpt.storage import Sink

_ROOT = "model"
_ALIGNMENT = 64  # of the bytes of a tensor, as torch has it, for those who map the file
_HEADER_BYTES, _ZIP64_BYTES = 30, 20
_PADDING = b"FB"  # torch's name for padding in a zip
_STORAGE_OF = {dtype: name.removeprefix("torch.") for name, dtype in STORAGES.items() if "Untyped" not in name}


@dataclass(frozen=True)
class Later:
    """A tensor whose values are read when they are written.

    Attributes:
        dtype: a key of :data:`~recckpt.format.dtypes.NUMPY_DTYPES`.
        shape: sizes of the dimensions.
        read: returns the values, contiguous.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], npt.NDArray[Any]]


def write_torch_file(state: Mapping[str, Any], sink: Sink, advance: Callable[[int], object]) -> None:
    """Write a dict that ``torch.load(weights_only=True)`` reads; of each tensor that comes later one copy is held.

    Args:
        state: name -> tensor, plain value or :class:`Later`.
        sink: where the file goes.
        advance: counts bytes.

    Raises:
        OSError: the sink failed.
    """
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(dict(state))
    with zipfile.ZipFile(cast(Any, _Stream(sink)), "w", zipfile.ZIP_STORED) as archive:
        _write(archive, sink, "data.pkl", pickled.getvalue())
        _write(archive, sink, "byteorder", b"little")
        for key, read in enumerate(pickler.storages):
            data = read()
            _write(archive, sink, f"data/{key}", data.data)
            advance(data.nbytes)
        _write(archive, sink, "version", b"3\n")


class _Pickler(pickle.Pickler):
    """Puts a reference where a storage would be.

    Attributes:
        storages: gives the bytes of each, in the order of their keys.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: list[Callable[[], npt.NDArray[np.uint8]]] = []
        self._keys: dict[int, str] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Reserved):
            return "storage", obj.kind, self._key(lambda: _bytes(obj.tensor.read())), "cpu", obj.n_items
        if isinstance(obj, torch.storage.TypedStorage):
            typed: Any = obj
            kind, n_items, untyped = getattr(torch, typed._pickle_storage_type()), typed._size(), typed._untyped_storage
        elif isinstance(obj, torch.UntypedStorage):
            kind, n_items, untyped = torch.UntypedStorage, obj.nbytes(), obj
        else:
            return None
        if untyped._cdata not in self._keys:
            self._keys[untyped._cdata] = self._key(
                lambda: torch.tensor([], dtype=torch.uint8).set_(cast(Any, untyped)).numpy()
            )
        return "storage", kind, self._keys[untyped._cdata], "cpu", n_items

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Later):
            return NotImplemented
        strides = tuple(math.prod(obj.shape[dim + 1 :]) for dim in range(len(obj.shape)))
        place: tuple[Any, ...] = (0, obj.shape, strides, False, OrderedDict())
        if obj.dtype in _STORAGE_OF:
            kind = getattr(torch, _STORAGE_OF[obj.dtype])
            return torch._utils._rebuild_tensor_v2, (_Reserved(kind, math.prod(obj.shape), obj), *place)
        n_bytes = math.prod(obj.shape) * NUMPY_DTYPES[obj.dtype].itemsize
        reserved = _Reserved(torch.UntypedStorage, n_bytes, obj)
        return torch._utils._rebuild_tensor_v3, (reserved, *place, getattr(torch, obj.dtype))

    def _key(self, read: Callable[[], npt.NDArray[np.uint8]]) -> str:
        self.storages.append(read)
        return str(len(self.storages) - 1)


@dataclass(frozen=True)
class _Reserved:
    """Stands for the storage of a tensor that comes later."""

    kind: Any
    n_items: int
    tensor: Later


class _Stream:
    """The file object that zipfile writes to, which cannot go back; closing it is the sink's own business."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def write(self, data: Any) -> int:
        return self._sink.write(data)

    def tell(self) -> int:
        return self._sink.n_bytes

    def flush(self) -> None:
        """Do nothing: the sink is made durable once, when it closes."""


def _bytes(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return values.reshape(-1).view(np.uint8)


def _write(archive: zipfile.ZipFile, sink: Sink, name: str, data: Any) -> None:
    """Write an entry whose bytes begin at a multiple of the alignment."""
    entry = zipfile.ZipInfo(f"{_ROOT}/{name}")
    begin = sink.n_bytes + _HEADER_BYTES + len(entry.filename) + 4 + _ZIP64_BYTES
    padding = -begin % _ALIGNMENT
    entry.extra = _PADDING + padding.to_bytes(2, "little") + bytes(padding)
    with archive.open(entry, "w", force_zip64=True) as file:
        file.write(data)
