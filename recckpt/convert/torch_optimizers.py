"""The states of optimizers beside a model in a file of torch.save: by parameter, those of tables as slots of rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from recckpt.convert.parameter_order import NAMES, ParameterOrder, by_name, n_parameters
from recckpt.convert.source import LeftOut, SourceTensor
from recckpt.convert.torch_file import tensor_of
from recckpt.errors import ConversionError
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.format.training import Lineage
from recckpt.live.optimizer_slots import PREFIXES, slot_of
from recckpt.text import first_few

_BY_ORDER = "goes by the names of parameters, which are in the order of the file's tensors; model= makes sure of it"
_STEP, _SUM = "step", "sum"
_MOMENTS = frozenset({"exp_avg", "exp_avg_sq"})
_SETTINGS = ("lr", "betas", "eps", "weight_decay", "lr_decay", "initial_accumulator_value", "maximize")
_NOT_OF = {"sparse_adam": {"weight_decay", "maximize"}, "sparse_adamw": {"maximize"}}  # what their rules do not have


@dataclass
class PlacedStates:
    """Where the states of optimizers go.

    Attributes:
        extra: registered objects, dense optimizers with the names of their parameters.
        slots: table -> slot -> the tensor of it.
        lineages: of dense optimizers whose class is known.
        left: what has no place, or another form.
    """

    extra: dict[str, Any]
    slots: dict[str, dict[str, SourceTensor]] = field(default_factory=dict)
    lineages: dict[str, Lineage] = field(default_factory=dict)
    left: list[LeftOut] = field(default_factory=list)

    @property
    def dense_opt(self) -> tuple[str, ...]:
        """``parameter@optimizer`` of all that is named."""
        from recckpt.dense.optimizers import state_names  # torch, which other sources do without

        return state_names(self.extra)


def placed_states(
    extra: Mapping[str, Any], order: ParameterOrder, optimizers: Mapping[str, Any], path: str
) -> PlacedStates:
    """Return where the states of optimizers go that lie beside a model.

    Args:
        extra: what lies beside it.
        order: finds the names of parameters, and knows those that become tables.
        optimizers: live ones, by the names of their states in the file.
        path: of the file, for messages.

    Raises:
        ConversionError: an optimizer is given of which the file has no state, or one of other parameters.
    """
    placed = PlacedStates(dict(_flat(extra)))
    states = {name: _numbered(value) for name, value in placed.extra.items() if is_state(value)}
    for name in optimizers:
        if name not in states:
            found, expected = f"no state of an optimizer {name!r}", f"one of {first_few([*states], 20) or 'none'}"
            raise ConversionError(path, "", found=found, expected=expected, remedy="name it as the file does")
    groups: list[dict[str, Any]] = []
    steps: dict[str, dict[str, int]] = {}
    n_saved = sum(map(n_parameters, states.values()))
    for name, saved in states.items():
        live = optimizers.get(name)
        try:
            names = order.names(saved, live, n_saved=n_saved)
        except ValueError as error:
            if live is not None:
                raise ConversionError(path, repr(name), found=str(error), expected="the same parameters") from error
            why = f"{error}; it stays a registered object, whose state goes to parameters by their places"
            placed.left.append(LeftOut(name, why))
            continue
        for table, values, settings in _of_tables(saved, names, order.tables):
            rows = _RowState(name, table, values, settings, live)
            placed.slots.setdefault(table, {}).update(rows.slots(order.tensors[table], placed.left, path))
            if rows.step is not None:
                steps[table] = {_STEP: rows.step}
            _add_to_group(groups, rows.settings, table)
        if live is None and order.is_of_tensors and not _has_names(saved):
            placed.left.append(LeftOut(name, _BY_ORDER))
        _place_dense(placed, name, _named(saved, names, order), live)
    if steps:
        used = dict.fromkeys(slot for slots in placed.slots.values() for slot in slots)
        placed.extra[SPARSE_OPTIM] = {"slots": list(used), "state": steps, "param_groups": groups}
    return placed


def _add_to_group(groups: list[dict[str, Any]], settings: Mapping[str, Any], table: str) -> None:
    """Put a table into the group with its settings."""
    for group in groups:
        if {key: value for key, value in group.items() if key != "tables"} == settings:
            group["tables"].append(table)
            return
    groups.append({**settings, "tables": [table]})


def is_state(value: Any) -> bool:
    """Say whether this is the state dict of an optimizer of torch."""
    if not isinstance(value, Mapping) or not isinstance(value.get("state"), Mapping):
        return False
    groups = value.get("param_groups")
    return isinstance(groups, list | tuple) and len(groups) > 0 and all(map(_is_group, groups))


def _has_names(saved: Mapping[str, Any]) -> bool:
    return all(NAMES in group for group in saved["param_groups"])


def _is_group(group: Any) -> bool:
    params = group.get("params") if isinstance(group, Mapping) else None
    return isinstance(params, list | tuple) and {type(each) for each in params} in ({int}, {str}, set())


def _numbered(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state with numbers and names of parameters, where it has names alone, as those of FSDP and DCP."""
    if all(type(each) is int for group in saved["param_groups"] for each in group["params"]):
        return saved
    numbers, groups, state = count(), [], dict[int, Any]()
    for group in saved["param_groups"]:
        own = {next(numbers): name for name in group["params"]}
        groups.append({**group, "params": [*own], NAMES: [*own.values()]})
        state |= {index: saved["state"][name] for index, name in own.items() if name in saved["state"]}
    return {**saved, "state": state, "param_groups": groups}


