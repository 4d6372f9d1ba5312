"""torch.distributed.checkpoint: tensors put together from the pieces of all ranks, without a process group."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import numpy as np

from recckpt.convert.dcp_metadata import METADATA, StoredChunk, StoredEntry, read_metadata
from recckpt.convert.pieces import SourceBox, put_together
from recckpt.convert.source import Array, ImportOptions, SourceContents, SourceTensor
from recckpt.convert.source_files import SourceFiles
from recckpt.convert.tensor_source import TensorSource, used, wished_tables
from recckpt.convert.torch_file import portable_values, tensor_of
from recckpt.errors import ConversionError
from recckpt.format.dtypes import NUMPY_DTYPES


def recognises(files: SourceFiles) -> bool:
    """Say whether these are files of this format."""
    return METADATA in files.names


def open_source(files: SourceFiles, options: ImportOptions) -> TensorSource:
    """Open a checkpoint.

    Raises:
        ConversionError: a file is missing or cut, pieces do not make up a tensor, or a pickle needs code.
    """
    tensors, values = read_tensors(files)
    tables = wished_tables(tensors, options, files.url)
    taken = used(tables)
    dense = tuple(tensor for name, tensor in tensors.items() if name not in taken)
    return TensorSource(SourceContents("dcp", dense=dense, values=values), tables, files.url)


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
        self._last: tuple[StoredChunk, Array] | None = None

    def load(self, box: StoredChunk, name: str) -> Any:
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

    def array(self, entry: StoredEntry, box: StoredChunk) -> Array:
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

    def rows(self, entry: StoredEntry, box: StoredChunk, begin: int, end: int) -> Array:
        """Return rows of a piece; of a scalar its value."""
        values = self.array(entry, box)
        return values[begin:end] if entry.shape else values.reshape(1)


def _tensor(entry: StoredEntry, pieces: _Pieces, files: SourceFiles) -> SourceTensor:
    if entry.dtype not in NUMPY_DTYPES:
        found = f"values of {entry.dtype}"
        raise ConversionError(files.url, repr(entry.name), found=found, expected="a dtype that files hold")
    parts = [SourceBox(box.offsets, box.sizes, partial(pieces.rows, entry, box)) for box in entry.boxes]
    return put_together(entry.name, entry.dtype, entry.shape, parts, files.url)
