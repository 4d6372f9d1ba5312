"""The blocks of a RecIS checkpoint: which table, slot and slice each holds, and that all together are whole."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from recckpt.convert.recis_names import INDEX, TENSOR_KEYS
from recckpt.convert.safetensors_file import read_header
from recckpt.convert.source import SourceTensor
from recckpt.convert.source_files import SourceFiles
from recckpt.convert.sources.safetensors import json_object
from recckpt.errors import ConversionError

_MAX_JSON_BYTES = 1 << 30
_SLICE = re.compile(r"(\d+)@(\d+)@([1-9]\d*)", re.ASCII)
_ID = "id"


@dataclass(frozen=True)
class TableSlice:
    """What one rank wrote of a table: ids in [begin, end) of their remainder by ``size``, and slots beside them."""

    begin: int
    end: int
    size: int
    ids: SourceTensor
    slots: Mapping[str, SourceTensor]


@dataclass(frozen=True)
class RecisBlocks:
    """All of a checkpoint: the slices of each table in order, and the dense blocks by name."""

    tables: Mapping[str, list[TableSlice]]
    dense: Mapping[str, SourceTensor]


def read_blocks(files: SourceFiles) -> RecisBlocks:
    """Read the index, the keys and the headers of all files.

    Raises:
        ConversionError: a file is missing or cut, or they contradict each other.
    """
    for name in (INDEX, TENSOR_KEYS):
        files.need(name, "a file that every RecIS checkpoint has; without it nothing can be loaded")
    index = json_object(files, INDEX, _MAX_JSON_BYTES)
    keys = json_object(files, TENSOR_KEYS, _MAX_JSON_BYTES)
    numbers, blocks = index.get("file_index"), index.get("block_index")
    if not isinstance(numbers, dict) or not isinstance(blocks, dict):
        raise ConversionError(files.path(INDEX), "", found=f"{sorted(index)}", expected="file_index and block_index")
    names = {number: files.need(name, f"a file that {INDEX} lists") for name, number in numbers.items()}
    headers = {number: read_header(files, name).tensors for number, name in names.items()}
    tensors: dict[str, SourceTensor] = {}
    for key, number in blocks.items():
        if key not in headers.get(number, {}):
            expected = f"it in file {names.get(number, number)}, as {INDEX} says"
            raise ConversionError(files.url, f"block {key!r}", found="no such block", expected=expected)
        tensors[key] = headers[number][key]
    for key in keys.keys() - tensors.keys():
        raise ConversionError(files.path(INDEX), f"block {key!r}", found="nothing", expected=f"it, from {TENSOR_KEYS}")
    sparse = {key: str(name) for key, name in keys.items()}
    dense: dict[str, SourceTensor] = {}
    for key, block in tensors.items():
        name = key.partition("^")[0]
        if key in sparse:
            continue
        if name in dense:
            raise ConversionError(
                files.path(INDEX), f"dense {name!r}", found=f"{key!r} and another", expected="one block"
            )
        dense[name] = block
    return RecisBlocks(dict(_tables(files, tensors, sparse)), dense)


def _tables(
    files: SourceFiles, blocks: Mapping[str, SourceTensor], keys: Mapping[str, str]
) -> Iterator[tuple[str, list[TableSlice]]]:
    tables: dict[str, dict[tuple[int, int, int], dict[str, SourceTensor]]] = {}
    for key, name in keys.items():
        named, _, text = name.rpartition("^")
        table, _, slot = named.partition("@")
        parsed = _SLICE.fullmatch(text)
        if not table or not slot or parsed is None:
            expected = "TABLE@SLOT^BEGIN@END@SIZE"
            raise ConversionError(files.path(TENSOR_KEYS), repr(key), found=repr(name), expected=expected)
        begin, end, size = map(int, parsed.groups())
        of_slice = tables.setdefault(table, {}).setdefault((size, begin, end), {})
        if slot in of_slice:
            raise ConversionError(files.path(TENSOR_KEYS), repr(name), found="two blocks", expected="one")
        of_slice[slot] = blocks[key]
    for table, slices in tables.items():
        yield table, _whole(files, table, slices)


def _whole(
    files: SourceFiles, table: str, slices: Mapping[tuple[int, int, int], dict[str, SourceTensor]]
) -> list[TableSlice]:
    """Return the slices of a table in order, if they tile the ids and agree in their slots."""
    where, at, listed = f"table {table!r}", 0, []
    first = next(iter(slices.values()))
    for (size, begin, end), slots in sorted(slices.items()):
        if size != next(iter(slices))[0] or begin > end or end > size:
            sizes = sorted({key[0] for key in slices})
            raise ConversionError(files.url, where, found=f"slices of {sizes}, [{begin}, {end})", expected="one size")
        if begin != at:
            what = f"nothing for [{at}, {begin})" if begin > at else f"[{begin}, {at}) in two slices"
            raise ConversionError(files.url, where, found=what, expected=f"slices that tile [0, {size}), each once")
        if slots.keys() != first.keys() or not {_ID, "embedding"} <= slots.keys():
            expected = f"{sorted(first)}, with id and embedding"
            raise ConversionError(files.url, f"{where}, slice {begin}", found=f"{sorted(slots)}", expected=expected)
        listed.append(TableSlice(begin, end, size, slots[_ID], {n: slots[n] for n in first if n != _ID}))
        _check_rows(files, where, listed[-1], listed[0])
        at = end
    if at != listed[0].size:
        expected = f"slices that tile [0, {listed[0].size})"
        raise ConversionError(files.url, where, found=f"nothing for [{at}, {listed[0].size})", expected=expected)
    return listed


def _check_rows(files: SourceFiles, where: str, own: TableSlice, first: TableSlice) -> None:
    n_rows = own.ids.shape[:1]
    if own.ids.dtype != "int64" or len(own.ids.shape) != 1:
        found = f"ids of {own.ids.dtype} {own.ids.shape}"
        raise ConversionError(files.url, f"{where}, slice {own.begin}", found=found, expected="int64 of one dimension")
    for name, slot in own.slots.items():
        alike = first.slots[name]
        if slot.shape[:1] != n_rows or (slot.dtype, slot.shape[1:]) != (alike.dtype, alike.shape[1:]):
            expected = f"{alike.dtype} of shape {(*n_rows, *alike.shape[1:])}"
            place = f"{where}, slot {name!r}, slice {own.begin}"
            raise ConversionError(files.url, place, found=f"{slot.dtype} of {slot.shape}", expected=expected)
