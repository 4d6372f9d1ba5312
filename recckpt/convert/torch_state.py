"""Reads a file of torch.save: a state dict, and optimizer states, which are assigned to parameters and rows."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from recckpt.convert.source import ImportOptions, ImportSource, LeftOut, SourceContents, SourceTensor
from recckpt.convert.source_files import SourceFiles
from recckpt.convert.tensor_source import tensor_source, wished_tables
from recckpt.convert.torch_file import load_torch_dict, portable_values, split_values, tensor_of
from recckpt.errors import ConversionError
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.format.manifest import Lineage
from recckpt.live.optimizer_slots import PREFIXES, slot_of
from recckpt.text import first_few

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_MODEL = ("state_dict", "model_state_dict", "model")  # keys under which other programs save the model
_NESTED = "contains tensors that do not become dense tensors: it goes to model.pt unchanged"
_BY_ORDER = "is matched to parameters by the order of the file's tensors; pass model= to match by name"
_STEP, _SUM = "step", "sum"
_MOMENTS = frozenset({"exp_avg", "exp_avg_sq"})
_SETTINGS = ("lr", "betas", "eps", "weight_decay", "lr_decay", "initial_accumulator_value", "maximize")
_NOT_OF = {"sparse_adam": {"weight_decay", "maximize"}, "sparse_adamw": {"maximize"}}  # settings that rules here lack
_NAMES = "param_names"  # torch's key if an optimizer was made with named parameters
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # untrained buffers of batch normalization
_PREFIXES = ("module.", "_orig_mod.")


def recognises(files: SourceFiles) -> bool:
    return files.is_file and bool(files.ending(*_SUFFIXES))


def open_source(files: SourceFiles, options: ImportOptions) -> ImportSource:
    from recckpt.dense.optimizers import state_names

    if not files.is_file:
        raise ConversionError(files.url, "", found="a directory", expected="one file of torch.save")
    state, beside = _parted(load_torch_dict(files, files.names[0]))
    tensors, values = split_values(state, files.url)
    tables = wished_tables(tensors, options, files.url)
    order = ParameterOrder(tensors, [table.name for table in tables], options.model)
    placed = _placed(beside, order, options.optimizers, files.url)
    tables = [replace(table, slots={**table.slots, **placed.slots.get(table.name, {})}) for table in tables]
    step = next((step for key in ("global_step", "step") if (step := _number(beside.get(key))) is not None), None)
    nested = tuple(LeftOut(each, _NESTED) for each, value in values.items() if _holds_tensors(value))
    contents = SourceContents(
        "torch_state",
        values=values,
        extra=portable_values(placed.extra, files.url),
        dense_opt=state_names(placed.extra),
        lineages=placed.lineages,
        step=step,
        left_out=(*nested, *placed.left),
    )
    return tensor_source(contents, tensors, tables, files.url)


def _number(value: Any) -> int | None:
    """Return an int, also from a tensor; None for anything else."""
    import torch

    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_floating_point():
        value = value.item()
    return value if type(value) is int else None


def _parted(saved: dict[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
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
    import torch

    if isinstance(value, Mapping):
        value = list(value.values())
    inner = value if isinstance(value, list | tuple) else ()
    return any(isinstance(each, torch.Tensor) or _holds_tensors(each) for each in inner)


@dataclass
class PlacedStates:
    extra: dict[str, Any]  # registered objects; dense optimizers with their parameters' names
    slots: dict[str, dict[str, SourceTensor]] = field(default_factory=dict)  # table -> slot -> its tensor
    steps: dict[str, dict[str, int]] = field(default_factory=dict)  # table -> its state in the sparse optimizer
    groups: list[dict[str, Any]] = field(default_factory=list)  # groups of the sparse optimizer
    lineages: dict[str, Lineage] = field(default_factory=dict)  # of dense optimizers with a known class
    left: list[LeftOut] = field(default_factory=list)  # what is omitted, or changes its form


def _placed(extra: Mapping[str, Any], order: ParameterOrder, optimizers: Mapping[str, Any], path: str) -> PlacedStates:
    """Split the optimizer states in a file into slots of tables and dense optimizers.

    ``optimizers``: name of a state in the file -> live optimizer. ConversionError if the file lacks one of these
    states, or if a state belongs to other parameters.
    """
    placed = PlacedStates(dict(_flat(extra)))
    states = {name: _numbered(value) for name, value in placed.extra.items() if _is_state(value)}
    for name in optimizers:
        if name not in states:
            found, expected = f"no state of an optimizer {name!r}", f"one of {first_few([*states], 20) or 'none'}"
            raise ConversionError(path, "", found=found, expected=expected, remedy="name it as the file does")
    n_saved = sum(len(_indices(saved)) for saved in states.values())
    for name, saved in states.items():
        live = optimizers.get(name)
        try:
            names = order.names(saved, live, n_saved=n_saved)
        except ValueError as error:
            if live is not None:
                raise ConversionError(path, repr(name), found=str(error), expected="the same parameters") from error
            why = f"{error}; it stays a registered object, whose state is assigned to parameters by their order"
            placed.left.append(LeftOut(name, why))
            continue
        of_parameters = iter(names)
        for group in saved["param_groups"]:
            for index in group["params"]:
                if (table := next(of_parameters)) in order.tables:
                    values = saved["state"].get(index, {})
                    _place_rows(placed, name, order.tensors[table], values, group, live=live, path=path)
        if live is None and order.model is None and not all(_NAMES in group for group in saved["param_groups"]):
            placed.left.append(LeftOut(name, _BY_ORDER))
        _place_dense(placed, name, saved, names, order, live=live)
    if placed.steps:
        used = dict.fromkeys(slot for slots in placed.slots.values() for slot in slots)
        state = {"slots": list(used), "state": placed.steps, "param_groups": placed.groups}
        placed.extra[SPARSE_OPTIM] = state
    return placed


def _place_rows(
    placed: PlacedStates,
    optimizer: str,
    weight: SourceTensor,
    values: Mapping[str, Any],
    group: Mapping[str, Any],
    *,
    live: Any,
    path: str,
) -> None:
    """Put the state of a table's rows into slots; list the entries that no sparse optimizer has."""
    table, what = weight.name, f"{optimizer}, table {weight.name}"
    prefix = PREFIXES["Adagrad"] if _SUM in values else ""  # of slots: by the rule's class, or by the state it keeps
    if values.keys() >= _MOMENTS:
        kind = "AdamW" if group.get("decoupled_weight_decay") else "Adam"
        is_of_torch = live is not None and not hasattr(live, "slot_names")
        prefix = PREFIXES.get(type(live).__name__ if is_of_torch else kind, PREFIXES[kind])
    for key, value in values.items():
        is_of_rows = tuple(getattr(value, "shape", ())) == weight.shape
        if is_of_rows and prefix and (key in _MOMENTS or key == _SUM):
            own = (name for name in getattr(live, "slot_names", ()) if name.endswith(f"_{key}"))
            slot = next(own, slot_of(prefix, key))
            placed.slots.setdefault(table, {})[slot] = tensor_of(f"{what}, {key}", value, path)
        elif key != _STEP:
            placed.left.append(LeftOut(f"{what}, {key}", "no sparse optimizer has it"))
    leaves = _NOT_OF.get(prefix, set())
    lost = {key: group[key] for key in leaves if group.get(key)}
    placed.left.extend(LeftOut(f"{what}, {key}={value}", "its rule here lacks it") for key, value in lost.items())
    if _STEP in values:  # no step if it was never trained
        placed.steps[table] = {_STEP: int(values[_STEP])}
    settings = {key: group[key] for key in _SETTINGS if key in group and key not in leaves}
    for other in placed.groups:
        if {key: value for key, value in other.items() if key != "tables"} == settings:
            other["tables"].append(table)
            return
    placed.groups.append({**settings, "tables": [table]})


