"""Reads TorchRec: tables of embedding collections with their fused optimizer's state, from DCP or torch.save.

TorchRec is not imported: tables are recognised by the names that its modules give to tensors. Other models use the same
names, so the caller must name the format.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from recckpt.convert.dcp import METADATA, read_tensors
from recckpt.convert.source import (
    ImportOptions,
    ImportSource,
    Int64s,
    LeftOut,
    SourceContents,
    SourceRows,
    SourceTable,
    SourceTensor,
    int64_ids,
    optimizer_state,
)
from recckpt.convert.source_files import SourceFiles
from recckpt.convert.tensor_source import one_a_row, slot_of
from recckpt.convert.torch_file import load_torch_dict, split_values
from recckpt.errors import ConversionError
from recckpt.format.buckets import distinct
from recckpt.types import EMBEDDING

_WEIGHT = re.compile(r"(?:.*\.)?(?:embedding_bags|embeddings)\.([^.]+)\.weight")
_STATE = re.compile(r"((?:.*\.)?(?:embedding_bags|embeddings)\.([^.]+)\.weight)\.(?:\2\.)?(?:weight\.)?([A-Za-z_0-9]+)")
_OF_ZCH = "_managed_collision_modules."
_ZCH_MODULE = re.compile(rf"(?:(.*)\.)?{re.escape(_OF_ZCH)}([^.]+)\.(\w+)")
_OF_KV_ZCH = ("bucket", "metadata")  # stored beside the ids, for tables behind a key-value store
_RAW, _PLACES, _HASHED = "_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", "_hash_zch_identities"
_COUNTERS = "_mch_"  # prefix of the values that an eviction policy keeps for each id
_FREE = np.iinfo(np.int64).max  # raw id of a place without an id
_SECOND = ("exp_avg_sq", "momentum2")
_ADAM = ("sparse_adam_exp_avg", "sparse_adam_exp_avg_sq")
_MOMENTS = {  # of Adam: name in a fused optimizer -> slot
    **dict.fromkeys(("exp_avg", "momentum1"), _ADAM[0]),
    **dict.fromkeys(_SECOND, _ADAM[1]),
}
_NAMED = "is in several collections, so its name here includes the collection; names= (--name) gives other names"
_Tensors = Mapping[str, SourceTensor]


@dataclass(frozen=True)
class PlacedIds:
    """The id of each place (row) of a matrix."""

    n_places: int  # rows of the matrix
    ids: Int64s | None = None  # None if the place is the id
    has_free: bool = False  # whether places may have no id
    counters: Mapping[str, Int64s] = field(default_factory=dict)  # slot -> what ZCH keeps for each place with an id

    @property
    def n_rows(self) -> int:
        return int((self.ids != _FREE).sum()) if self.ids is not None and self.has_free else self.n_places

    def between(self, begin: int, end: int) -> tuple[Int64s, npt.NDArray[np.bool_]]:
        """Return the ids in places [begin, end), and a mask of the places that have an id."""
        ids = np.arange(begin, end, dtype=np.int64) if self.ids is None else self.ids[begin:end]
        kept = ids != _FREE if self.has_free else np.ones(end - begin, np.bool_)
        return ids[kept], kept


def recognises(files: SourceFiles) -> bool:
    """Return False: other models use the same tensor names, so the caller must name the format."""
    return False


def open_source(files: SourceFiles, options: ImportOptions) -> ImportSource:
    """Open a checkpoint of DCP, or a file with a state dict and maybe optimizer states."""
    if METADATA in files.names:
        tensors, values = read_tensors(files)
    else:
        tensors, values = split_values(dict(_flat("", load_torch_dict(files, files.names[0]))), files.url)
    # If several collections have a table of this name, its name includes the collection.
    short = {name: match[1] for name in tensors if (match := _WEIGHT.fullmatch(name))}
    n_alike = Counter(short.values())
    weights = {name: table if n_alike[table] == 1 else name.removesuffix(".weight") for name, table in short.items()}
    url = files.url
    if not weights:
        expected = "tensors such as embedding_bags.<table>.weight"
        raise ConversionError(url, "", found="no table of TorchRec", expected=expected)
    placed: dict[str, tuple[PlacedIds, dict[str, SourceTensor]]] = {}
    left = [LeftOut(f"table {name}", _NAMED) for key, name in weights.items() if key.startswith(f"{name}.weight")]
    steps: dict[str, int] = {}
    for key, table in weights.items():
        own = _states(key, tensors, weights, url)
        step = next((own.pop(name) for name in ("step", "iter") if name in own), None)
        slots = {EMBEDDING: tensors[key], **_slots(tensors[key], own, table, left)}
        if step is not None and _ADAM[0] in slots and step.shape in ((), (1,)):
            steps[table] = int(step.whole().reshape(-1)[0])
        elif step is not None:
            left.append(LeftOut(f"table {table}, {step.name}", "its optimizer here does not count steps"))
        ids = _row_ids(key, table, tensors, weights, url)
        if ids.n_rows < ids.n_places:
            reason = f"{ids.n_places - ids.n_rows} rows without an id from ZCH are omitted"
            left.append(LeftOut(f"table {table}", reason))
        for slot, counts in ids.counters.items():
            slots[slot] = SourceTensor(slot, "int64", counts.shape, slot, partial(_between, counts))
        placed[table] = ids, slots

    def rows(table: SourceTable) -> Iterator[SourceRows]:
        ids, slots = placed[table.name]
        for begin, end in table.steps(ids.n_places):
            own, kept = ids.between(begin, end)
            if len(own):
                yield SourceRows(own, [slots[slot.name].read(begin, end)[kept] for slot in table.slots])

    contents = _others(tensors, values, weights, left)
    tables = (
        SourceTable(table, ids.n_rows, tuple(slot_of(name, tensor, url) for name, tensor in slots.items()))
        for table, (ids, slots) in placed.items()
    )
    return ImportSource(replace(contents, tables=tuple(tables), extra=optimizer_state(steps, _ADAM)), rows)


def _between(values: Int64s, begin: int, end: int) -> Int64s:
    return values[begin:end]


def _flat(prefix: str, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) pairs, with nested names joined as DCP joins them."""
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


