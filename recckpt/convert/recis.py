"""Reads and writes RecIS checkpoints: tables in blocks of any number of ranks, dense state, positions and step."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from recckpt.convert.recis_optimizers import ROW_WISE, SLOT_HERE, SLOT_THERE, scalars_there, state_here
from recckpt.convert.safetensors_file import FileTensor, header_of, read_header, table_tensors, write_file
from recckpt.convert.source import (
    ImportOptions,
    ImportSource,
    LeftOut,
    SourceContents,
    SourceRows,
    SourceTable,
    SourceTensor,
    int64_ids,
)
from recckpt.convert.source_files import SourceFiles
from recckpt.convert.target_files import TargetFiles
from recckpt.convert.tensor_source import one_a_row, slot_of
from recckpt.convert.torch_file import load_torch_dict, portable_values, split_values
from recckpt.convert.view import Export
from recckpt.errors import ConversionError
from recckpt.format import layout
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.storage import SinkFile
from recckpt.text import Progress
from recckpt.types import EMBEDDING

ALL_SLOTS, INCREMENTS, DTYPES = True, False, ("float16", "bfloat16")
_INDEX, _TENSOR_KEYS, _SERVING = "index", "tensorkey.json", "torch_rank_weights_embs_table_multi_shard.json"
_MODEL, _EXTRA, _N_POSITIONS, _POSITION = "model.pt", "extra.pt", "io_state_count", "io_state_{}.pt"
_ONE_SHARD = "model-000000-of-000000.safetensors"
_SHARD = re.compile(r"(.*/)?model-\d{6}-of-\d{6}\.safetensors", re.ASCII)
_STEP_DIR = re.compile(r"ckpt_(\d{1,18})", re.ASCII)
_POSITIONS = re.compile(r"io_state_(\d{1,9})\.pt")
_SLICE, _WHOLE_SLICE = re.compile(r"(\d+)@(\d+)@([1-9]\d*)", re.ASCII), "00000@65536@65536"
_OF_FILTERS = re.compile(r".*([0-9a-f]{64}|@filter_global_step).*", re.ASCII)
_SLOTS = {EMBEDDING, "step_filter", *SLOT_THERE}
_MAX_JSON_BYTES = 1 << 30
_MOST_ID = 2**52


@dataclass(frozen=True)
class TableSlice:
    """One rank's part of a table: the ids whose remainder modulo ``size`` is in [begin, end), and their slots."""

    begin: int
    end: int
    size: int
    ids: SourceTensor
    slots: Mapping[str, SourceTensor]


def recognises(files: SourceFiles) -> bool:
    names = {name.rpartition("/")[2] for name in files.names}
    return bool({_INDEX, _TENSOR_KEYS} & names) and any(map(_SHARD.fullmatch, files.names))


def open_source(files: SourceFiles, options: ImportOptions) -> ImportSource:
    """Open a checkpoint, or the newest checkpoint of an output dir."""
    from recckpt.dense.optimizers import state_names

    if "checkpoint" in files.names and _INDEX not in files.names:
        lines = files.read("checkpoint", 1 << 24).decode("utf-8", "replace").split()
        if not lines:
            raise ConversionError(files.path("checkpoint"), "", found="no checkpoint", expected="ids, newest last")
        files = files.below(lines[-1])
    slices, blocks = _read_blocks(files)
    left = [LeftOut(_SERVING, "is for RecIS's server")] if _SERVING in files.names else []
    tables = [_table(name, own, left, files.url) for name, own in slices.items()]
    extra = load_torch_dict(files, _EXTRA) if _EXTRA in files.names else {}
    step = _step(extra.pop("global_step", None), files)
    state = load_torch_dict(files, _MODEL) if _MODEL in files.names else {}
    for name in [name for name in state if _OF_FILTERS.fullmatch(name)]:
        left.append(LeftOut(f"{_MODEL} {name}", "counts steps for a filter of RecIS"))
        del state[name]
    dense, values = split_values(state, files.path(_MODEL))
    slots = {table.name: [slot.name for slot in table.slots] for table in tables}
    scalars, others = state_here(blocks, slots, left, files.url)
    extra = portable_values(extra, files.path(_EXTRA))
    contents = SourceContents(
        "recis",
        tuple(tables),
        dense=(*dense.values(), *others),
        values=values,
        extra=extra | ({SPARSE_OPTIM: scalars} if scalars else {}),
        io_state=_positions(files),
        dense_opt=state_names(extra),  # of an export from here, which keeps the names of parameters
        step=step,
        left_out=tuple(left),
    )
    return ImportSource(contents, lambda table: _rows(table, slices[table.name], files.url))


