"""The ``.metadata`` of torch.distributed.checkpoint, a pickle, read without its classes: it can name no code to run."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from recckpt.convert.source_files import SourceFiles
from recckpt.errors import ConversionError
from recckpt.format.dtypes import NUMPY_DTYPES

METADATA = ".metadata"
_MAX_BYTES = 1 << 30
_DCP = "torch.distributed.checkpoint"
_CLASSES = {
    *((f"{_DCP}.metadata", name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")),
    *((f"{_DCP}.metadata", name) for name in ("TensorProperties", "ChunkStorageMetadata", "MetadataIndex")),
    *((f"{_DCP}.metadata", name) for name in ("_MEM_FORMAT_ENCODING", "StorageMeta")),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    (f"{_DCP}.filesystem", "_StoragePrefix"),
    (f"{_DCP}.planner", "WriteItemType"),
    ("torch.serialization", "_get_layout"),
    *(("pathlib", name) for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
    *(("pathlib._local", name) for name in ("PosixPath", "WindowsPath")),
}


@dataclass(frozen=True)
class StoredChunk:
    """A piece of a tensor, or the bytes of a value, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int
    n_bytes: int


@dataclass(frozen=True)
class StoredEntry:
    """What the metadata says of one name; ``dtype`` is "" for a value that is no tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[StoredChunk, ...]


class _StandIn:
    """Stands for an object of a class that is not looked at."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state
        if isinstance(state, dict):
            self.__dict__.update({name: value for name, value in state.items() if isinstance(name, str)})


class _Reader(pickle.Unpickler):
    """Knows the names of the format's classes and of dtypes, and makes none of them."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name in NUMPY_DTYPES:
            return name
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"the global {module}.{name}")
        return type(name, (_StandIn,), {})


def read_metadata(files: SourceFiles) -> list[StoredEntry]:
    """Return all names and where their bytes lie.

    Raises:
        ConversionError: it is damaged, needs code, or names what is not in the files.
    """
    path = files.path(files.need(METADATA, "the metadata that every DCP checkpoint has"))
    try:
        metadata = _Reader(io.BytesIO(files.read(METADATA, _MAX_BYTES))).load()
        return list(_entries(metadata, files))
    except pickle.UnpicklingError as error:
        what = f"a pickle that needs code to load ({error!s:.200})"
        raise ConversionError(path, "", found=what, expected="the metadata of DCP") from error
    except ConversionError:
        raise
    except Exception as error:  # whatever a broken pickle makes of stand-ins
        what = f"what is no metadata of DCP ({type(error).__name__}: {error!s:.100})"
        raise ConversionError(path, "", found=what, expected="a whole file") from error


def _entries(metadata: Any, files: SourceFiles) -> Iterator[StoredEntry]:
    places: dict[tuple[str, tuple[int, ...]], Any] = {}
    for index, info in metadata.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            remedy = "save without transforms, such as compression"
            raise ConversionError(files.url, index.fqn, found="transformed bytes", expected="plain ones", remedy=remedy)
        places[index.fqn, tuple(getattr(index, "offset", None) or ())] = info
    for name, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            yield StoredEntry(name, "", (), (_box(files, name, (), (), places.get((name, ()))),))
            continue
        shape = _counts(entry.size)
        boxes = []
        for chunk in entry.chunks:
            offsets, sizes = _counts(chunk.offsets), _counts(chunk.sizes)
            info = places.get((name, offsets)) or (places.get((name, ())) if not any(offsets) else None)
            boxes.append(_box(files, name, offsets, sizes, info))
        yield StoredEntry(name, str(entry.properties.state[0]), shape, tuple(boxes))


def _box(files: SourceFiles, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], info: Any) -> StoredChunk:
    if info is None:
        raise ConversionError(files.path(METADATA), name, found="no place for it", expected="a file and an offset")
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
