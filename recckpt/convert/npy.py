"""Reads and writes numpy directories with ``id.npy`` and one matrix per slot; also reads one ``.npz`` or matrix."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import BinaryIO

import numpy as np

from recckpt.convert.source import Array, ImportOptions, ImportSource, LeftOut, SourceContents, SourceTensor
from recckpt.convert.source_files import SourceFiles
from recckpt.convert.target_files import DELETES, TargetFiles, check_is_one_table, file_name
from recckpt.convert.tensor_source import TensorTable, tensor_source
from recckpt.convert.view import Export, in_float32, numbers
from recckpt.errors import ConversionError
from recckpt.sparse.files.arrow_format import ID_SPEC
from recckpt.storage import Sink, SinkFile
from recckpt.text import Progress
from recckpt.types import EMBEDDING, SlotSpec

ALL_SLOTS, INCREMENTS, DTYPES = False, True, ("float16", "int8")  # numpy has no bfloat16
_SUFFIX, _PACKED = ".npy", ".npz"
_BROKEN = (ValueError, zipfile.BadZipFile, EOFError, OSError, NotImplementedError)


def recognises(files: SourceFiles) -> bool:
    return bool(files.ending(_SUFFIX, _PACKED))


def open_source(files: SourceFiles, options: ImportOptions) -> ImportSource:
    left: list[LeftOut] = []
    if files.is_file and files.names[0].endswith(_PACKED):
        arrays = _packed(files)
    else:
        names = list(files.names) if files.is_file else files.ending(_SUFFIX)
        check_is_one_table(files, names)
        directories = sorted({name.rpartition("/")[0] or "." for name in names})
        if len(directories) > 1:  # each may be a table
            found, remedy = f"arrays in {', '.join(directories[:5])}", "name the directory of one table"
            raise ConversionError(files.url, "", found=found, expected="the arrays of one table", remedy=remedy)
        left = files.beside(names, "npy")
        tensors = [_array(files, name, partial(files.open, name)) for name in names]
        arrays = {tensor.name: tensor for tensor in tensors}
    ids = arrays.pop(options.ids, None)
    if ids is None and len(arrays) == 1:
        arrays = {options.embedding: next(iter(arrays.values()))}  # a lone matrix has the ids 0 to n - 1
    if options.embedding not in arrays:
        expected = f"{options.ids!r} and {options.embedding!r}, or one matrix alone"
        raise ConversionError(files.url, "", found=f"arrays {sorted(arrays)}", expected=expected)
    vectors = arrays.pop(options.embedding)
    if len(vectors.shape) < 2 and ids is None:
        found = f"an array of shape {vectors.shape}"
        raise ConversionError(files.url, "", found=found, expected="a matrix, or ids beside it")
    table = TensorTable(options.table or files.stem, ids, {EMBEDDING: vectors, **arrays})
    return tensor_source(SourceContents("npy", left_out=tuple(left)), {}, [table], files.url)


def _packed(files: SourceFiles) -> dict[str, SourceTensor]:
    name = files.names[0]
    try:
        with files.open(name) as file, zipfile.ZipFile(file) as archive:
            members = archive.namelist()
    except _BROKEN as error:
        raise ConversionError(files.path(name), "", found=f"no zip ({error!s:.100})", expected="an .npz") from error

    def opened(member: str) -> BinaryIO:
        return zipfile.ZipFile(files.open(name)).open(member)  # type: ignore[return-value]

    return {m.removesuffix(_SUFFIX): _array(files, f"{name}:{m}", partial(opened, m)) for m in members}


def _array(files: SourceFiles, name: str, opened: Callable[[], BinaryIO]) -> SourceTensor:
    path = f"{files.url}/{name}" if ":" in name else files.path(name)
    try:
        with opened() as file:
            version = np.lib.format.read_magic(file)
            reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, is_fortran, item = reader(file)
            begin = file.tell()
    except _BROKEN as error:
        raise ConversionError(path, "", found=f"no .npy ({error!s:.100})", expected="an array of numbers") from error
    if item.hasobject or item.names or (is_fortran and len(shape) > 1) or not shape:
        kind = "objects, which need code to read" if item.hasobject else f"{item} of shape {shape}"
        found, expected = f"{kind}{' in Fortran order' if is_fortran else ''}", "numbers in C order, one row per id"
        raise ConversionError(path, "", found=found, expected=expected, remedy="save a plain array")
    row_bytes = math.prod(shape[1:]) * item.itemsize
    stream: tuple[BinaryIO, int] | None = None  # open member of a zip, which is read from front to back; its row

    def read(first: int, last: int) -> Array:
        nonlocal stream
        if stream is None or stream[1] != first:
            stream = opened(), last
            stream[0].seek(begin + first * row_bytes)
        n_bytes = (last - first) * row_bytes
        try:
            data = stream[0].read(n_bytes)
        except _BROKEN as error:
            raise ConversionError(path, "", found=f"damage ({error!s:.100})", expected="values") from error
        if len(data) < n_bytes:
            found = f"the end of the file at row {first + len(data) // max(1, row_bytes)}"
            raise ConversionError(path, "", found=found, expected=f"{shape[0]} rows")
        stream = stream[0], last
        values = np.frombuffer(data, item).reshape(last - first, *shape[1:])
        return values.astype(item.newbyteorder("<"), copy=False)

    return SourceTensor(name.rpartition("/")[2].removesuffix(_SUFFIX), item.name, shape, (path,), read)


def write(export: Export, files: TargetFiles, progress: Progress) -> list[LeftOut]:
    for table in export.tables:
        specs = (ID_SPEC, *table.slots)
        with ExitStack() as stack:
            directory, sinks = file_name(table.name), list[Sink]()
            for spec in specs:
                sinks.append(stack.enter_context(files.create(directory, f"{file_name(spec.name)}.npy")))
            for spec, sink in zip(specs, sinks, strict=True):
                write_header(sink, spec, table.n_rows)
            for rows in table.rows(progress):
                for spec, column, sink in zip(specs, (rows.ids, *rows.columns), sinks, strict=True):
                    sink.write(numbers(column, spec).tobytes())
        if table.deletes is not None:
            with files.create(file_name(table.name + DELETES), "id.npy") as sink:
                write_header(sink, ID_SPEC, sum(map(len, table.deletes())))
                for ids in table.deletes():
                    sink.write(ids.data)
    return export.no_dense("a directory of numpy has only rows; use safetensors")


def write_header(sink: Sink, slot: SlotSpec, n_rows: int) -> None:
    """Write the head of an ``.npy`` file; bfloat16 is declared as float32."""
    descr = np.lib.format.dtype_to_descr(np.dtype(in_float32(slot).dtype))
    header = {"descr": descr, "fortran_order": False, "shape": (n_rows, *slot.shape)}
    np.lib.format.write_array_header_1_0(SinkFile(sink), header)
