"""Reads and writes the safetensors format without its library: a JSON header, checked before use, then the values.

Follows the format's specification (github.com/huggingface/safetensors). RecIS writes ``bool`` in lower case.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from recckpt.convert.source import Array, SourceTensor
from recckpt.convert.source_files import SourceFiles
from recckpt.convert.view import Export, TableView
from recckpt.errors import ConversionError
from recckpt.format.tensor_index import MAX_DIMS, NUMPY_DTYPES
from recckpt.storage import Sink
from recckpt.text import Progress

MAX_HEADER_BYTES = 100_000_000  # limit of the library
_DTYPES = {  # code in the file -> dtype
    **{"BOOL": "bool", "bool": "bool"},
    **{f"{letter}{bits}": f"{kind}int{bits}" for bits in (8, 16, 32, 64) for letter, kind in (("U", "u"), ("I", ""))},
    **{"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
}
_CODES = {name: code for code, name in _DTYPES.items() if code != "bool"}


@dataclass(frozen=True)
class TensorFile:
    tensors: Mapping[str, SourceTensor]
    metadata: Mapping[str, str]


def read_header(files: SourceFiles, name: str) -> TensorFile:
    """Return the tensors of a file, without their values; ConversionError for an invalid header."""
    path, size = files.path(name), files.size(name)
    with files.open(name) as file:
        head = file.read(8)
        n_bytes = int.from_bytes(head, "little")
        if len(head) < 8 or n_bytes > min(MAX_HEADER_BYTES, size - 8):
            found = f"{size} bytes that begin with {head!r}" if size else "an empty file"
            raise ConversionError(path, "", found=found, expected="safetensors: the size of a header, and the header")
        header = _parsed(file.read(n_bytes), path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ConversionError(path, "__metadata__", found=f"{metadata!r:.80}", expected="strings by name")
    begin = 8 + n_bytes
    tensors = {key: _tensor(files, name, key, entry, begin) for key, entry in header.items()}
    _check_places(path, header, size - begin)
    return TensorFile(tensors, metadata)


def _parsed(data: bytes, path: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            raise ValueError("a name occurs twice")
        return dict(pairs)

    try:
        header = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
        if isinstance(header, dict):
            return header
        problem = "no object"
    except (ValueError, RecursionError) as error:
        problem = f"invalid JSON ({error!s:.100})"
    raise ConversionError(path, "its header", found=problem, expected="a JSON object")


def _tensor(files: SourceFiles, name: str, key: str, entry: Any, begin: int) -> SourceTensor:
    path, where = files.path(name), f"tensor {key!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ConversionError(path, where, found=f"{entry!r:.80}", expected="dtype, shape and data_offsets")
    dtype, shape, place = _DTYPES.get(str(entry["dtype"])), entry["shape"], entry["data_offsets"]
    if dtype is None:
        raise ConversionError(
            path, where, found=f"dtype {entry['dtype']!r:.40}", expected=f"one of {', '.join(_DTYPES)}"
        )
    if not are_counts(shape) or len(shape) > MAX_DIMS or not are_counts(place) or len(place) != 2:
        found = f"shape {shape!r:.80}, data_offsets {place!r:.80}"
        raise ConversionError(path, where, found=found, expected="numbers from 0 on")
    item = NUMPY_DTYPES[dtype]
    if math.prod(shape) * item.itemsize != place[1] - place[0]:
        found, expected = f"{place[1] - place[0]} bytes", f"{math.prod(shape) * item.itemsize}, of {dtype} {shape}"
        raise ConversionError(path, where, found=found, expected=expected)
    row_bytes = math.prod(shape[1:]) * item.itemsize

    def read(first: int, last: int) -> Array:
        return files.array(name, begin + place[0] + first * row_bytes, item, (last - first, *shape[1:]))

    return SourceTensor(key, dtype, tuple(shape), (path, key), read)


def _check_places(path: str, header: Mapping[str, Any], n_bytes: int) -> None:
    """Raise ConversionError if values of tensors overlap, leave gaps, or extend beyond the file."""
    at = 0
    for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if entry["data_offsets"][0] != at:
            found = f"values at byte {entry['data_offsets'][0]}"
            raise ConversionError(path, f"tensor {key!r}", found=found, expected=f"at {at}, after the previous tensor")
        at = entry["data_offsets"][1]
    if at != n_bytes:
        remedy = "the file is cut: copy it again" if at > n_bytes else ""
        raise ConversionError(path, "its size", found=f"{n_bytes} bytes of values", expected=f"{at}", remedy=remedy)


def are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**59 for item in value)


@dataclass(frozen=True)
class FileTensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[bytes]]


def header_of(tensors: Sequence[FileTensor], metadata: Mapping[str, str] | None = None) -> dict[str, object]:
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for tensor in tensors:
        begin, at = at, at + math.prod(tensor.shape) * NUMPY_DTYPES[tensor.dtype].itemsize
        place = {"shape": list(tensor.shape), "data_offsets": [begin, at]}
        header[tensor.name] = {"dtype": _CODES[tensor.dtype], **place}
    return header


def write_file(sink: Sink, header: Mapping[str, object], tensors: Sequence[FileTensor], progress: Progress) -> None:
    """Write a file; at least one space ends the header, as RecIS requires."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (8 - len(text) % 8)
    sink.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors:
        for piece in tensor.pieces():
            sink.write(piece)
            progress.advance(len(piece))


def dense_tensors(export: Export, url: str) -> Iterator[FileTensor]:
    """Yield the dense tensors; ConversionError for a dtype that the format does not support."""
    for tensor in export.dense():
        if tensor.dtype not in _CODES:
            found = f"tensor {tensor.name!r} of {tensor.dtype}"
            raise ConversionError(url, "", found=found, expected=f"one of {', '.join(_CODES)}")
        yield FileTensor(tensor.name, tensor.dtype, tensor.shape, lambda t=tensor: [t.read().tobytes()])  # type: ignore[misc]


def table_tensors(table: TableView, name_of: Callable[[str], str]) -> Iterator[FileTensor]:
    """Yield the columns of a table, ids first; each column is read in a separate pass over the rows."""
    yield FileTensor(name_of("id"), "int64", (table.n_rows,), lambda: (ids.tobytes() for ids in table.ids()))
    for slot in table.slots:
        pieces = partial(table.column, slot.name)
        shape = table.n_rows, *slot.shape
        yield FileTensor(name_of(slot.name), slot.dtype, shape, lambda p=pieces: (v.tobytes() for _, v in p()))  # type: ignore[misc]
