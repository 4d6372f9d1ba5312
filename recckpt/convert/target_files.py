"""Writes the files of an export, all or none, and reads an export's metadata for an import."""

from __future__ import annotations

import errno
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

from recckpt.convert.source import Array, ImportOptions, ImportSource, LeftOut
from recckpt.convert.source_files import SourceFiles
from recckpt.errors import ConversionError
from recckpt.format import layout
from recckpt.storage import ABSENT, Sink, open_parent
from recckpt.storage.transfers import WorkDir

# Parts of the formats of exports:
RECORDS = {  # the files that describe an export
    "parquet": "_recckpt.json",
    "npy": "metadata.json",
    "embedding": "metadata.json",
    "dcp": "recckpt.json",
}
DELETES = ".deletes"  # suffix of a table's name: directory of the ids that an increment deletes
FORMAT = "recckpt-export"  # name of the metadata format
_READ_AGAIN = ("parquet", "npy")
_MAX_BYTES = 1 << 26
_EXISTS = "exists, expected a new name: remove it, or write to another name"


class TargetFiles:
    """Writes the files of a target, a directory or one file; an error in the block removes all of them."""

    def __init__(self, url: str) -> None:
        self.url, self._made = url, dict[str, Sink]()
        self._storage, self._name = open_parent(url)

    def __enter__(self) -> TargetFiles:
        try:
            self._storage.size(self._name)
            there = True
        except ABSENT:
            there = bool(self._storage.list_files(self._name))
        except OSError:
            there = True
        if there:
            raise FileExistsError(errno.EEXIST, _EXISTS, self.url)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            for name in self._made:
                with suppress(OSError):
                    self._storage.remove(name)
            with suppress(OSError):
                self._storage.remove_empty_dirs(self._name)

    @property
    def n_bytes(self) -> int:
        return sum(sink.n_bytes for sink in self._made.values())

    def create(self, *names: str) -> Sink:
        """Open a new file below the target, or the target itself.

        ConversionError if this target has made the file already, which an object store would silently replace.
        """
        path = layout.join(self._name, *names)
        if path in self._made:
            found, expected = f"{'/'.join(names)} already, for another table or slot", "a file for each"
            raise ConversionError(self.url, "", found=found, expected=expected, remedy="export the tables separately")
        if not self._made:
            try:
                self._storage.check_there()
            except ABSENT:
                self._storage.prepare()
        self._made[path] = self._storage.create(path)
        return self._made[path]

    def put_json(self, value: Mapping[str, Any], *names: str) -> None:
        self.put(json.dumps(value, indent=2).encode() + b"\n", *names)

    def put(self, data: bytes, *names: str) -> None:
        with self.create(*names) as sink:
            sink.write(data)


def scratch(stack: ExitStack, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return an array of zeros, mapped from a temporary file that is deleted when the stack closes."""
    file = stack.enter_context(WorkDir(tempfile.gettempdir()).new_file(int(np.prod(shape)) * dtype.itemsize))
    return np.memmap(file, dtype, "r+", shape=shape) if shape[0] else np.empty(shape, dtype)


def file_name(table: str) -> str:
    """Return a table's name in an encoding that any file system accepts; ConversionError if it is too long."""
    name = layout.encode_name(table)
    if len(name) > layout.MAX_ID_BYTES:
        found, expected = f"a name of {len(name)} bytes once encoded", f"at most {layout.MAX_ID_BYTES} in a file name"
        remedy = "omit the table, or choose a format of one file, such as safetensors"
        raise ConversionError(f"table {name[:40]}...", "", found=found, expected=expected, remedy=remedy)
    return name


def exported_tables(files: SourceFiles, format: str) -> list[str]:
    """Return the tables of an export in this format; [] for other programs' files; ConversionError for an increment."""
    name = RECORDS[format] if format in _READ_AGAIN else ""
    if files.is_file or name not in files.names:
        return []
    try:
        record = json.loads(files.read(name, _MAX_BYTES))
    except (ValueError, RecursionError):
        return []  # another program wrote the file
    if not isinstance(record, dict) or record.get("format") != FORMAT or not isinstance(record.get("tables"), dict):
        return []
    check_is_whole(record, files.path(name))
    directories = {each.partition("/")[0] for each in files.names if "/" in each}
    return list(record["tables"]) if {file_name(table) for table in record["tables"]} & directories else []


def check_is_whole(record: Mapping[str, Any], path: str) -> None:
    """Raise ConversionError if the export is an increment."""
    if "since" in record:
        found = f"the rows that have changed since {record['since']!r}"
        raise ConversionError(path, "", found=found, expected="whole tables", remedy="export without --since")


def check_is_one_table(files: SourceFiles, names: Sequence[str]) -> None:
    """Raise ConversionError if the files contain the deleted ids of an increment."""
    for name in names:
        above = f"{files.url.rstrip('/')}/{name}" if not files.is_file else files.url
        if any(part.endswith(DELETES) for part in above.split("/")[:-1]):
            found = "the ids that an increment deletes"
            raise ConversionError(files.path(name), "", found=found, expected="rows", remedy="export without --since")


def open_tables(
    files: SourceFiles,
    tables: Sequence[str],
    options: ImportOptions,
    opened: Callable[[SourceFiles, ImportOptions], ImportSource],
) -> ImportSource:
    """Open the directory of each table; ConversionError if one is missing, or if options apply to only one table."""
    left = [
        LeftOut(f"table {each}", "not asked for")
        for each in tables
        if options.table in tables and each != options.table
    ]
    tables = [options.table] if options.table in tables else tables
    if options.table and len(tables) > 1:
        expected = f"the name of one: {', '.join(tables)}"
        remedy = "name the directory of one table, or omit the name"
        raise ConversionError(files.url, "", found=f"{len(tables)} tables", expected=expected, remedy=remedy)
    sources = {}
    for table in tables:
        name = options.table or table
        sources[name] = opened(files.below(file_name(table)), replace(options, table=name))
    each = [source.contents for source in sources.values()]
    for name, source in sources.items():
        left += [LeftOut(f"table {name}, {one.name}", one.reason) for one in source.contents.left_out]
    of_all = tuple(table for contents in each for table in contents.tables)
    contents = replace(each[0], tables=of_all, left_out=tuple(left))
    return ImportSource(contents, lambda table: sources[table.name].rows(table))
