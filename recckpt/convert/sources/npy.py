"""numpy: ``id.npy`` beside ``embedding.npy`` and slots in a directory, the same in one ``.npz``, or one matrix."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

import numpy as np

from recckpt.convert.beside import beside
from recckpt.convert.exported import check_is_one_table
from recckpt.convert.source import Array, ImportOptions, LeftOut, SourceContents, SourceTensor
from recckpt.convert.source_files import SourceFiles
from recckpt.convert.tensor_source import TensorSource, TensorTable
from recckpt.errors import ConversionError
from recckpt.types import EMBEDDING

_SUFFIX, _PACKED = ".npy", ".npz"
_BROKEN = (ValueError, zipfile.BadZipFile, EOFError, OSError, NotImplementedError)


def recognises(files: SourceFiles) -> bool:
    """Say whether these are files of this format."""
    return bool(files.ending(_SUFFIX, _PACKED))


def open_source(files: SourceFiles, options: ImportOptions) -> TensorSource:
    """Open the files; ConversionError where one is cut, holds objects, or there are no vectors."""
    if files.is_file and files.names[0].endswith(_PACKED):
        arrays, left = _packed(files), list[LeftOut]()
    else:
        names = list(files.names) if files.is_file else files.ending(_SUFFIX)
        check_is_one_table(files, names)
        _check_directories(files, names)
        left = beside(files, names, "npy")
        arrays = {
            name.rpartition("/")[2].removesuffix(_SUFFIX): _array(files, name, partial(files.open, name))
            for name in names
        }
    ids = arrays.pop(options.ids, None)
    if ids is None and len(arrays) == 1:
        arrays = {options.embedding: next(iter(arrays.values()))}  # one matrix, with the ids 0 to n - 1
    if options.embedding not in arrays:
        expected = f"{options.ids!r} and {options.embedding!r}, or one matrix alone"
        raise ConversionError(files.url, "", found=f"arrays {sorted(arrays)}", expected=expected)
    vectors = arrays.pop(options.embedding)
    if len(vectors.shape) < 2 and ids is None:
        found = f"an array of shape {vectors.shape}"
        raise ConversionError(files.url, "", found=found, expected="a matrix, or ids beside it")
    table = TensorTable(options.table or files.stem, ids, {EMBEDDING: vectors, **arrays})
    return TensorSource(SourceContents("npy", left_out=tuple(left)), [table], files.url)


def _check_directories(files: SourceFiles, names: list[str]) -> None:
    """Refuse arrays in several directories, of which each may be a table."""
    directories = sorted({name.rpartition("/")[0] or "." for name in names})
    if len(directories) > 1:
        found, remedy = f"arrays in {', '.join(directories[:5])}", "name the directory of one table"
        raise ConversionError(files.url, "", found=found, expected="the arrays of one table", remedy=remedy)


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


@dataclass
class _Stream:
    """An array in a file that is read from front to back, as members of a zip are."""

    open: Callable[[], BinaryIO]
    begin: int  # of the values
    item: np.dtype[np.generic]
    shape: tuple[int, ...]
    path: str
    _file: BinaryIO | None = None
    _at: int = -1

    def read(self, first: int, last: int) -> Array:
        row_bytes = math.prod(self.shape[1:]) * self.item.itemsize
        if self._file is None or self._at != first:
            self._file = self.open()
            self._file.seek(self.begin + first * row_bytes)
        n_bytes = (last - first) * row_bytes
        try:
            data = self._file.read(n_bytes)
        except _BROKEN as error:
            raise ConversionError(self.path, "", found=f"damage ({error!s:.100})", expected="values") from error
        if len(data) < n_bytes:
            found = f"the end of the file at row {first + len(data) // max(1, row_bytes)}"
            raise ConversionError(self.path, "", found=found, expected=f"{self.shape[0]} rows")
        self._at = last
        values = np.frombuffer(data, self.item).reshape(last - first, *self.shape[1:])
        return values.astype(self.item.newbyteorder("<"), copy=False)


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
        order = " in Fortran order" if is_fortran else ""
        expected = "numbers in C order, one row an id"
        raise ConversionError(path, "", found=f"{kind}{order}", expected=expected, remedy="save a plain array")
    stream = _Stream(opened, begin, item, shape, path)
    return SourceTensor(name.rpartition("/")[2].removesuffix(_SUFFIX), item.name, shape, (path,), stream.read)
