"""TorchRec: tables of embedding collections with their fused optimizer's state, from DCP or a file of torch.save.

Nothing of TorchRec is imported: tables are known by the names that its modules give to their tensors. Other models use
such names too, so the format has to be named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from recckpt.convert.dcp_metadata import METADATA
from recckpt.convert.source import ImportOptions, Int64s, LeftOut, SourceContents, SourceRows, SourceTable, SourceTensor
from recckpt.convert.source_files import SourceFiles
from recckpt.convert.sources.dcp import read_tensors
from recckpt.convert.tensor_source import STEP_BYTES, slot_of
from recckpt.convert.torch_file import load_torch_dict, split_values
from recckpt.convert.torchrec_ids import PlacedIds, counters_in, listed_ids, row_ids
from recckpt.convert.torchrec_names import OF_KV_ZCH, OF_ZCH, is_state, states_of, table_names, zch_of
from recckpt.errors import ConversionError
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.types import EMBEDDING

_NAMED = "is in several collections, and has its name with that of the collection; names= (--name) gives others"
_SECOND = ("exp_avg_sq", "momentum2")
_ADAM = ("sparse_adam_exp_avg", "sparse_adam_exp_avg_sq")
_MOMENTS = {  # of Adam: name in a fused optimizer -> slot
    **dict.fromkeys(("exp_avg", "momentum1"), _ADAM[0]),
    **dict.fromkeys(_SECOND, _ADAM[1]),
}


def recognises(files: SourceFiles) -> bool:
    """Say no: the names of its tensors are those of other models too."""
    return False


def open_source(files: SourceFiles, options: ImportOptions) -> TorchRecSource:
    """Open a checkpoint of DCP, or a file with a state dict, and with optimizer states where they lie beside it.

    Raises:
        ConversionError: there is no table, or what belongs to one does not fit it.
    """
    if options.as_table:
        raise ConversionError(files.url, "", found="tensors that are to be tables", expected="its own tables alone")
    if METADATA in files.names:
        tensors, values = read_tensors(files)
    else:
        tensors, values = split_values(dict(_flat("", load_torch_dict(files, files.names[0]))), files.url)
    return TorchRecSource(files.url, tensors, values)


def _flat(prefix: str, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield values by their names joined, as DCP joins them."""
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


