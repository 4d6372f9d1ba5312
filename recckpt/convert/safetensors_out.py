"""Files of safetensors written tensor by tensor, whose values are read when their turn comes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from recckpt.convert.safetensors_file import DTYPES as CODES
from recckpt.convert.view import Export, TableView
from recckpt.dense.tensors import StoredTensor
from recckpt.errors import ConversionError
from recckpt.format.dtypes import NUMPY_DTYPES
from recckpt.storage import Sink
from recckpt.text import Progress

NAMES = {name: code for code, name in CODES.items() if code != "bool"}


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file, and its bytes piece by piece."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[bytes]]

    @property
    def n_bytes(self) -> int:
        """Bytes of all values."""
        return math.prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize


def header_of(tensors: Sequence[FileTensor], metadata: Mapping[str, str] | None = None) -> dict[str, object]:
    """Return the header of a file with tensors in this order."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for tensor in tensors:
        place = [at, at + tensor.n_bytes]
        header[tensor.name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        at += tensor.n_bytes
    return header


def write_file(sink: Sink, header: Mapping[str, object], tensors: Sequence[FileTensor], progress: Progress) -> None:
    """Write a file; one space at least ends the header, as RecIS has it."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (8 - len(text) % 8)
    sink.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors:
        for piece in tensor.pieces():
            sink.write(piece)
            progress.advance(len(piece))


def dense_tensors(export: Export, url: str) -> Iterator[FileTensor]:
    """Yield the dense tensors; ConversionError for a dtype that the format lacks."""
    for name, tensor in export.tensors.model.items():
        if tensor.dtype not in NAMES:
            found = f"tensor {name!r} of {tensor.dtype}"
            raise ConversionError(url, "", found=found, expected=f"one of {', '.join(NAMES)}")
        yield FileTensor(name, tensor.dtype, tensor.shape, partial(_whole, export, tensor))


def _whole(export: Export, tensor: StoredTensor) -> Iterator[bytes]:
    yield export.tensors.read(tensor).tobytes()


def table_tensors(table: TableView, name_of: Callable[[str], str]) -> Iterator[FileTensor]:
    """Yield the columns of a table, ids first, each of which is a pass over the rows."""
    bare = table.without_slots()
    yield FileTensor(name_of("id"), "int64", (table.n_rows,), lambda: (rows.ids.tobytes() for rows in bare.rows()))
    for slot in table.slots:
        one = table.only(slot.name)
        at = [each.name for each in one.slots].index(slot.name)
        yield FileTensor(name_of(slot.name), slot.dtype, (table.n_rows, *slot.shape), partial(_column, one, at))


def _column(table: TableView, at: int) -> Iterator[bytes]:
    return (rows.columns[at].tobytes() for rows in table.rows())
