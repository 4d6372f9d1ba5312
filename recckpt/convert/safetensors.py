"""Reads and writes safetensors: one file, several files with an index, or the shards that torch writes.

``HuggingFaceStorageWriter(save_distributed=True)`` writes files with parts of tensors. Each file's metadata has the
offset of each tensor, also of whole tensors, but not the number of shards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial

from recckpt.convert.safetensors_file import (
    TensorFile,
    are_counts,
    dense_tensors,
    header_of,
    read_header,
    table_tensors,
    write_file,
)
from recckpt.convert.source import ImportOptions, ImportSource, LeftOut, SourceContents, SourceTensor
from recckpt.convert.source_files import SourceFiles
from recckpt.convert.target_files import TargetFiles
from recckpt.convert.tensor_source import SourceBox, TensorTable, put_together, tensor_source, wished_tables
from recckpt.convert.view import Export
from recckpt.errors import ConversionError
from recckpt.format.tensor_index import NUMPY_DTYPES
from recckpt.text import Progress, plural

ALL_SLOTS, INCREMENTS, DTYPES = False, False, ("float16", "bfloat16", "int8")
_SUFFIX, _INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
_METADATA = "recckpt"  # key of an export's tables in the metadata; part of the format
_MAX_INDEX_BYTES = 1 << 28
_SHARDING, _VERSION = "DCP_SHARDING_INFO", "DCP_VERSION"  # keys of torch's metadata
_WHOLE = re.compile(r"(.*/)?model-\d+-of-\d+\.safetensors", re.ASCII)
_Offsets = Mapping[str, tuple[int, ...]]


def recognises(files: SourceFiles) -> bool:
    return bool(files.ending(_SUFFIX, _INDEX_SUFFIX))


def open_source(files: SourceFiles, options: ImportOptions) -> ImportSource:
    """Open one file, the files that an index names, the only file in a directory, or all shards in a directory."""
    if files.is_file and files.names[0].endswith(_INDEX_SUFFIX):
        files = SourceFiles(files.url.rpartition("/")[0] or ".")
    parts = {name: read_header(files, name) for name in _parts(files)}
    of_torch = {name: part for name, part in parts.items() if _SHARDING in part.metadata}
    begins = {name: _offsets(name, part, files).values() for name, part in of_torch.items()}
    are_shards = any(not _WHOLE.fullmatch(name) or any(map(any, offsets)) for name, offsets in begins.items())
    tensors = _joined(parts, files) if are_shards else _whole(parts, files)
    tables = _own_tables(parts, tensors, files) + wished_tables(tensors, options, files.url)
    others = {key for part in parts.values() for key in part.metadata} - {_METADATA, "format", _SHARDING, _VERSION}
    left = [LeftOut(f"__metadata__ {key}", "checkpoints cannot store it") for key in sorted(others)]
    if are_shards:
        reason = f"tensors are joined from {plural(len(parts), 'file')}; torch does not record how many there should be"
        left.append(LeftOut(f"__metadata__ {_SHARDING}", reason))
    return tensor_source(SourceContents("safetensors", left_out=tuple(left)), tensors, tables, files.url)


def _whole(parts: dict[str, TensorFile], files: SourceFiles) -> dict[str, SourceTensor]:
    if len(parts) != 1 and not files.ending(_INDEX_SUFFIX):
        what = f"{len(parts)} files {_SUFFIX} and no index"
        raise ConversionError(files.url, "", found=what, expected="one file, or one index", remedy="name the file")
    tensors: dict[str, SourceTensor] = {}
    for name, part in parts.items():
        for key in tensors.keys() & part.tensors.keys():
            path, found = files.path(name), "it also in another file"
            raise ConversionError(path, f"tensor {key!r}", found=found, expected="each tensor once")
        tensors |= part.tensors
    return tensors


def _parts(files: SourceFiles) -> list[str]:
    indexes, files_there = files.ending(_INDEX_SUFFIX), list(files.names) if files.is_file else files.ending(_SUFFIX)
    if not indexes:
        return files_there
    if len(indexes) != 1:
        what = f"{len(files_there)} files {_SUFFIX} and {len(indexes)} indexes"
        raise ConversionError(files.url, "", found=what, expected="one file, or one index", remedy="name the file")
    weight_map = files.json_object(indexes[0], _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        path, what = files.path(indexes[0]), f"{weight_map!r:.60}"
        raise ConversionError(path, "weight_map", found=what, expected="files by name")
    base = indexes[0].rpartition("/")[0]
    named = sorted({f"{base}/{name}" if base else name for name in weight_map.values()})
    return [files.need(name, f"a file that {indexes[0]} names") for name in named]


def _own_tables(
    parts: dict[str, TensorFile], tensors: dict[str, SourceTensor], files: SourceFiles
) -> list[TensorTable]:
    """Return the tables that an export of recckpt declared in the metadata."""
    names = []
    for name, part in parts.items():
        try:
            tables = json.loads(part.metadata.get(_METADATA, "{}")).get("tables", {})
            listed = {table: list(slots) for table, slots in tables.items()}
        except (ValueError, AttributeError, TypeError) as error:
            text = part.metadata[_METADATA][:80]
            raise ConversionError(files.path(name), _METADATA, found=text, expected="tables and their slots") from error
        for table, slots in listed.items():
            missing = [each for each in ("id", *slots) if f"{table}.{each}" not in tensors]
            if missing:
                expected = ", ".join(f"{table}.{each}" for each in missing)
                raise ConversionError(files.path(name), f"table {table!r}", found="no such tensors", expected=expected)
            of_slots = {slot: tensors[f"{table}.{slot}"] for slot in slots}
            names.append(TensorTable(table, tensors[f"{table}.id"], of_slots))
    return names


def _joined(parts: Mapping[str, TensorFile], files: SourceFiles) -> dict[str, SourceTensor]:
    """Return the tensors of a directory of shards; ConversionError for missing or repeated values."""
    if files.is_file:
        found = "a file whose tensors may continue in other shards"
        expected = "the directory with all shards of the save"
        remedy = "name the directory; if the file is complete, name it model-00001-of-00001.safetensors, as torch does"
        raise ConversionError(files.url, _SHARDING, found=found, expected=expected, remedy=remedy)
    pieces: dict[str, list[tuple[SourceTensor, tuple[int, ...]]]] = {}
    for name, part in parts.items():
        offsets = _offsets(name, part, files)
        for key, tensor in part.tensors.items():
            pieces.setdefault(key, []).append((tensor, offsets[key]))
    return {key: _tensor(key, its_pieces, files) for key, its_pieces in pieces.items()}


def _tensor(key: str, its_pieces: list[tuple[SourceTensor, tuple[int, ...]]], files: SourceFiles) -> SourceTensor:
    dtypes = sorted({tensor.dtype for tensor, _ in its_pieces})
    sides = {len(offsets) for _, offsets in its_pieces}
    if len(dtypes) > 1 or len(sides) > 1:
        found = f"pieces of {', '.join(f'{tensor.dtype} {tensor.shape}' for tensor, _ in its_pieces)}"
        raise ConversionError(files.url, f"tensor {key!r}", found=found, expected="one dtype, and as many dimensions")
    ends = ([at + size for at, size in zip(offsets, tensor.shape, strict=True)] for tensor, offsets in its_pieces)
    shape = tuple(map(max, zip(*ends, strict=True)))
    pieces = [SourceBox(offsets, tensor.shape, tensor.read) for tensor, offsets in its_pieces]
    return put_together(key, dtypes[0], shape, pieces, files.url)


def _offsets(name: str, part: TensorFile, files: SourceFiles) -> _Offsets:
    """Return the offsets of a file's tensors; ConversionError if its metadata lacks one."""
    text = part.metadata.get(_SHARDING, "{}")
    try:
        listed = json.loads(text)
        offsets = {key: tuple(listed[key]["saved_offsets"]) for key in part.tensors}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        expected = "the offsets of each tensor"
        raise ConversionError(files.path(name), _SHARDING, found=f"{text:.80}", expected=expected) from error
    for key, its_offsets in offsets.items():
        if not are_counts(list(its_offsets)) or len(its_offsets) != len(part.tensors[key].shape):
            found, expected = f"offsets {list(its_offsets)!r:.80}", f"{len(part.tensors[key].shape)} numbers from 0 on"
            raise ConversionError(files.path(name), f"tensor {key!r}", found=found, expected=expected)
    return offsets


def write(export: Export, files: TargetFiles, progress: Progress) -> list[LeftOut]:
    tensors = list(dense_tensors(export, files.url))
    for table in export.tables:
        tensors += table_tensors(table, partial("{}.{}".format, table.name))
    # In the order that the library uses, so that values are aligned.
    tensors.sort(key=lambda tensor: (-NUMPY_DTYPES[tensor.dtype].itemsize, tensor.name))
    names = [tensor.name for tensor in tensors]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConversionError(files.url, repr(twice), found="a dense tensor and a column", expected="different names")
    slots = {table.name: [slot.name for slot in table.slots] for table in export.tables}
    record = json.dumps({"tables": slots, "export": export.metadata()})
    with files.create() as sink:
        write_file(sink, header_of(tensors, {"format": "pt", _METADATA: record}), tensors, progress)
    progress.add_rows(sum(table.n_rows for table in export.tables))
    return []
