"""All tensors of a model in a checkpoint by name, those in one file and those in chunks (no torch here)."""

from __future__ import annotations

import difflib
from typing import Any, BinaryIO

import numpy.typing as npt

from recckpt.dense.stored_shards import ShardReader, check_apart
from recckpt.dense.torch_file import TorchFile
from recckpt.format import layout
from recckpt.format.manifest import Manifest
from recckpt.format.tensor_index import MODEL
from recckpt.storage.base import Files


class DenseTensors:
    """Reads the dense tensors of one checkpoint, without torch. Not thread-safe.

    Args:
        files: where it lies.
        directory: of the checkpoint in it.
        manifest: of the checkpoint.

    Raises:
        CorruptCheckpointError: a file is damaged.
        FormatVersionError: written by a newer format.
    """

    def __init__(self, files: Files, directory: str, manifest: Manifest) -> None:
        self._directory = directory
        self._shards = ShardReader(files, directory, manifest)
        self._sharded = {t.name: t for t in self._shards.tensors.values() if t.of == MODEL}
        self._content: BinaryIO | None = None
        self._file: TorchFile | None = None
        if manifest.file(layout.MODEL) is not None:
            path = layout.join(directory, layout.MODEL)
            self._content = files.open(path)
            self._file = TorchFile(self._content, path)
            check_apart(self._file.names(), self._sharded, path)

    def close(self) -> None:
        """Close the files."""
        self._shards.close()
        if self._content is not None:
            self._content.close()

    def names(self) -> list[str]:
        """Return the names of the tensors."""
        return [*(self._file.names() if self._file else []), *self._sharded]

    def dtype(self, name: str) -> str:
        """Return the dtype as torch calls it, such as ``bfloat16``."""
        return self._sharded[name].dtype if name in self._sharded else self._in_file(name).dtype(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape; ``()`` is a scalar."""
        return self._sharded[name].shape if name in self._sharded else self._in_file(name).shape(name)

    def nbytes(self, name: str) -> int:
        """Return the bytes that :meth:`read` gives."""
        return self._sharded[name].nbytes if name in self._sharded else self._in_file(name).nbytes(name)

    def is_sharded(self, name: str) -> bool:
        """Say whether a tensor lies in chunks."""
        return name in self._sharded

    def read(self, name: str) -> npt.NDArray[Any]:
        """Return the values of a tensor, whole, as :meth:`recckpt.dense.torch_file.TorchFile.read` does.

        Raises:
            KeyError: there is no such tensor.
            CorruptCheckpointError: the bytes are damaged.
        """
        return self._shards.read(self._sharded[name]) if name in self._sharded else self._in_file(name).read(name)

    def _in_file(self, name: str) -> TorchFile:
        if self._file is None or (self._sharded and name not in self._file.names()):
            near = difflib.get_close_matches(name, self.names(), n=1)
            hint = f" {name!r}; the nearest name is {near[0]!r}" if near else f" {name!r}"
            raise KeyError(f"{self._directory} has no {'tensor' + hint if self._sharded else 'dense tensors'}")
        return self._file