def _others(
    tensors: _Tensors, values: Mapping[str, Any], weights: Collection[str], left: list[LeftOut]
) -> SourceContents:
    """Return the values other than tables and optimizer states of tables; append to ``left`` what is omitted."""
    ids = [f"{weight}_id" for weight in weights if f"{weight}_id" in tensors]
    stores = [f"{name.removesuffix('.weight_id')}.{each}" for name in ids for each in _OF_KV_ZCH]
    for weight in weights:
        own = _zch_of(weight, tensors, weights)
        ids += [own[name].name for name in _counters_in(own)]
    zch = [name for name in tensors if _OF_ZCH in name and name not in ids]
    zch += [name for name in stores if name in tensors]
    left += [LeftOut(name, "is state of ZCH; a table here takes any id") for name in zch]
    taken = {*weights, *filter(_STATE.fullmatch, tensors), *ids, *zch}
    dense = tuple(tensor for name, tensor in tensors.items() if name not in taken)
    plain = {name: value for name, value in values.items() if not _STATE.fullmatch(name)}
    left += [LeftOut(name, "is a setting of the fused optimizer") for name in values.keys() - plain.keys()]
    return SourceContents("torchrec", dense=dense, values=plain, left_out=tuple(left))


def _table_of(weight: str) -> str:
    match = _WEIGHT.fullmatch(weight)
    return match[1] if match else ""


def _states(weight: str, tensors: _Tensors, weights: Collection[str], url: str) -> dict[str, SourceTensor]:
    """Return the fused optimizer's states of a matrix, by name; ConversionError if two tensors are the same state.

    A state's name ends like its matrix's name, but begins differently, because the optimizer is elsewhere in the
    model.
    """
    own: dict[str, SourceTensor] = {}
    rivals = [other for other in weights if _table_of(other) == _table_of(weight)]
    for key in tensors:
        match = _STATE.fullmatch(key)
        if match is None or match[2] != _table_of(weight) or max(rivals, key=partial(_common_end, match[1])) != weight:
            continue
        name = match[3].replace("momentum_", "momentum")
        if name in own:
            found = f"{own[name].name!r} and {key!r}"
            raise ConversionError(url, f"state {name!r}", found=found, expected="one tensor", remedy="remove one")
        own[name] = tensors[key]
    return own


def _common_end(one: str, other: str) -> int:
    """Return the number of trailing parts that two dotted names share."""
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(one.count("."), other.count(".")) + 1)


