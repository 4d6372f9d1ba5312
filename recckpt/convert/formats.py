"""The formats: those that are read, found by name or by looking at the files, and those that are written."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from recckpt.convert.exported import exported_tables, open_tables
from recckpt.convert.named import named
from recckpt.convert.restored import restored
from recckpt.convert.source import ImportOptions, ImportSource
from recckpt.convert.source_files import SourceFiles
from recckpt.errors import ConversionError
from recckpt.text import nearest

# In the order in which they look at the files.
SOURCES = ("recis", "dynamicemb", "torchrec", "dcp", "safetensors", "torch_state", "parquet", "arrow", "csv", "npy")

_OF_ROWS = frozenset({"parquet", "arrow", "csv", "npy"})

TARGETS = ("parquet", "npy", "csv", "embedding", "safetensors", "dcp", "dynamicemb", "recis")


def target_module(name: str) -> ModuleType:
    """Return the module that writes a format; ValueError where there is none."""
    if name not in TARGETS:
        raise ValueError(f"to: found {name!r}, expected one of {', '.join(TARGETS)}{nearest(name, TARGETS)}")
    return import_module(f"recckpt.convert.targets.{name}")


def open_source(files: SourceFiles, format: str | None, options: ImportOptions) -> ImportSource:
    """Open a source; errors as of :func:`recckpt.convert.import_checkpoint`."""
    if format is not None and format not in SOURCES:
        raise ValueError(f"format: found {format!r}, expected one of {', '.join(SOURCES)}{nearest(format, SOURCES)}")
    for name in SOURCES if format is None else (format,):
        module = _module(name)
        if format is not None or module.recognises(files):
            _check_options(files, name, options)
            tables = exported_tables(files, name)
            opened = (
                open_tables(files, tables, options, module.open_source)
                if tables
                else module.open_source(files, options)
            )
            return named(restored(opened), options.names, files.url)
    found = f"files of no format that is known: {', '.join(files.names[:5])}"
    raise ConversionError(files.url, "", found=found, expected=f"one of {', '.join(SOURCES)}", remedy="name the format")


def _check_options(files: SourceFiles, name: str, options: ImportOptions) -> None:
    """Refuse options for tensors where there are files of rows, and the other way round."""
    plain = ImportOptions()
    of_rows = {"column of ids": options.ids != plain.ids, "column of vectors": options.embedding != plain.embedding}
    of_rows["columns that become slots"] = options.slots is not None
    of_tensors = {"tensors that are to be tables": bool(options.as_table)}
    options_given = of_tensors if name in _OF_ROWS else of_rows
    if name in ("csv", "npy"):  # of which all columns are one vector, or each array is a file that may be left out
        options_given = {**options_given, "columns that become slots": options.slots is not None}
    if name != "torch_state":
        has_live = options.model is not None or bool(options.optimizers)
        options_given = {**options_given, "a model or optimizers, which name parameters": has_live}
    odd = [what for what, is_said in options_given.items() if is_said]
    if odd:
        remedy = "leave it out"
        raise ConversionError(
            files.url, "", found=f"an option for {odd[0]}", expected=f"none, of {name}", remedy=remedy
        )


def _module(name: str) -> ModuleType:
    return import_module(f"recckpt.convert.sources.{name}")