def _place_dense(
    placed: PlacedStates, name: str, saved: Mapping[str, Any], names: Sequence[str], order: ParameterOrder, *, live: Any
) -> None:
    """Keep the state of dense parameters, with names and shapes; drop an optimizer that has none of them."""
    from recckpt.dense.optimizers import SHAPES, lineage_of

    groups, state, of_parameters = [], dict[int, Any](), iter(names)
    for group in saved["param_groups"]:
        own = {index: each for index in group["params"] if (each := next(of_parameters)) not in order.tables}
        shapes = [list(order.tensors[each].shape) for each in own.values()]
        groups.append({**group, "params": [*own], _NAMES: [*own.values()], SHAPES: shapes})
        state |= {index: saved["state"][index] for index in own if index in saved["state"]}
    if not any(group["params"] for group in groups):
        placed.extra.pop(name)
        return
    placed.extra[name] = {**saved, "state": state, "param_groups": groups}
    if live is not None:
        placed.lineages[name] = lineage_of(live)


def _is_state(value: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("state"), Mapping):
        return False
    groups = value.get("param_groups")
    if not isinstance(groups, list | tuple) or not groups:
        return False
    parameters = [group.get("params") if isinstance(group, Mapping) else None for group in groups]
    return all(isinstance(p, list | tuple) and {type(each) for each in p} in ({int}, {str}, set()) for p in parameters)


def _indices(saved: Mapping[str, Any]) -> list[Any]:
    return [index for group in saved["param_groups"] for index in group["params"]]


