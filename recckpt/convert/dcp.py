"""Reads and writes torch.distributed.checkpoint without a process group; joins tensors from the pieces of all ranks.

The ``.metadata`` file is a pickle. The reader does not load the pickled classes, so the file cannot run code.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recckpt.convert.source import Array, ImportOptions, ImportSource, LeftOut, SourceContents, SourceTensor
from recckpt.convert.source_files import SourceFiles
from recckpt.convert.target_files import TargetFiles, scratch
from recckpt.convert.tensor_source import SourceBox, put_together, tensor_source, wished_tables
from recckpt.convert.torch_file import portable_values, tensor_of
from recckpt.convert.view import Export, TableView
from recckpt.errors import ConversionError
from recckpt.format.tensor_index import NUMPY_DTYPES
from recckpt.sparse.files.arrow_format import ID_SPEC
from recckpt.text import Progress

ALL_SLOTS, INCREMENTS, DTYPES = True, False, ("float16", "bfloat16", "int8")
METADATA = ".metadata"
_MAX_BYTES, _STEP_BYTES = 1 << 30, 8 << 20
_DCP = "torch.distributed.checkpoint"
_CLASSES = {
    f"{_DCP}.metadata": (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
        *("MetadataIndex", "_MEM_FORMAT_ENCODING", "StorageMeta"),
    ),
    f"{_DCP}.filesystem": ("_StorageInfo", "_StoragePrefix"),
    f"{_DCP}.planner": ("WriteItemType",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),
}


class StoredChunk(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int
    n_bytes: int


_Entry = tuple[str, str, tuple[int, ...], list[StoredChunk]]  # name, dtype ("" if it is not a tensor), shape, pieces


class _StandIn:
    """Replaces an object whose class is not loaded."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state
        if isinstance(state, dict):
            self.__dict__.update({name: value for name, value in state.items() if isinstance(name, str)})