def _slots(weight: SourceTensor, states: _Tensors, table: str, left: list[LeftOut]) -> dict[str, SourceTensor]:
    """Return the fused optimizer's states under recckpt's slot names."""
    n_rows, slots = weight.shape[0], dict[str, SourceTensor]()
    is_adam = any(states[name].shape == weight.shape for name in _SECOND if name in states)
    has_second = any(name in states for name in _SECOND)  # momentum1 is then not a sum of squares, whatever its shape
    for name, tensor in states.items():
        slot = None
        is_rowwise = tensor.shape in ((n_rows,), (n_rows, 1)) and weight.shape[1:] != (1,)
        if is_adam and tensor.shape == weight.shape:
            slot = _MOMENTS.get(name)
        elif not has_second and name in ("momentum1", "sum"):
            if tensor.shape == weight.shape:
                slot = "sparse_adagrad_sum"
            elif is_rowwise:
                slot = "sparse_rowwise_adagrad_sum"
        if slot is None:
            left.append(LeftOut(f"table {table}, {name}", f"{tensor.dtype} {tensor.shape}: no optimizer here has it"))
        else:
            slots[slot] = one_a_row(tensor) if is_rowwise else tensor
    return slots


def _zch_of(weight: str, tensors: _Tensors, weights: Collection[str]) -> dict[str, SourceTensor]:
    """Return the state of ZCH for a matrix, by ZCH's names; {} without such state."""
    matches = [match for name in tensors if (match := _ZCH_MODULE.fullmatch(name)) and match[2] == _table_of(weight)]
    if sum(_table_of(other) == _table_of(weight) for other in weights) > 1:  # then use only state in its wrapper
        wrappers = ((match, (match[1] or "").rpartition("_managed_collision_collection")[0]) for match in matches)
        matches = [match for match, wrapper in wrappers if weight.startswith(wrapper)]
    return {match[3]: tensors[match[0]] for match in matches}


def _counters_in(own: _Tensors) -> list[str]:
    """Return the names of ZCH's eviction counters."""
    n_ids = own[_RAW].shape if _RAW in own else None
    others = (name for name in own if name.startswith(_COUNTERS) and name not in (_RAW, _PLACES))
    return [name for name in others if own[name].dtype == "int64" and own[name].shape == n_ids]


def _row_ids(weight: str, table: str, tensors: _Tensors, weights: Collection[str], url: str) -> PlacedIds:
    """Return the ids of a matrix's rows: ids stored beside the matrix, ids from ZCH's map, or else the row indices.

    Uses 8 bytes per row, except for row indices. ConversionError if the ids do not fit the rows, or if ZCH's map is
    damaged or of an unknown kind.
    """
    n_places, beside = tensors[weight].shape[0], tensors.get(f"{weight}_id")
    if beside is not None:  # behind a key-value store
        where = f"table {table!r}, its weight_id"
        if beside.shape not in ((n_places,), (n_places, 1)):
            found, expected = f"ids of shape {beside.shape}", f"one for each of {n_places} rows"
            raise ConversionError(url, where, found=found, expected=expected)
        return PlacedIds(n_places, int64_ids(beside.whole().reshape(-1), url, where))
    own, where = _zch_of(weight, tensors, weights), f"table {table!r}, its ZCH"
    if _HASHED in own:
        remedy = "export the ids and rows with TorchRec, and import that"
        raise ConversionError(url, where, found="multi-probe hashing", expected="a sorted remap", remedy=remedy)
    if _RAW not in own:
        return PlacedIds(n_places)
    if _PLACES not in own:
        raise ConversionError(url, where, found=f"{_RAW} alone", expected=f"{_PLACES} beside it")
    raw, places = (int64_ids(own[name].whole(), url, where) for name in (_RAW, _PLACES))
    if len(raw) != len(places):
        found = f"{len(raw)} raw ids and {len(places)} places"
        raise ConversionError(url, where, found=found, expected="as many of both")
    has_id = raw != _FREE
    raw, places = raw[has_id], places[has_id]
    if len(places) and not 0 <= places.min() <= places.max() < n_places:
        found = f"places from {places.min()} to {places.max()}"
        raise ConversionError(url, where, found=found, expected=f"places in a matrix of {n_places} rows")
    if len(distinct(places)) < len(places):
        raise ConversionError(url, where, found="two ids in one place", expected="one id per place")
    ids = np.full(n_places, _FREE, np.int64)
    ids[places] = raw
    counters: dict[str, Int64s] = {}
    for name in _counters_in(own):
        counts = counters[f"zch_{name.removeprefix(_COUNTERS)}"] = np.zeros(n_places, np.int64)
        counts[places] = own[name].whole()[has_id]
    return PlacedIds(n_places, ids, has_free=True, counters=counters)
