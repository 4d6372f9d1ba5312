"""The formats that recckpt reads and writes; to read, the caller names the format or its files show it.

A format is a module: ``recognises(files)`` and ``open_source(files, options)`` read it, ``write(export, files,
progress)`` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from types import ModuleType

import numpy as np

from recckpt.convert.source import ImportOptions, ImportSource, LeftOut, SourceRows, SourceTable, no_such_table
from recckpt.convert.source_files import SourceFiles
from recckpt.convert.target_files import exported_tables, open_tables
from recckpt.convert.view import SCALE
from recckpt.errors import ConversionError, MissingLibraryError
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.text import nearest
from recckpt.text.foreign_words import write_instead
from recckpt.types import EMBEDDING, SlotSpec

# The order in which the formats are tried.
SOURCES = ("recis", "dynamicemb", "torchrec", "dcp", "safetensors", "torch_state", "parquet", "arrow", "npy")
TARGETS = ("parquet", "npy", "embedding", "safetensors", "dcp", "dynamicemb", "recis")
HOLD_TENSORS = frozenset({"safetensors", "dcp", "recis"})  # targets that store dense tensors
_OF_ROWS, _OF_TABLES = frozenset({"parquet", "arrow", "npy"}), frozenset({"recis", "dynamicemb", "torchrec"})
_SCALE = SlotSpec(EMBEDDING + SCALE, "float32", ())


def format_module(argument: str, name: str, names: tuple[str, ...]) -> ModuleType:
    """Return the module of a format; ValueError if ``name`` is not in ``names``."""
    if name not in names:
        hint = write_instead(name, in_shell=True) or nearest(name, names)
        raise ValueError(f"{argument}: found {name!r}, expected one of {', '.join(names)}{hint}")
    return import_module(f"recckpt.convert.{name}")


def open_source(files: SourceFiles, format: str | None, options: ImportOptions) -> ImportSource:
    for name in SOURCES if format is None else (format,):
        module = format_module("format", name, SOURCES)
        if format is not None or module.recognises(files):
            _check_options(files, name, options)
            tables = exported_tables(files, name)
            try:
                if tables:
                    opened = open_tables(files, tables, options, module.open_source)
                else:
                    opened = module.open_source(files, options)
            except ModuleNotFoundError as error:
                if error.name != "torch":
                    raise
                what = f"{files.url}: reading {name} needs torch, which is not installed"
                raise MissingLibraryError(f"{what}: pip install torch") from error
            return _named(_in_floats(opened), options.names, files.url)
    found = f"files of an unknown format: {', '.join(files.names[:5])}"
    remedy = write_instead("csv").removeprefix(": ") if files.ending(".csv", ".csv.gz") else "name the format"
    raise ConversionError(files.url, "", found=found, expected=f"one of {', '.join(SOURCES)}", remedy=remedy)


def _check_options(files: SourceFiles, name: str, options: ImportOptions) -> None:
    """Raise an error for options of tensors if the source is files of rows, and vice versa."""
    plain, asked = ImportOptions(), dict[str, bool]()
    if name in _OF_ROWS | _OF_TABLES:
        asked["tensors to import as tables"] = bool(options.as_table)
    if name not in _OF_ROWS:
        asked["column of ids"] = options.ids != plain.ids
        asked["column of vectors"] = options.embedding != plain.embedding
    if name not in _OF_ROWS or name == "npy":  # in npy each array is a file that can be left out
        asked["columns that become slots"] = options.slots is not None
    if name != "torch_state":
        asked["a model or optimizers, which name parameters"] = options.model is not None or bool(options.optimizers)
    if odd := [what for what, is_said in asked.items() if is_said]:
        found, expected = f"an option for {odd[0]}", f"none for {name}"
        raise ConversionError(files.url, "", found=found, expected=expected, remedy="leave it out")


def _named(source: ImportSource, names: Mapping[str, str], path: str) -> ImportSource:
    """Return a source with renamed tables, also in the sparse optimizer's state; ConversionError for unknown names."""
    contents = source.contents
    there = [table.name for table in contents.tables]
    for name in names:
        if name not in there:
            raise no_such_table(path, name, there, " to rename")
    if not names:
        return source
    tables = tuple(replace(table, name=names.get(table.name, table.name)) for table in contents.tables)
    theirs = dict(zip((table.name for table in tables), contents.tables, strict=True))
    extra = dict(contents.extra)
    if SPARSE_OPTIM in extra:
        scalars = extra[SPARSE_OPTIM]
        state = {names.get(name, name): value for name, value in scalars["state"].items()}
        groups = [{**g, "tables": [names.get(name, name) for name in g["tables"]]} for g in scalars["param_groups"]]
        extra[SPARSE_OPTIM] = {**scalars, "state": state, "param_groups": groups}
    return ImportSource(replace(contents, tables=tables, extra=extra), lambda table: source.rows(theirs[table.name]))


def _in_floats(source: ImportSource) -> ImportSource:
    """Return a source whose vectors are floats, also if an export wrote them as int8 with one scale per row."""
    contents, narrow = source.contents, dict[str, SourceTable]()
    for table in contents.tables:
        kinds = {slot.name: slot for slot in table.slots}
        if EMBEDDING in kinds and kinds[EMBEDDING].dtype == "int8" and kinds.get(_SCALE.name) == _SCALE:
            narrow[table.name] = table

    def widened(table: SourceTable) -> SourceTable:
        kept = (slot for slot in table.slots if slot != _SCALE)
        slots = (SlotSpec(EMBEDDING, "float32", slot.shape) if slot.name == EMBEDDING else slot for slot in kept)
        return replace(table, slots=tuple(slots))

    def rows(table: SourceTable) -> Iterator[SourceRows]:
        if table.name not in narrow:
            yield from source.rows(table)
            return
        stored = narrow[table.name]
        for rows in source.rows(stored):
            columns = dict(zip((slot.name for slot in stored.slots), rows.columns, strict=True))
            vectors, scales = columns[EMBEDDING], columns.pop(_SCALE.name)
            columns[EMBEDDING] = vectors * scales.astype(np.float32).reshape(-1, *(1,) * (vectors.ndim - 1))
            yield SourceRows(rows.ids, [columns[slot.name] for slot in table.slots])

    tables = tuple(widened(table) if table.name in narrow else table for table in contents.tables)
    left = [LeftOut(f"table {name}", f"int8 times {_SCALE.name} is float32 here") for name in narrow]
    return ImportSource(replace(contents, tables=tables, left_out=(*contents.left_out, *left)), rows)
