"""A RecIS checkpoint of one rank in an output dir, which any number of ranks of RecIS restores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from recckpt.convert.recis_names import EXTRA, INDEX, MODEL, N_POSITIONS, ONE_SHARD, SERVING, TENSOR_KEYS, positions_of
from recckpt.convert.recis_optimizers import ROW_WISE, SLOT_THERE, scalars_there
from recckpt.convert.safetensors_out import FileTensor, header_of, table_tensors, write_file
from recckpt.convert.source import LeftOut
from recckpt.convert.target_files import TargetFiles
from recckpt.convert.view import Export, TableView
from recckpt.errors import ConversionError
from recckpt.format import layout
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.storage import SinkFile
from recckpt.text import Progress
from recckpt.types import EMBEDDING

ALL_SLOTS, INCREMENTS, DTYPES = True, False, ("float16", "bfloat16")
_SLICE = "00000@65536@65536"
_SLOTS = {EMBEDDING, "step_filter", *SLOT_THERE}
_MOST_ID = 2**52


def write(export: Export, files: TargetFiles, progress: Progress) -> list[LeftOut]:
    """Write ``ckpt_<step>`` and the index file of the output dir."""
    left = [LeftOut("random generators", "RecIS saves none")]
    directory = layout.step_id(export.checkpoint["step"] or 0)
    tensors: list[FileTensor] = []
    keys: dict[str, str] = {}
    slots: dict[str, list[str]] = {}
    for table in (_known(table, left) for table in export.tables):
        _check_ids(table, files.url)
        tensors += _in_columns(table)
        slots[table.name] = [slot.name for slot in table.slots]
        keys |= {_key(table.name, name): _block(table.name, name) for name in ("id", *slots[table.name])}
        progress.add_rows(table.n_rows)
    extra = export.state(layout.EXTRA)
    for name, value in scalars_there(extra.pop(SPARSE_OPTIM, {}), slots, left):
        tensors.append(FileTensor(f"{name}^ ", value.dtype.name, value.shape, partial(_bytes, value)))
    header = header_of(tensors)
    with files.create(directory, ONE_SHARD) as sink:
        write_file(sink, header, tensors, progress)
    index = {"file_index": {ONE_SHARD: 0}, "block_index": {tensor.name: 0 for tensor in tensors}}
    files.put(json.dumps(index, separators=(",", ":")).encode(), directory, INDEX)
    files.put(json.dumps(keys, indent=4).encode(), directory, TENSOR_KEYS)
    files.put(json.dumps(_served(header, tensors, keys), indent=4).encode(), directory, SERVING)
    _write_states(export, files, directory, extra)
    files.put(f"{directory}\n".encode(), "checkpoint")
    return left


def _key(table: str, slot: str) -> str:
    return f"{table}.{SLOT_THERE.get(slot, slot)}/part_0_1"


def _block(table: str, slot: str) -> str:
    return f"{table}@{SLOT_THERE.get(slot, slot)}^{_SLICE}"


def _in_columns(table: TableView) -> Iterator[FileTensor]:
    """Yield the columns of a table in the shapes that RecIS has for them."""
    of_rows = {_key(table.name, slot) for slot in ROW_WISE}
    for tensor in table_tensors(table, partial(_key, table.name)):
        yield replace(tensor, shape=(*tensor.shape, 1)) if tensor.name in of_rows else tensor


def _known(table: TableView, left: list[LeftOut]) -> TableView:
    """Return a table with the slots that RecIS has."""
    for slot in table.stored:
        if slot.name not in _SLOTS:
            left.append(LeftOut(f"table {table.name}, slot {slot.name}", "no optimizer of RecIS has it"))
    return replace(table, stored=tuple(slot for slot in table.stored if slot.name in _SLOTS))


def _check_ids(table: TableView, url: str) -> None:
    where = f"table {table.name!r}"
    if {"@", "^"} & set(table.name):
        raise ConversionError(url, where, found="a name with @ or ^", expected="one without, as RecIS needs it")
    for rows in table.without_slots().rows():
        beyond = rows.ids[(rows.ids < 0) | (rows.ids >= _MOST_ID)]
        if len(beyond):
            expected = "ids of 52 bits, from 0 on: RecIS drops the others"
            raise ConversionError(url, where, found=f"the id {beyond[0]}", expected=expected)


def _bytes(value: np.ndarray[Any, Any]) -> Iterator[bytes]:
    yield value.tobytes()


def _served(header: dict[str, Any], tensors: list[FileTensor], keys: dict[str, str]) -> dict[str, Any]:
    """Return what RecIS's server reads."""
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
    """Write the dense state, registered objects, and the positions of all ranks."""
    import torch

    from recckpt.dense.saver import Later, write_state

    values = export.state(layout.MODEL)
    model = {
        name: Later(t.dtype, t.shape, t.place, partial(export.tensors.read, t))
        for name, t in export.tensors.model.items()
    }
    model |= {name: value for name, value in values.items() if name not in model}
    extra = {"global_step": torch.tensor(export.checkpoint["step"] or 0, device="cpu"), **extra}
    states = {MODEL: model, EXTRA: extra}
    positions = [export.state(layout.io_state(shard)) for shard in range(export.n_shards)]
    if any(positions):
        states |= {positions_of(rank): position for rank, position in enumerate(positions)}
        files.put(str(len(positions)).encode(), directory, N_POSITIONS)
    for name, state in states.items():
        with files.create(directory, name) as sink:
            write_state(state, SinkFile(sink))
