"""safetensors: one file with the dense tensors, and of each table ``<table>.id`` and ``<table>.<slot>``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from recckpt.convert.safetensors_file import DTYPES as CODES
from recckpt.convert.source import LeftOut
from recckpt.convert.sources.safetensors import METADATA
from recckpt.convert.target_files import TargetFiles
from recckpt.convert.view import Export, TableView
from recckpt.dense.tensors import StoredTensor
from recckpt.errors import ConversionError
from recckpt.format.dtypes import NUMPY_DTYPES
from recckpt.text import Progress

ALL_SLOTS, INCREMENTS, DTYPES = False, False, ("float16", "bfloat16", "int8")
_NAMES = {name: code for code, name in CODES.items() if code != "bool"}


@dataclass(frozen=True)
class _Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[bytes]]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize


def write(export: Export, files: TargetFiles, progress: Progress) -> list[LeftOut]:
    """Write one file, whose header says what the tables are."""
    tensors = [*_dense(export, files.url), *(tensor for table in export.tables for tensor in _of_table(table))]
    # As the library has them, so that values are aligned.
    tensors.sort(key=lambda tensor: (-NUMPY_DTYPES[tensor.dtype].itemsize, tensor.name))
    names = [tensor.name for tensor in tensors]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConversionError(files.url, repr(twice), found="a dense tensor and a column", expected="different names")
    header, at = dict[str, object](), 0
    said = export.metadata()
    slots = {table.name: [slot.name for slot in table.slots] for table in export.tables}
    header["__metadata__"] = {"format": "pt", METADATA: json.dumps({"tables": slots, "export": said})}
    for tensor in tensors:
        place = [at, at + tensor.n_bytes]
        header[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        at += tensor.n_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with files.create() as sink:
        sink.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for piece in tensor.pieces():
                sink.write(piece)
                progress.advance(len(piece))
    progress.n_rows += sum(table.n_rows for table in export.tables)
    return []


def _dense(export: Export, url: str) -> Iterator[_Tensor]:
    for name, tensor in export.tensors.model.items():
        if tensor.dtype not in _NAMES:
            found = f"tensor {name!r} of {tensor.dtype}"
            raise ConversionError(url, "", found=found, expected=f"one of {', '.join(_NAMES)}")
        yield _Tensor(name, tensor.dtype, tensor.shape, partial(_whole, export, tensor))


def _whole(export: Export, tensor: StoredTensor) -> Iterator[bytes]:
    yield export.tensors.read(tensor).tobytes()


def _of_table(table: TableView) -> Iterator[_Tensor]:
    """Yield the columns, each of which is a pass over the rows."""
    bare = table.without_slots()
    yield _Tensor(f"{table.name}.id", "int64", (table.n_rows,), lambda: (rows.ids.tobytes() for rows in bare.rows()))
    for slot in table.slots:
        one = table.only(slot.name)
        at = [each.name for each in one.slots].index(slot.name)

        def pieces(one: TableView = one, at: int = at) -> Iterator[bytes]:
            return (rows.columns[at].tobytes() for rows in one.rows())

        yield _Tensor(f"{table.name}.{slot.name}", slot.dtype, (table.n_rows, *slot.shape), pieces)