def _numbered(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state with parameter indices and a list of names, also for states of FSDP and DCP with only names."""
    if all(type(each) is int for each in _indices(saved)):
        return saved
    numbers, groups, state = count(), [], dict[int, Any]()
    for group in saved["param_groups"]:
        own = {next(numbers): name for name in group["params"]}
        groups.append({**group, "params": [*own], _NAMES: [*own.values()]})
        state |= {index: saved["state"][name] for index, name in own.items() if name in saved["state"]}
    return {**saved, "state": state, "param_groups": groups}


def _flat(extra: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield objects by name; each entry of a list of states, as Lightning writes it, becomes a separate object."""
    for name, value in extra.items():
        if isinstance(value, list | tuple) and value and all(map(_is_state, value)):
            yield from ((f"{name}_{number}", state) for number, state in enumerate(value))
        else:
            yield name, value


class ParameterOrder:
    """Finds parameter names from the file, a live optimizer, a model, or the order of the tensors.

    ``tensors`` are the file's tensors; ``tables`` are the tensors that become tables. ``model`` has the parameters,
    or tables in place of some of them.
    """

    def __init__(self, tensors: Mapping[str, SourceTensor], tables: Collection[str], model: Any) -> None:
        self.tensors, self.tables, self.model = tensors, tables, model

    def names(self, saved: Mapping[str, Any], optimizer: Any, *, n_saved: int) -> list[str]:
        """Return the parameter names of a saved state, in order of index; ValueError if they are unknown.

        ``optimizer`` is a live optimizer of the same parameters; ``n_saved`` is the number of parameters of all
        optimizers in the file.
        """
        indices = _indices(saved)
        n = len(indices)
        if optimizer is not None:
            names = self._of(optimizer)
            if len(names) != n:
                raise ValueError(f"the optimizer in optimizers= has {len(names)} parameters, the file {n}")
            return names
        listed = [name for group in saved["param_groups"] for name in group.get(_NAMES, ())]
        if len(listed) == n:
            return [self._in_file(name) for name in listed]
        states = [saved["state"].get(index, {}).values() for index in indices]
        shapes = [{tuple(value.shape) for value in values if hasattr(value, "shape")} for values in states]
        orders = {tuple(order) for order in self._orders(n_saved) if len(order) == n}
        fitting = [
            order
            for order in orders
            if all(own <= {(), self.tensors[name].shape} for name, own in zip(order, shapes, strict=True))
        ]
        if len(fitting) == 1:
            return list(fitting[0])
        where = "the model" if self.model is not None else "the file"
        why = (
            f"its {n} parameters match no order of the parameters of {where}"
            if not fitting
            else "its order is not known"
        )
        remedy = "optimizers=" if self.model is not None else "model="
        raise ValueError(f"{why}: give import_checkpoint {remedy} to name them")

    def _of(self, optimizer: Any) -> list[str]:
        known = {} if self.model is None else {id(parameter): name for name, parameter in self.model.named_parameters()}
        names: list[Any] = []
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            table = getattr(parameter, "table", None)
            names.append(known.get(id(parameter)) if table is None else table.name)
        if None in names:
            raise ValueError("the optimizer in optimizers= has parameters that the model does not have")
        return [self._in_file(name) for name in names]

    def _orders(self, n_saved: int) -> Iterator[list[str]]:
        """Yield the orders in which an optimizer may have received the parameters.

        If the optimizers of the file together have all parameters, one may have only the tables and another the rest.
        """
        if self.model is None:
            first: dict[Hashable, str] = {}  # memory -> first name of tied tensors
            for name, tensor in self.tensors.items():
                first.setdefault(tensor.same, name)
            whole = trained = [name for name in first.values() if name.rpartition(".")[2] not in _BUFFERS]
        else:
            named = [(self._in_file(name), parameter) for name, parameter in self.model.named_parameters()]
            whole, trained = [name for name, _ in named], [name for name, one in named if one.requires_grad]
        for order in (whole, trained):
            yield order
            if len(order) == n_saved:
                yield [name for name in order if name not in self.tables]
                yield [name for name in order if name in self.tables]

    def _in_file(self, name: str) -> str:
        """Return the file's name for a model's parameter, a table, or the parameter that represents a table's rows."""
        plain = name.removesuffix(".anchor")
        names = [name, f"{name}.weight", plain, f"{plain}.weight"]
        names += [prefix + each for each in names for prefix in _PREFIXES]
        names += [each.removeprefix(_PREFIXES[0]).removeprefix(_PREFIXES[1]) for each in names]
        found = next((each for each in names if each in self.tensors), None)
        if found is None:
            raise ValueError(f"found no tensor {name!r}, expected each parameter in the file")
        return found
