"""torch.distributed.checkpoint: tensors put together from the pieces of all ranks, without a process group."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from recckpt.convert.dcp_metadata import METADATA, Box, StoredEntry, read_metadata
from recckpt.convert.source import Array, Contents, SourceTensor, Wish
from recckpt.convert.source_files import SourceFiles
from recckpt.convert.tensor_source import TensorSource, used, wished_tables
from recckpt.convert.torch_file import portable_values, tensor_of
from recckpt.errors import ConversionError
from recckpt.format.dtypes import NUMPY_DTYPES


def recognises(files: SourceFiles) -> bool:
    """Say whether these are files of this format."""
    return METADATA in files.names


def open_source(files: SourceFiles, wish: Wish) -> TensorSource:
    """Open a checkpoint.

    Raises:
        ConversionError: a file is missing or cut, pieces do not make up a tensor, or a pickle needs code.
    """
    tensors, values = read_tensors(files)
    tables = wished_tables(tensors, wish, files.url)
    taken = used(tables)
    dense = tuple(tensor for name, tensor in tensors.items() if name not in taken)
    return TensorSource(Contents("dcp", dense=dense, values=values), tables, files.url)


def read_tensors(files: SourceFiles) -> tuple[dict[str, SourceTensor], dict[str, Any]]:
    """Return the tensors, whose values are read later, and the plain values; errors as of :func:`open_source`."""
    entries, pieces = read_metadata(files), _Pieces(files)
    tensors = {entry.name: _tensor(entry, pieces, files) for entry in entries if entry.dtype}
    values = {entry.name: pieces.load(entry.boxes[0], entry.name) for entry in entries if not entry.dtype}
    return tensors, portable_values(values, files.url)


class _Pieces:
    """Loads pieces, each a file of torch.save inside another; keeps the last one."""

    def __init__(self, files: SourceFiles) -> None:
        self._files = files
        self._last: tuple[Box, Array] | None = None

    def load(self, box: Box, name: str) -> Any:
        """Return what lies in a piece; ConversionError where it needs code or is damaged."""
        import pickle

        import torch

        path = self._files.path(box.file)
        data = self._files.array(box.file, box.at, np.dtype(np.uint8), (box.n_bytes,)).tobytes()
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            found = f"a pickle that needs code to load ({str(error).splitlines()[-1]:.200})"
            raise ConversionError(path, repr(name), found=found, expected="tensors and plain values") from error
        except Exception as error:
            found = f"what torch does not read ({type(error).__name__}: {error!s:.100})"
            raise ConversionError(path, repr(name), found=found, expected="a tensor") from error

    def array(self, entry: StoredEntry, box: Box) -> Array:
        """Return the values of a piece of a tensor."""
        import torch

        if self._last is None or self._last[0] is not box:
            value = self.load(box, entry.name)
            path = self._files.path(box.file)
            if not isinstance(value, torch.Tensor):
                kind = type(value).__name__
                raise ConversionError(path, repr(entry.name), found=f"a {kind}", expected="a tensor")
            tensor = tensor_of(entry.name, value, path)
            if (tensor.dtype, tensor.shape) != (entry.dtype, box.sizes):
                found, expected = f"{tensor.dtype} {tensor.shape}", f"{entry.dtype} {box.sizes}"
                raise ConversionError(path, repr(entry.name), found=found, expected=expected)
            self._last = box, tensor.whole()
        return self._last[1]


def _tensor(entry: StoredEntry, pieces: _Pieces, files: SourceFiles) -> SourceTensor:
    if entry.dtype not in NUMPY_DTYPES:
        found = f"values of {entry.dtype}"
        raise ConversionError(files.url, repr(entry.name), found=found, expected="a dtype that files hold")
    boxes = sorted(entry.boxes, key=lambda box: box.offsets)
    _check_tiled(entry, boxes, files)

    def read(begin: int, end: int) -> Array:
        if not entry.shape:
            return pieces.array(entry, boxes[0]).reshape(1)
        values = np.empty((end - begin, *entry.shape[1:]), NUMPY_DTYPES[entry.dtype])
        for box in boxes:
            first, last = max(begin, box.offsets[0]), min(end, box.offsets[0] + box.sizes[0])
            if first < last:
                there = pieces.array(entry, box)[first - box.offsets[0] : last - box.offsets[0]]
                rest = tuple(slice(o, o + s) for o, s in zip(box.offsets[1:], box.sizes[1:], strict=True))
                place = (slice(first - begin, last - begin), *rest)
                values[place] = there
        return values

    return SourceTensor(entry.name, entry.dtype, entry.shape, (files.url, entry.name), read)


def _check_tiled(entry: StoredEntry, boxes: Sequence[Box], files: SourceFiles) -> None:
    """Refuse pieces that leave the tensor, or that do not have as many values together as it has."""
    where = repr(entry.name)
    for box in boxes:
        sides = zip(box.offsets, box.sizes, entry.shape, strict=False)
        if len(box.sizes) != len(entry.shape) or any(at + size > whole for at, size, whole in sides):
            found = f"a piece of {box.sizes} at {box.offsets}"
            raise ConversionError(files.url, where, found=found, expected=f"one inside {entry.shape}")
    filled = [box for box in boxes if math.prod(box.sizes)]
    n_values = sum(math.prod(box.sizes) for box in filled)
    if n_values != math.prod(entry.shape) or _overlap(filled):
        found = f"pieces of {n_values} values{', some of them twice' if _overlap(filled) else ''}"
        raise ConversionError(files.url, where, found=found, expected=f"{math.prod(entry.shape)}, each once")


def _overlap(boxes: Sequence[Box]) -> bool:
    """Say whether two pieces, which are in the order of their offsets, have a value in common."""
    running: list[Box] = []  # those that reach as far as the piece in the first dimension
    for box in boxes:
        if not box.offsets:
            return len(boxes) > 1
        running = [each for each in running if each.offsets[0] + each.sizes[0] > box.offsets[0]]
        if any(_meet(box, each) for each in running):
            return True
        running.append(box)
    return False


def _meet(one: Box, other: Box) -> bool:
    sides = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(at < there + length and there < at + size for at, size, there, length in sides)
