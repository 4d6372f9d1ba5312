"""A source of named tensors: dense state, and tensors that become tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from recckpt.convert.source import (
    ID_REMEDY,
    Array,
    ImportOptions,
    ImportSource,
    SourceContents,
    SourceRows,
    SourceTable,
    SourceTensor,
    int64_ids,
)
from recckpt.errors import ConversionError
from recckpt.format.tensor_index import NUMPY_DTYPES
from recckpt.text import nearest
from recckpt.types import EMBEDDING, ITEM_BYTES, SlotSpec


@dataclass(frozen=True)
class TensorTable:
    """A table made of tensors: one for each slot, and one for the ids, or None for the ids 0 to n - 1."""

    name: str
    ids: SourceTensor | None
    slots: Mapping[str, SourceTensor]


@dataclass(frozen=True)
class SourceBox:
    """A tile of a tensor; ``read(begin, end)`` returns its rows; for a scalar, ``read(0, 1)`` returns the value."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[int, int], Array]

    def meets(self, other: SourceBox) -> bool:
        sides = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(at < there + length and there < at + size for at, size, there, length in sides)


def tensor_source(
    contents: SourceContents, tensors: Mapping[str, SourceTensor], tables: Sequence[TensorTable], path: str
) -> ImportSource:
    """Return a source whose dense tensors are all tensors that are not part of a table.

    ``contents`` has everything except tensors and rows. ConversionError if the tensors of a table do not fit
    together.
    """
    by_name = {table.name: table for table in tables}
    used = {tensor.name for table in tables for tensor in (*filter(None, [table.ids]), *table.slots.values())}
    dense = tuple(tensor for name, tensor in tensors.items() if name not in used)

    def rows(table: SourceTable) -> Iterator[SourceRows]:
        ids, slots = by_name[table.name].ids, by_name[table.name].slots
        for begin, end in table.steps(table.n_rows):
            if ids is None:
                own = np.arange(begin, end, dtype=np.int64)
            else:
                own = int64_ids(ids.read(begin, end), path, f"tensor {ids.name!r}")
            yield SourceRows(own, [slots[slot.name].read(begin, end) for slot in table.slots])

    return ImportSource(replace(contents, tables=tuple(_listed(each, path) for each in tables), dense=dense), rows)


def _listed(table: TensorTable, path: str) -> SourceTable:
    of_ids = [table.ids] if table.ids else []
    n_rows = {tensor.name: tensor.shape[:1] for tensor in (*of_ids, *table.slots.values())}
    if len(set(n_rows.values())) > 1 or () in n_rows.values():
        found = ", ".join(f"{name!r} of {shape}" for name, shape in n_rows.items())
        raise ConversionError(path, f"table {table.name!r}", found=found, expected="one row per id in each")
    for tensor in of_ids:
        where = f"tensor {tensor.name!r}"
        if not tensor.dtype.startswith(("int", "uint")):
            found, expected = f"ids of {tensor.dtype}", "integers of int64"
            raise ConversionError(path, where, found=found, expected=expected, remedy=ID_REMEDY)
        if len(tensor.shape) != 1:
            raise ConversionError(path, where, found=f"ids of shape {tensor.shape}", expected="one dimension")
    slots = tuple(slot_of(name, tensor, path) for name, tensor in table.slots.items())
    return SourceTable(table.name, next(iter(n_rows.values()))[0], slots)


def slot_of(name: str, tensor: SourceTensor, path: str) -> SlotSpec:
    """Return a slot for a tensor; ConversionError for a dtype or shape that slots do not support."""
    if tensor.dtype not in ITEM_BYTES or 0 in tensor.shape[1:]:
        found, expected = f"{tensor.dtype} {tensor.shape}", f"values of {', '.join(ITEM_BYTES)}, at least one per row"
        raise ConversionError(path, f"tensor {tensor.name!r}", found=found, expected=expected, remedy="cast it first")
    if ITEM_BYTES[tensor.dtype] * math.prod(tensor.shape[1:]) >= 2**31:
        raise ConversionError(path, f"tensor {tensor.name!r}", found=f"{tensor.shape}", expected="rows below 2 GiB")
    return SlotSpec(name, tensor.dtype, tensor.shape[1:])


def one_a_row(tensor: SourceTensor) -> SourceTensor:
    return replace(tensor, shape=tensor.shape[:1], read=lambda begin, end: tensor.read(begin, end).reshape(-1))


def wished_tables(tensors: Mapping[str, SourceTensor], options: ImportOptions, path: str) -> list[TensorTable]:
    """Return the tables of ``as_table``; ConversionError if a tensor is missing or has less than two dimensions."""
    tables = []
    for name, ids in options.as_table.items():
        for pattern in filter(None, (name, ids)):
            if pattern not in tensors:
                close = nearest(pattern, tensors).strip("; ")
                raise ConversionError(path, "", found=f"no tensor {pattern!r}", expected="one of its own", remedy=close)
        if len(tensors[name].shape) < 2:
            found_shape = f"{name!r} of {tensors[name].shape}"
            raise ConversionError(path, "", found=found_shape, expected="a tensor of two dimensions or more")
        tables.append(TensorTable(name, tensors[ids] if ids else None, {EMBEDDING: tensors[name]}))
    return tables


def put_together(name: str, dtype: str, shape: tuple[int, ...], pieces: Sequence[SourceBox], url: str) -> SourceTensor:
    """Return a tensor whose values are read from pieces in several files.

    ConversionError if a piece extends beyond the tensor, or if a value is missing or repeated.
    """
    pieces = sorted(pieces, key=lambda piece: piece.offsets)
    for piece in pieces:
        sides = zip(piece.offsets, piece.sizes, shape, strict=False)
        if len(piece.sizes) != len(shape) or any(at + size > whole for at, size, whole in sides):
            found = f"a piece of {piece.sizes} at {piece.offsets}"
            raise ConversionError(url, repr(name), found=found, expected=f"one inside {shape}")
    filled = [piece for piece in pieces if math.prod(piece.sizes)]
    n_values = sum(math.prod(piece.sizes) for piece in filled)
    if n_values != math.prod(shape) or _overlap(filled):
        found = f"pieces of {n_values} values{', some of which occur twice' if _overlap(filled) else ''}"
        raise ConversionError(url, repr(name), found=found, expected=f"{math.prod(shape)}, each once")

    def read(begin: int, end: int) -> Array:
        if not shape:
            return pieces[0].read(0, 1)
        values = np.empty((end - begin, *shape[1:]), NUMPY_DTYPES[dtype])
        for piece in pieces:
            top = piece.offsets[0]
            first, last = max(begin, top), min(end, top + piece.sizes[0])
            if first < last:
                rest = tuple(slice(o, o + s) for o, s in zip(piece.offsets[1:], piece.sizes[1:], strict=True))
                place = (slice(first - begin, last - begin), *rest)
                values[place] = piece.read(first - top, last - top)
        return values

    return SourceTensor(name, dtype, shape, (url, name), read)


def _overlap(pieces: Sequence[SourceBox]) -> bool:
    """Return whether two of the pieces, sorted by offsets, overlap."""
    running: list[SourceBox] = []  # earlier pieces that reach into the piece in the first dimension
    for piece in pieces:
        if not piece.offsets:
            return len(pieces) > 1
        running = [each for each in running if each.offsets[0] + each.sizes[0] > piece.offsets[0]]
        if any(map(piece.meets, running)):
            return True
        running.append(piece)
    return False