class TorchRecSource:
    """An open checkpoint of TorchRec."""

    def __init__(self, url: str, tensors: Mapping[str, SourceTensor], values: Mapping[str, Any]) -> None:
        self._url = url
        weights = table_names(tensors)
        if not weights:
            expected = "tensors such as embedding_bags.<table>.weight"
            raise ConversionError(url, "", found="no table of TorchRec", expected=expected)
        self._slots: dict[str, dict[str, SourceTensor]] = {}
        self._ids: dict[str, PlacedIds] = {}
        tables: list[SourceTable] = []
        left = [LeftOut(f"table {name}", _NAMED) for key, name in weights.items() if key.startswith(f"{name}.weight")]
        steps: dict[str, int] = {}
        for key, table in weights.items():
            own = _states(states_of(key, tensors, weights), tensors, url)
            step = next((own.pop(name) for name in ("step", "iter") if name in own), None)
            slots = {EMBEDDING: tensors[key], **_slots(tensors[key], own, table, left)}
            if step is not None and _ADAM[0] in slots and step.shape in ((), (1,)):
                steps[table] = int(step.whole().reshape(-1)[0])
            elif step is not None:
                left.append(LeftOut(f"table {table}, {step.name}", "its optimizer here counts no steps"))
            ids = _ids_of(key, table, tensors, weights, url)
            if ids.n_rows < tensors[key].shape[0]:
                free = tensors[key].shape[0] - ids.n_rows
                left.append(LeftOut(f"table {table}", f"{free} rows to which ZCH has given no id are left out"))
            slots |= {slot: _in_memory(slot, values) for slot, values in ids.counters.items()}
            specs = tuple(slot_of(slot, tensor, url) for slot, tensor in slots.items())
            tables.append(SourceTable(table, ids.n_rows, specs))
            self._slots[table], self._ids[table] = slots, ids
        ids_beside, zch = _of_zch(weights, tensors)
        left += [LeftOut(name, "is state of ZCH; a table here takes any id") for name in zch]
        taken = {*weights, *filter(is_state, tensors), *ids_beside, *zch}
        dense = tuple(tensor for name, tensor in tensors.items() if name not in taken)
        plain = {name: value for name, value in values.items() if not is_state(name)}
        left += [LeftOut(name, "is a setting of the fused optimizer") for name in values.keys() - plain.keys()]
        self.contents = SourceContents(
            "torchrec", tuple(tables), dense=dense, values=plain, extra=_scalars(steps), left_out=tuple(left)
        )

    def rows(self, table: SourceTable) -> Iterator[SourceRows]:
        """Yield the rows that have an id, in the order of the matrix."""
        slots, ids = self._slots[table.name], self._ids[table.name]
        step = max(1, STEP_BYTES // table.row_bytes)
        for begin in range(0, ids.n_places, step):
            end = min(begin + step, ids.n_places)
            ids_here, kept = ids.between(begin, end)
            if len(ids_here):
                yield SourceRows(ids_here, [slots[slot.name].read(begin, end)[kept] for slot in table.slots])

    def close(self) -> None:
        """Do nothing: each file is closed once it is read."""


def _ids_of(
    weight: str, table: str, tensors: Mapping[str, SourceTensor], weights: Collection[str], url: str
) -> PlacedIds:
    """Return the ids of the rows of a matrix; ConversionError where what says them is damaged."""
    n_rows, beside = tensors[weight].shape[0], tensors.get(f"{weight}_id")
    if beside is not None:
        return listed_ids(table, n_rows, beside, url)
    own = {name: tensors[key] for name, key in zch_of(weight, tensors, weights).items()}
    return row_ids(table, n_rows, own, url)


def _of_zch(weights: Collection[str], tensors: Mapping[str, SourceTensor]) -> tuple[list[str], list[str]]:
    """Return the tensors that say of rows which id they have and how often it came, and other state of ZCH."""
    ids = [f"{weight}_id" for weight in weights if f"{weight}_id" in tensors]
    stores = [f"{name.removesuffix('.weight_id')}.{each}" for name in ids for each in OF_KV_ZCH]
    for weight in weights:
        own = zch_of(weight, tensors, weights)
        ids += [own[name] for name in counters_in({name: tensors[key] for name, key in own.items()})]
    others = (name for name in tensors if OF_ZCH in name and name not in ids)
    return ids, [*others, *(name for name in stores if name in tensors)]


def _in_memory(name: str, values: Int64s) -> SourceTensor:
    """Return values of each row, which are in memory, as a tensor of the source."""
    return SourceTensor(name, "int64", values.shape, name, lambda begin, end: values[begin:end])


def _scalars(steps: Mapping[str, int]) -> dict[str, Any]:
    """Return the state of the sparse optimizer, which has a step for each table."""
    if not steps:
        return {}
    state = {table: {"step": step} for table, step in steps.items()}
    return {SPARSE_OPTIM: {"slots": list(_ADAM), "state": state, "param_groups": [{"tables": list(steps)}]}}


def _states(of_table: Mapping[str, str], tensors: Mapping[str, SourceTensor], url: str) -> dict[str, SourceTensor]:
    """Return the states of a table by name; ConversionError where two tensors are the same one."""
    own: dict[str, SourceTensor] = {}
    for key, state in of_table.items():
        name = state.replace("momentum_", "momentum")
        if name in own:
            found = f"{own[name].name!r} and {key!r}"
            raise ConversionError(url, f"state {name!r}", found=found, expected="one tensor", remedy="leave one out")
        own[name] = tensors[key]
    return own


def _slots(
    weight: SourceTensor, states: Mapping[str, SourceTensor], table: str, left: list[LeftOut]
) -> dict[str, SourceTensor]:
    """Return the states of the fused optimizer under the names that slots have here."""
    n_rows, slots = weight.shape[0], dict[str, SourceTensor]()
    is_adam = any(states[name].shape == weight.shape for name in _SECOND if name in states)
    has_second = any(name in states for name in _SECOND)  # then momentum1 is no sum of squares, whatever the shape
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
            slots[slot] = _flattened(tensor) if is_rowwise else tensor
    return slots


def _flattened(tensor: SourceTensor) -> SourceTensor:
    return replace(tensor, shape=tensor.shape[:1], read=lambda begin, end: tensor.read(begin, end).reshape(end - begin))