def _table(name: str, slices: list[TableSlice], left: list[LeftOut], url: str) -> SourceTable:
    slots = []
    for slot, tensor in slices[0].slots.items():
        is_bool = tensor.dtype == "bool"
        if is_bool:
            left.append(LeftOut(f"table {name}, slot {slot}", "of bool, becomes uint8 of 0 and 1"))
        slots.append(slot_of(slot, replace(tensor, dtype="uint8") if is_bool else tensor, url))
    return SourceTable(name, sum(own.ids.shape[0] for own in slices), tuple(slots))


def _rows(table: SourceTable, slices: list[TableSlice], url: str) -> Iterator[SourceRows]:
    for own in slices:
        where = f"table {table.name!r}, slice [{own.begin}, {own.end}) of {own.size}"
        for begin, end in table.steps(own.ids.shape[0]):
            ids = int64_ids(own.ids.read(begin, end), url, where)
            rest = ids.view(np.uint64) % np.uint64(own.size)
            strange = ids[(rest < own.begin) | (rest >= own.end)]
            if len(strange):
                found, expected = f"the id {strange[0]}", "ids whose remainder lies in the slice"
                raise ConversionError(url, where, found=found, expected=expected)
            values = (own.slots[slot.name].read(begin, end) for slot in table.slots)
            yield SourceRows(ids, [v.view(np.uint8) if v.dtype == np.bool_ else v for v in values])


def _step(value: Any, files: SourceFiles) -> int | None:
    if value is not None:
        try:
            step = int(value)
        except (TypeError, ValueError, RuntimeError) as error:
            where = "global_step"
            raise ConversionError(files.path(_EXTRA), where, found=f"{value!r:.60}", expected="a step") from error
        return step
    named = _STEP_DIR.fullmatch(files.url.rstrip("/").rpartition("/")[2])
    return int(named[1]) if named else None


def _positions(files: SourceFiles) -> list[Mapping[str, Any]]:
    numbers = [int(match[1]) for name in files.names if (match := _POSITIONS.fullmatch(name))]
    count = len(numbers)
    if _N_POSITIONS in files.names:
        text = files.read(_N_POSITIONS, 100)
        if not re.fullmatch(rb"\s*\d{1,9}\s*", text):
            path = files.path(_N_POSITIONS)
            raise ConversionError(path, "", found=f"{text[:40]!r}", expected="the number of ranks")
        count = int(text)
    names = [files.need(_POSITION.format(rank), f"the position of rank {rank} of {count}") for rank in range(count)]
    return [portable_values(load_torch_dict(files, name), files.path(name)) for name in names]


def _read_blocks(files: SourceFiles) -> tuple[dict[str, list[TableSlice]], dict[str, SourceTensor]]:
    """Read index, keys and file headers; return each table's slices in id order, and the dense blocks by name."""
    for name in (_INDEX, _TENSOR_KEYS):
        files.need(name, "a file that every RecIS checkpoint has; without it nothing can be loaded")
    index, keys = (files.json_object(name, _MAX_JSON_BYTES) for name in (_INDEX, _TENSOR_KEYS))
    numbers, blocks = index.get("file_index"), index.get("block_index")
    if not isinstance(numbers, dict) or not isinstance(blocks, dict):
        raise ConversionError(files.path(_INDEX), "", found=f"{sorted(index)}", expected="file_index and block_index")
    names = {number: files.need(name, f"a file that {_INDEX} lists") for name, number in numbers.items()}
    headers = {number: read_header(files, name).tensors for number, name in names.items()}
    tensors: dict[str, SourceTensor] = {}
    for key, number in blocks.items():
        if key not in headers.get(number, {}):
            expected = f"one in file {names.get(number, number)}, as {_INDEX} says"
            raise ConversionError(files.url, f"block {key!r}", found="no such block", expected=expected)
        tensors[key] = headers[number][key]
    for key in keys.keys() - tensors.keys():
        expected = f"this block, which {_TENSOR_KEYS} names"
        raise ConversionError(files.path(_INDEX), f"block {key!r}", found="nothing", expected=expected)
    dense: dict[str, SourceTensor] = {}
    for key in (key for key in tensors if key not in keys):
        name = key.partition("^")[0]
        if name in dense:
            found, where = f"{key!r} and another", f"dense {name!r}"
            raise ConversionError(files.path(_INDEX), where, found=found, expected="one block")
        dense[name] = tensors[key]
    return _slices(files, tensors, keys), dense