def _flat(extra: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield objects by name; the states in a list, as Lightning has them, each by itself."""
    for name, value in extra.items():
        if isinstance(value, list | tuple) and value and all(map(is_state, value)):
            yield from ((f"{name}_{number}", state) for number, state in enumerate(value))
        else:
            yield name, value


def _of_tables(
    saved: Mapping[str, Any], names: Sequence[str], tables: Collection[str]
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Yield (table, its state, the settings of its group)."""
    states, left = by_name(saved, names), iter(names)
    for group in saved["param_groups"]:
        for name in [next(left) for _ in group["params"]]:
            if name in tables:
                yield name, states[name], group


def _named(saved: Mapping[str, Any], names: Sequence[str], order: ParameterOrder) -> dict[str, Any]:
    """Return the state of the parameters that stay dense, with their names and shapes."""
    from recckpt.dense.optimizers import SHAPES

    groups, left = [], iter(names)
    state: dict[int, Any] = {}
    for group in saved["param_groups"]:
        pairs = [(index, name) for index in group["params"] if (name := next(left)) not in order.tables]
        shapes = [list(order.tensors[name].shape) for _, name in pairs]
        own = {"params": [index for index, _ in pairs], NAMES: [name for _, name in pairs], SHAPES: shapes}
        groups.append({**group, **own})
        state |= {index: saved["state"][index] for index, _ in pairs if index in saved["state"]}
    return {**saved, "state": state, "param_groups": groups}


def _place_dense(placed: PlacedStates, name: str, named: dict[str, Any], live: Any) -> None:
    """Put the state of a dense optimizer back by name; one that trained tables alone goes."""
    if not any(group["params"] for group in named["param_groups"]):
        placed.extra.pop(name)
        return
    placed.extra[name] = named
    if live is not None:
        from recckpt.dense.optimizer_class import lineage_of

        placed.lineages[name] = lineage_of(live)


class _RowState:
    """What an optimizer has kept of the rows of a table."""

    def __init__(
        self, optimizer: str, table: str, values: Mapping[str, Any], group: Mapping[str, Any], live: Any
    ) -> None:
        self._what, self._values = f"{optimizer}, table {table}", values
        self._live = live
        self._prefix = _prefix_of(values, group, live)
        leaves = _NOT_OF.get(self._prefix, set())
        self.settings = {key: group[key] for key in _SETTINGS if key in group and key not in leaves}
        self._lost = {key: group[key] for key in leaves if group.get(key)}

    @property
    def step(self) -> int | None:
        """The steps of the table; None where it was never trained."""
        return int(self._values[_STEP]) if _STEP in self._values else None

    def slots(self, weight: SourceTensor, left: list[LeftOut], path: str) -> dict[str, SourceTensor]:
        """Return the slots; what is of no optimizer here is listed."""
        slots = {}
        for key, value in self._values.items():
            is_of_rows = tuple(getattr(value, "shape", ())) == weight.shape
            if is_of_rows and self._prefix and (key in _MOMENTS or key == _SUM):
                slots[self._slot(key)] = tensor_of(f"{self._what}, {key}", value, path)
            elif key != _STEP:
                left.append(LeftOut(f"{self._what}, {key}", "no optimizer of tables has it"))
        left += [LeftOut(f"{self._what}, {key}={value}", "its rule here has none") for key, value in self._lost.items()]
        return slots

    def _slot(self, key: str) -> str:
        own = getattr(self._live, "slot_names", ())
        return next((name for name in own if name.endswith(f"_{key}")), slot_of(self._prefix, key))


def _prefix_of(values: Mapping[str, Any], group: Mapping[str, Any], live: Any) -> str:
    """Return what the slots of a rule begin with: by its class, or by what it has kept."""
    if values.keys() >= _MOMENTS:
        kind = "AdamW" if group.get("decoupled_weight_decay") else "Adam"
        is_of_torch = live is not None and not hasattr(live, "slot_names")
        return PREFIXES.get(type(live).__name__ if is_of_torch else kind, PREFIXES[kind])
    return PREFIXES["Adagrad"] if _SUM in values else ""
