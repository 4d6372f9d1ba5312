"""A file of torch.save: a state dict, or a dict with one and what else was saved beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from recckpt.convert.source import ImportOptions, LeftOut, SourceContents, SourceTensor
from recckpt.convert.source_files import SourceFiles
from recckpt.convert.tensor_source import TensorSource, TensorTable, used, wished_tables
from recckpt.convert.torch_file import load_torch_dict, portable_values, split_values
from recckpt.errors import ConversionError

if TYPE_CHECKING:
    from recckpt.convert.torch_optimizers import PlacedStates

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_MODEL = ("state_dict", "model_state_dict", "model")  # under which others save the model beside the rest

_NESTED = "holds tensors, which are no dense tensors here: it goes to model.pt as it is"


def recognises(files: SourceFiles) -> bool:
    """Say whether it is one file of this format."""
    return files.is_file and bool(files.ending(*_SUFFIXES))


def open_source(files: SourceFiles, options: ImportOptions) -> TensorSource:
    """Open the file; its tensors are mapped, where it can be mapped.

    Raises:
        ConversionError: the pickle needs code, the file is damaged, or an option cannot be met.
    """
    if not files.is_file:
        raise ConversionError(files.url, "", found="a directory", expected="one file of torch.save")
    name = files.names[0]
    state, beside = _parted(load_torch_dict(files, name))
    tensors, values = split_values(state, files.url)
    tables = wished_tables(tensors, options, files.url)
    placed = _placed(beside, tensors, tables, options, files.url)
    tables = [replace(table, slots={**table.slots, **placed.slots.get(table.name, {})}) for table in tables]
    taken = used(tables)
    dense = tuple(tensor for key, tensor in tensors.items() if key not in taken)
    step = next((beside[key] for key in ("global_step", "step") if type(beside.get(key)) is int), None)
    nested = tuple(LeftOut(each, _NESTED) for each, value in values.items() if _holds_tensors(value))
    contents = SourceContents(
        "torch_state",
        dense=dense,
        values=values,
        extra=portable_values(placed.extra, files.url),
        dense_opt=placed.dense_opt,
        lineages=placed.lineages,
        step=step,
        left_out=(*nested, *placed.left),
    )
    return TensorSource(contents, tables, files.url)


def _placed(
    beside: Mapping[str, Any],
    tensors: Mapping[str, SourceTensor],
    tables: list[TensorTable],
    options: ImportOptions,
    url: str,
) -> PlacedStates:
    """Return where the states of optimizers go that lie beside the model."""
    from recckpt.convert.parameter_order import ParameterOrder
    from recckpt.convert.torch_optimizers import placed_states

    names = [table.name for table in tables]
    order = ParameterOrder(tensors, names, options.model)
    return placed_states(beside, order, options.optimizers, url)


def _parted(saved: dict[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return the state of the model, and what lies beside it."""
    import torch

    has_tensors = any(isinstance(value, torch.Tensor) for value in saved.values())
    for key in _MODEL:
        inner = saved.get(key)
        if has_tensors and not _holds_tensors(inner):
            continue
        if isinstance(inner, Mapping) and all(isinstance(name, str) for name in inner):
            return inner, {name: value for name, value in saved.items() if name != key}
    return saved, {}


def _holds_tensors(value: Any) -> bool:
    """Say whether a dict or a list has a tensor in it, at any depth."""
    import torch

    if isinstance(value, Mapping):
        value = list(value.values())
    inner = value if isinstance(value, list | tuple) else ()
    return any(isinstance(each, torch.Tensor) or _holds_tensors(each) for each in inner)