def _slices(
    files: SourceFiles, blocks: Mapping[str, SourceTensor], keys: Mapping[str, Any]
) -> dict[str, list[TableSlice]]:
    tables: dict[str, dict[tuple[int, int, int], dict[str, SourceTensor]]] = {}
    for key, name in ((key, str(name)) for key, name in keys.items()):
        named, _, text = name.rpartition("^")
        table, _, slot = named.partition("@")
        parsed = _SLICE.fullmatch(text)
        if not table or not slot or parsed is None:
            expected = "TABLE@SLOT^BEGIN@END@SIZE"
            raise ConversionError(files.path(_TENSOR_KEYS), repr(key), found=repr(name), expected=expected)
        begin, end, size = map(int, parsed.groups())
        of_slice = tables.setdefault(table, {}).setdefault((size, begin, end), {})
        if slot in of_slice:
            raise ConversionError(files.path(_TENSOR_KEYS), repr(name), found="two blocks", expected="one")
        of_slice[slot] = blocks[key]
    return {table: _whole(files.url, table, slices) for table, slices in tables.items()}


def _whole(url: str, table: str, slices: Mapping[tuple[int, int, int], dict[str, SourceTensor]]) -> list[TableSlice]:
    """Return a table's slices in order, with recckpt's slot names; ConversionError if they do not partition the ids."""
    where, at, listed = f"table {table!r}", 0, []
    first = next(iter(slices.values()))
    for (size, begin, end), slots in sorted(slices.items()):
        if size != next(iter(slices))[0] or begin > end or end > size:
            sizes = sorted({key[0] for key in slices})
            raise ConversionError(url, where, found=f"slices of {sizes}, [{begin}, {end})", expected="one size")
        if begin != at:
            what = f"nothing for [{at}, {begin})" if begin > at else f"[{begin}, {at}) in two slices"
            raise ConversionError(url, where, found=what, expected=f"slices that tile [0, {size}), each once")
        if slots.keys() != first.keys() or not {"id", EMBEDDING} <= slots.keys():
            expected = f"{sorted(first)}, with id and embedding"
            raise ConversionError(url, f"{where}, slice {begin}", found=f"{sorted(slots)}", expected=expected)
        _check_rows(url, f"{where}, slice {begin}", slots, first)
        own = {SLOT_HERE.get(name, name): slots[name] for name in first if name != "id"}
        own = {n: one_a_row(t) if n in ROW_WISE and t.shape[1:] == (1,) else t for n, t in own.items()}
        listed.append(TableSlice(begin, end, size, slots["id"], own))
        at = end
    if at != listed[0].size:
        expected = f"slices that tile [0, {listed[0].size})"
        raise ConversionError(url, where, found=f"nothing for [{at}, {listed[0].size})", expected=expected)
    return listed


def _check_rows(url: str, where: str, own: Mapping[str, SourceTensor], first: Mapping[str, SourceTensor]) -> None:
    ids, n_rows = own["id"], own["id"].shape[:1]
    if ids.dtype != "int64" or len(ids.shape) != 1:
        found = f"ids of {ids.dtype} {ids.shape}"
        raise ConversionError(url, where, found=found, expected="int64 of one dimension")
    for name, alike in first.items():
        slot = own[name]
        if slot.shape[:1] != n_rows or (slot.dtype, slot.shape[1:]) != (alike.dtype, alike.shape[1:]):
            expected = f"{alike.dtype} of shape {(*n_rows, *alike.shape[1:])}"
            raise ConversionError(
                url, f"{where}, slot {name!r}", found=f"{slot.dtype} of {slot.shape}", expected=expected
            )


