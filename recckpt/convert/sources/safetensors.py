"""safetensors: one file, or several with an index; tables where they are wished for, or where recckpt wrote them."""

from __future__ import annotations

import json
from typing import Any

from recckpt.convert.safetensors_file import TensorFile, read_header
from recckpt.convert.safetensors_shards import SHARDING, VERSION, are_shards, joined, of_shards
from recckpt.convert.source import ImportOptions, LeftOut, SourceContents, SourceTensor
from recckpt.convert.source_files import SourceFiles
from recckpt.convert.tensor_source import TensorSource, TensorTable, used, wished_tables
from recckpt.errors import ConversionError

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
METADATA = "recckpt"  # part of the format: what an export says of its tables
_MAX_INDEX_BYTES = 1 << 28


def recognises(files: SourceFiles) -> bool:
    """Say whether these are files of this format."""
    return bool(files.ending(SUFFIX, INDEX_SUFFIX))


def open_source(files: SourceFiles, options: ImportOptions) -> TensorSource:
    """Open one file, those that an index names, the only one of a directory, or all shards in it.

    Raises:
        ConversionError: a file is missing, cut or contradicts itself, or an option cannot be met.
    """
    if files.is_file and files.names[0].endswith(INDEX_SUFFIX):
        files = SourceFiles(files.url.rpartition("/")[0] or ".")
    parts = {name: read_header(files, name) for name in _parts(files)}
    shards = are_shards(parts, files)
    tensors = joined(parts, files) if shards else _whole(parts, files)
    tables = _own_tables(parts, tensors, files) + wished_tables(tensors, options, files.url)
    taken = used(tables)
    dense = tuple(tensor for name, tensor in tensors.items() if name not in taken)
    others = {key for part in parts.values() for key in part.metadata} - {METADATA, "format", SHARDING, VERSION}
    left = tuple(LeftOut(f"__metadata__ {key}", "checkpoints have no place for it") for key in sorted(others))
    left += (of_shards(parts),) if shards else ()
    return TensorSource(SourceContents("safetensors", dense=dense, left_out=left), tables, files.url)


def _whole(parts: dict[str, TensorFile], files: SourceFiles) -> dict[str, SourceTensor]:
    """Return the tensors of all files, each of which is whole in one."""
    if len(parts) != 1 and not files.ending(INDEX_SUFFIX):
        what = f"{len(parts)} files {SUFFIX} and no index"
        raise ConversionError(files.url, "", found=what, expected="one file, or one index", remedy="name the file")
    tensors: dict[str, SourceTensor] = {}
    for name, part in parts.items():
        for key in tensors.keys() & part.tensors.keys():
            path, found = files.path(name), "it in another file too"
            raise ConversionError(path, f"tensor {key!r}", found=found, expected="it once")
        tensors |= part.tensors
    return tensors


def _parts(files: SourceFiles) -> list[str]:
    indexes, files_there = files.ending(INDEX_SUFFIX), list(files.names) if files.is_file else files.ending(SUFFIX)
    if not indexes:
        return files_there
    if len(indexes) != 1:
        what = f"{len(files_there)} files {SUFFIX} and {len(indexes)} indexes"
        raise ConversionError(files.url, "", found=what, expected="one file, or one index", remedy="name the file")
    index = json_object(files, indexes[0], _MAX_INDEX_BYTES)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        path, what = files.path(indexes[0]), f"{weight_map!r:.60}"
        raise ConversionError(path, "weight_map", found=what, expected="files by name")
    base = indexes[0].rpartition("/")[0]
    named = sorted({f"{base}/{name}" if base else name for name in weight_map.values()})
    return [files.need(name, f"a file that {indexes[0]} names") for name in named]


def _own_tables(
    parts: dict[str, TensorFile], tensors: dict[str, SourceTensor], files: SourceFiles
) -> list[TensorTable]:
    """Return the tables that an export of recckpt has said it wrote: name -> names of its slots."""
    names = []
    for name, part in parts.items():
        try:
            tables = json.loads(part.metadata.get(METADATA, "{}")).get("tables", {})
            listed = {table: list(slots) for table, slots in tables.items()}
        except (ValueError, AttributeError, TypeError) as error:
            text = part.metadata[METADATA][:80]
            raise ConversionError(files.path(name), METADATA, found=text, expected="tables and their slots") from error
        for table, slots in listed.items():
            missing = [each for each in ("id", *slots) if f"{table}.{each}" not in tensors]
            if missing:
                expected = ", ".join(f"{table}.{each}" for each in missing)
                raise ConversionError(files.path(name), f"table {table!r}", found="no such tensors", expected=expected)
            of_slots = {slot: tensors[f"{table}.{slot}"] for slot in slots}
            names.append(TensorTable(table, tensors[f"{table}.id"], of_slots))
    return names


def json_object(files: SourceFiles, name: str, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a file; ConversionError where it is not one."""
    try:
        value = json.loads(files.read(name, max_bytes))
    except (ValueError, RecursionError) as error:
        raise ConversionError(files.path(name), "", found=f"no JSON ({error!s:.100})", expected="an object") from error
    if not isinstance(value, dict):
        raise ConversionError(files.path(name), "", found=f"{value!r:.60}", expected="a JSON object")
    return value