class _Reader(pickle.Unpickler):
    """An unpickler that accepts the names of the format's classes and of dtypes, without loading any class."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name in NUMPY_DTYPES:
            return name
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"the global {module}.{name}")
        return type(name, (_StandIn,), {})


def _read_metadata(files: SourceFiles) -> list[_Entry]:
    """Return all entries; ConversionError if the metadata is damaged, needs code to load, or names missing bytes."""
    path = files.path(files.need(METADATA, "the metadata that every DCP checkpoint has"))
    try:
        metadata = _Reader(io.BytesIO(files.read(METADATA, _MAX_BYTES))).load()
        return list(_entries(metadata, files))
    except pickle.UnpicklingError as error:
        what = f"a pickle that needs code to load ({error!s:.200})"
        raise ConversionError(path, "", found=what, expected="the metadata of DCP") from error
    except ConversionError:
        raise
    except Exception as error:  # a broken pickle can raise anything from stand-ins
        what = f"invalid DCP metadata ({type(error).__name__}: {error!s:.100})"
        raise ConversionError(path, "", found=what, expected="an undamaged file") from error


def _entries(metadata: Any, files: SourceFiles) -> Iterator[_Entry]:
    places: dict[tuple[str, tuple[int, ...]], Any] = {}
    for index, info in metadata.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            remedy = "save without transforms, such as compression"
            raise ConversionError(files.url, index.fqn, found="transformed bytes", expected="plain ones", remedy=remedy)
        places[index.fqn, tuple(getattr(index, "offset", None) or ())] = info
    for name, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            yield name, "", (), [_box(files, name, (), (), places.get((name, ())))]
            continue
        shape = _counts(entry.size)
        boxes = []
        for chunk in entry.chunks:
            offsets, sizes = _counts(chunk.offsets), _counts(chunk.sizes)
            info = places.get((name, offsets)) or (places.get((name, ())) if not any(offsets) else None)
            boxes.append(_box(files, name, offsets, sizes, info))
        yield name, str(entry.properties.state[0]), shape, boxes


def _box(files: SourceFiles, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], info: Any) -> StoredChunk:
    if info is None:
        raise ConversionError(files.path(METADATA), name, found="no location for it", expected="a file and an offset")
    file, (at, n_bytes) = str(info.relative_path), _counts((info.offset, info.length))
    files.need(file, f"the file that has {name!r}")
    if at + n_bytes > files.size(file):
        found, expected = f"{files.size(file)} bytes", f"{at + n_bytes} at least, for {name!r}"
        raise ConversionError(files.path(file), "its size", found=found, expected=expected, remedy="the file is cut")
    return StoredChunk(offsets, sizes, file, at, n_bytes)


def _counts(values: Any) -> tuple[int, ...]:
    counts = tuple(values)
    if not all(type(value) is int and 0 <= value < 2**59 for value in counts):
        raise ValueError(f"sizes {counts!r:.60}")
    return counts


def recognises(files: SourceFiles) -> bool:
    return METADATA in files.names


def open_source(files: SourceFiles, options: ImportOptions) -> ImportSource:
    tensors, values = read_tensors(files)
    tables = wished_tables(tensors, options, files.url)
    return tensor_source(SourceContents("dcp", values=values), tensors, tables, files.url)


def read_tensors(files: SourceFiles) -> tuple[dict[str, SourceTensor], dict[str, Any]]:
    pieces, tensors, values = _Pieces(files), dict[str, SourceTensor](), dict[str, Any]()
    for name, dtype, shape, boxes in _read_metadata(files):
        if not dtype:
            values[name] = pieces.load(boxes[0], name)
            continue
        if dtype not in NUMPY_DTYPES:
            found = f"values of {dtype}"
            raise ConversionError(files.url, repr(name), found=found, expected="a supported dtype")
        parts = [SourceBox(box.offsets, box.sizes, partial(pieces.rows, name, dtype, box)) for box in boxes]
        tensors[name] = put_together(name, dtype, shape, parts, files.url)
    return tensors, portable_values(values, files.url)


class _Pieces:
    """Loads pieces, each a file of torch.save inside another file; caches the last one."""

    def __init__(self, files: SourceFiles) -> None:
        self._files = files
        self._last: tuple[StoredChunk, Array] | None = None

    def load(self, box: StoredChunk, name: str) -> Any:
        import torch

        path = self._files.path(box.file)
        data = self._files.array(box.file, box.at, np.dtype(np.uint8), (box.n_bytes,)).tobytes()
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            found = f"a pickle that needs code to load ({str(error).splitlines()[-1]:.200})"
            raise ConversionError(path, repr(name), found=found, expected="tensors and plain values") from error
        except Exception as error:
            found = f"what torch cannot read ({type(error).__name__}: {error!s:.100})"
            raise ConversionError(path, repr(name), found=found, expected="a tensor") from error

    def rows(self, name: str, dtype: str, box: StoredChunk, begin: int, end: int) -> Array:
        """Return rows [begin, end) of a piece of a tensor; for a scalar, its value."""
        import torch

        if self._last is None or self._last[0] is not box:
            value = self.load(box, name)
            path = self._files.path(box.file)
            if not isinstance(value, torch.Tensor):
                kind = type(value).__name__
                raise ConversionError(path, repr(name), found=f"a {kind}", expected="a tensor")
            tensor = tensor_of(name, value, path)
            if (tensor.dtype, tensor.shape) != (dtype, box.sizes):
                found, expected = f"{tensor.dtype} {tensor.shape}", f"{dtype} {box.sizes}"
                raise ConversionError(path, repr(name), found=found, expected=expected)
            self._last = box, tensor.whole()
        values = self._last[1]
        return values[begin:end] if box.sizes else values.reshape(1)


def write(export: Export, files: TargetFiles, progress: Progress) -> list[LeftOut]:
    """Write a checkpoint to temporary files with torch itself, and copy the files to the target."""
    with ExitStack() as stack:
        state: dict[str, Any] = {}
        for tensor in export.dense():
            state[tensor.name] = _torch(tensor.read().reshape(-1), tensor.dtype, tensor.shape)
        for table in export.tables:
            for name, values, dtype in _columns(table, stack, progress):
                if name in state:
                    found, expected = "a dense tensor and a column", "different names"
                    raise ConversionError(files.url, repr(name), found=found, expected=expected)
                state[name] = _torch(values.reshape(-1), dtype, values.shape)
            progress.add_rows(table.n_rows)
        made = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recckpt-")))
        _save(state, made)
        del state
        for path in sorted(made.iterdir()):
            with path.open("rb") as source, files.create(path.name) as sink:
                while data := source.read(_STEP_BYTES):
                    sink.write(data)
    return []


def _save(state: dict[str, Any], made: Path) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended here
            save(state, storage_writer=FileSystemWriter(made), no_dist=True)
    except CheckpointException as failure:  # a BaseException; contains torch's own error about the file that it closes
        error: BaseException | None = failure.failures[0][0]
        while error is not None and not isinstance(error, OSError):
            error = error.__context__
        number = errno.EIO if error is None else error.errno or errno.EIO
        problem = f"writing failed: {os.strerror(number)}; TMPDIR may name another directory"
        raise OSError(number, problem, str(made)) from failure


def _columns(table: TableView, stack: ExitStack, progress: Progress) -> list[tuple[str, Array, str]]:
    """Return (name, values, dtype) of the columns of a table, each mapped from a temporary file."""
    columns, begin = list[tuple[str, Array, str]](), 0
    for slot in (ID_SPEC, *table.slots):
        values = scratch(stack, NUMPY_DTYPES[slot.dtype], (table.n_rows, *slot.shape))
        columns.append((f"{table.name}.{slot.name}", values, slot.dtype))
    for rows in table.rows():
        end = begin + len(rows.ids)
        for (_, values, _), values_read in zip(columns, [rows.ids, *rows.columns], strict=True):
            values[begin:end] = values_read
            progress.advance(values_read.nbytes)
        begin = end
    return columns


def _torch(values: Array, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return an array as a torch tensor over the same memory."""
    import torch

    kind = getattr(torch, dtype)
    if not len(values):
        return torch.empty(shape, dtype=kind, device="cpu")
    return torch.from_numpy(values.view(np.uint8)).view(kind).reshape(shape)