def write(export: Export, files: TargetFiles, progress: Progress) -> list[LeftOut]:
    left = [LeftOut("random generators", "RecIS does not save them")]
    directory = layout.step_id(export.checkpoint["step"] or 0)
    tensors: list[FileTensor] = []
    keys: dict[str, str] = {}
    slots: dict[str, list[str]] = {}
    for table in export.tables:
        others = [slot.name for slot in table.stored if slot.name not in _SLOTS]
        left += [LeftOut(f"table {table.name}, slot {name}", "no optimizer of RecIS has it") for name in others]
        known = replace(table, stored=tuple(slot for slot in table.stored if slot.name in _SLOTS))
        where = f"table {known.name!r}"
        if {"@", "^"} & set(known.name):
            found, expected = "a name with @ or ^", "one without, as RecIS needs it"
            raise ConversionError(files.url, where, found=found, expected=expected)
        for ids in known.ids():
            beyond = ids[(ids < 0) | (ids >= _MOST_ID)]
            if len(beyond):
                expected = "ids of 52 bits, from 0 on: RecIS drops the others"
                raise ConversionError(files.url, where, found=f"the id {beyond[0]}", expected=expected)
        slots[table.name] = [slot.name for slot in known.slots]
        there = {slot: SLOT_THERE.get(slot, slot) for slot in ("id", *slots[table.name])}
        names = {slot: f"{table.name}.{name}/part_0_1" for slot, name in there.items()}
        keys |= {names[slot]: f"{table.name}@{name}^{_WHOLE_SLICE}" for slot, name in there.items()}
        of_rows = {names[slot] for slot in ROW_WISE if slot in names}
        for tensor in table_tensors(known, names.__getitem__):
            tensors.append(replace(tensor, shape=(*tensor.shape, 1)) if tensor.name in of_rows else tensor)
        progress.add_rows(known.n_rows)
    extra = export.state(layout.EXTRA)
    for name, value in scalars_there(extra.pop(SPARSE_OPTIM, {}), slots, left):
        tensors.append(FileTensor(f"{name}^ ", value.dtype.name, value.shape, partial(list, [value.tobytes()])))
    header = header_of(tensors)
    with files.create(directory, _ONE_SHARD) as sink:
        write_file(sink, header, tensors, progress)
    index = {"file_index": {_ONE_SHARD: 0}, "block_index": {tensor.name: 0 for tensor in tensors}}
    files.put(json.dumps(index, separators=(",", ":")).encode(), directory, _INDEX)
    files.put(json.dumps(keys, indent=4).encode(), directory, _TENSOR_KEYS)
    files.put(json.dumps(_served(header, tensors, keys), indent=4).encode(), directory, _SERVING)
    _write_states(export, files, directory, extra)
    files.put(f"{directory}\n".encode(), "checkpoint")
    return left


def _served(header: dict[str, Any], tensors: list[FileTensor], keys: dict[str, str]) -> dict[str, Any]:
    served: dict[str, Any] = {}
    for tensor in tensors:
        name, shape = tensor.name, list(tensor.shape)
        entry = {"shape": shape, "name": name, "dtype": tensor.dtype}
        if name not in keys:
            served[name] = {"dense": True, **entry, "dimension": 0, "is_hashmap": False}
        elif ".embedding" in name:
            key: dict[str, Any] = {"hashmap_key": name.replace(".embedding", ".id", 1), "hashmap_key_dtype": "int64"}
            key |= {"hashmap_value": name, "is_hashmap": True}
            served[name] = {"dense": False, **entry, "dimension": shape[-1], **key}
        else:
            served[name] = {**header[name], "dense": False}
    return served


def _write_states(export: Export, files: TargetFiles, directory: str, extra: dict[str, Any]) -> None:
    import torch

    from recckpt.dense.saver import Later, write_state

    values = export.state(layout.MODEL)
    model: dict[str, Any] = {t.name: Later(t.dtype, t.shape, t.same, t.read) for t in export.dense()}
    model |= {name: value for name, value in values.items() if name not in model}
    extra = {"global_step": torch.tensor(export.checkpoint["step"] or 0, device="cpu"), **extra}
    states = {_MODEL: model, _EXTRA: extra}
    positions = [export.state(layout.of_rank("io_state", shard)) for shard in range(export.n_shards)]
    if any(positions):
        states |= {_POSITION.format(rank): position for rank, position in enumerate(positions)}
        files.put(str(len(positions)).encode(), directory, _N_POSITIONS)
    for name, state in states.items():
        with files.create(directory, name) as sink:
            write_state(state, SinkFile(sink))
