"""Read the tensors of a torch.save file without torch: the zip around the pickle, and the bytes in it."""

from __future__ import annotations

import difflib
from typing import Any, BinaryIO

import numpy as np

from recckpt.dense.stored_tensor import StoredTensor, unpickle
from recckpt.dense.torch_zip import TorchZip
from recckpt.format.dtypes import NUMPY_DTYPES

MAX_PICKLE_BYTES = 1 << 25  # about 150,000 tensors


class TorchFile:
    """Tensors of a file written by torch.save, read without torch and without running any code from it.

    The file holds a dict: tensors by name, and it may be plain values among them. All that it says about
    itself is checked when it is opened; the bytes of a tensor are read when asked for. Not thread-safe, for
    the position of ``file`` is shared.

    Args:
        file: open for reading, seekable; the caller closes it.
        path: what messages call it.

    Raises:
        CorruptCheckpointError: it is not such a file, is damaged, or asks for code to be run.
    """

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._zip, self._path = TorchZip(file, path), path
        data = self._zip.read("data.pkl", most=MAX_PICKLE_BYTES)
        self._tensors, self._values = unpickle(data, path, "data.pkl")
        for name, tensor in self._tensors.items():
            self._zip.check_storage(tensor, f"tensor {name!r}")

    def names(self) -> list[str]:
        """Return the names of the tensors, in the order of the dict."""
        return list(self._tensors)

    def dtype(self, name: str) -> str:
        """Return the dtype as torch calls it, such as ``bfloat16``."""
        return self._tensor(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape; ``()`` is a scalar."""
        return self._tensor(name).shape

    def nbytes(self, name: str) -> int:
        """Return the bytes that :meth:`read` gives."""
        return self._tensor(name).nbytes

    def values(self) -> dict[str, Any]:
        """Return what is no tensor, by name: numbers, strings, bytes, None, and lists, tuples, dicts of them.

        A dtype or device comes as a string, a set as a list; a tensor in a list or dict as its
        :class:`~recckpt.dense.stored_tensor.StoredTensor`.
        """
        return dict(self._values)

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """Return the values of a tensor, contiguous and writable, sharing memory with no other.

        A dtype that numpy lacks comes as bit patterns: ``bfloat16`` as uint16, ``float8_*`` as uint8,
        ``complex32`` as uint32. Only the bytes from its first value up to its last are read. Their checksum
        is checked when they are a whole storage, which is so but for views of larger tensors.

        Raises:
            KeyError: there is no such tensor; names the nearest one.
            CorruptCheckpointError: the bytes are damaged.
        """
        tensor, dtype = self._tensor(name), NUMPY_DTYPES[self.dtype(name)]
        data = np.empty(tensor.span * dtype.itemsize, np.uint8)
        self._zip.fill(data, tensor, tensor.offset * dtype.itemsize, f"tensor {name!r}")
        if 0 in tensor.shape:
            return np.empty(tensor.shape, dtype)
        # A dimension of size one may have any stride, also one that numpy cannot take.
        pairs = zip(tensor.shape, tensor.strides, strict=True)
        steps = [stride * dtype.itemsize if size > 1 else 0 for size, stride in pairs]
        view: np.ndarray[Any, Any] = np.ndarray(tensor.shape, dtype, buffer=data.data, strides=steps)
        return view if view.flags.c_contiguous else view.copy()

    def _tensor(self, name: str) -> StoredTensor:
        if name in self._tensors:
            return self._tensors[name]
        near = difflib.get_close_matches(name, self._tensors, n=1)
        hint = f"the nearest name is {near[0]!r}" if near else f"it has {len(self._tensors)} others"
        kind = "but a plain value" if name in self._values else hint
        raise KeyError(f"{self._path} has no tensor {name!r}; {kind}")
