"""What a manager finds when it is attached: the tables of a model, who trains them, and a name for each thing."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from recckpt.dense.keyed_optimizer import is_keyed
from recckpt.dense.optimizer_class import updater
from recckpt.dense.optimizers import has_values
from recckpt.dense.registered import extra_registry, io_registry
from recckpt.live import live_tables
from recckpt.live.tables import LiveTables
from recckpt.save import arguments
from recckpt.sparse.optim.joint import JointOptimizer
from recckpt.sparse.optim.optimizer import SparseOptimizer, made
from recckpt.sparse.split import parameters_of
from recckpt.sparse.table.table import HashTable
from recckpt.text import first_few, plural
from recckpt.types import SavableTable

log = logging.getLogger("recckpt")

_live: WeakValueDictionary[int, LiveTables] = WeakValueDictionary()  # that were found here, by id of the model
_T = TypeVar("_T")
OneOrMany: TypeAlias = _T | Sequence[_T] | Mapping[str, _T] | None  # one, several, several by name, or nothing
TablesOption: TypeAlias = LiveTables | Mapping[str, Any] | None  # live tables, arguments that find them, or nothing


@dataclass(frozen=True)
class Placement:
    """What is saved of a run, and as what.

    Attributes:
        model: whose tables and dense tensors are saved.
        tables: its tables, those that are not live.
        live: its live tables; None where they were not looked for.
        sparse_optim: the optimizer of the tables; None where there is none.
        objects: optimizers and schedulers to be registered, by name.
        positions: loaders to be registered, by name.
    """

    model: nn.Module
    tables: Mapping[str, SavableTable]
    live: LiveTables | None
    sparse_optim: Optimizer | None
    objects: Mapping[str, Any]
    positions: Mapping[str, Any]


@dataclass(frozen=True)
class _Item:
    """One argument, or one of those in it: what messages call it, its name where it has one, and itself."""

    label: str
    name: str
    obj: Any

    @property
    def kind(self) -> str:
        return type(updater(self.obj) if isinstance(self.obj, Optimizer) else self.obj).__name__


def place(
    model: nn.Module,
    optimizers: OneOrMany[Optimizer],
    *,
    schedulers: OneOrMany[Any],
    loader: OneOrMany[Any],
    tables: TablesOption,
    problems: Sequence[str] = (),
) -> Placement:
    """Find the tables of a model, and a place for each optimizer, scheduler and loader.

    Args:
        model: as of :meth:`recckpt.CheckpointManager.attach`, as the others.
        optimizers: of its tables and of its dense parameters, in any order.
        schedulers: of these optimizers.
        loader: what has a position in the data.
        tables: the live tables, or arguments of :func:`recckpt.live.live_tables`; None for none.
        problems: what is wrong already.

    Raises:
        TypeError: the model is not one.
        ValueError: something has no place, or what trains a table is not among the optimizers; names all of it.
    """
    own, wrong = arguments.check_parts(model, None), list(problems)
    parts = list(_parts(_items("optimizers", optimizers), wrong))
    sparse = [part for part in parts if _is_sparse(part.obj)]
    dense = _renamed((part for part in parts if not _is_sparse(part.obj)), "dense_optim")
    others = _renamed(_items("schedulers", schedulers), "scheduler")
    positions = _renamed(_items("loader", loader), "loader")
    wrong += _about_tables(own, sparse)
    wrong += _about_parameters(model, dense)
    wrong += _about_schedulers(others, [item.obj for item in (*_items("", optimizers), *parts)])
    wrong += _about_names([*dense, *(item for item in others if not isinstance(item.obj, Optimizer))], positions)
    live = None
    try:
        live = _live_tables(model, [part.obj for part in dense], tables, is_all_well=not wrong)
    except (TypeError, ValueError) as error:
        wrong.append(f"tables: {error}")
    if wrong:
        raise ValueError(f"attach: {plural(len(wrong), 'problem')}; nothing was made:\n  " + "\n  ".join(wrong))
    optimizer = sparse[0].obj if sparse else None
    objects, by_name = ({item.name: item.obj for item in some} for some in ([*dense, *others], positions))
    return Placement(model, own, live, optimizer, objects, by_name)


def trainers_of(tables: Mapping[str, SavableTable]) -> dict[SparseOptimizer, list[str]]:
    """Return the optimizers of this process that the gradients of tables go to, each with the names of these."""
    alive = [one for reference in made.valuerefs() if (one := reference()) is not None]
    own = {name: table for name, table in tables.items() if isinstance(table, HashTable)}
    trained = {one: [name for name, table in own.items() if one.trains(table)] for one in alive}
    return {one: names for one, names in trained.items() if names}


def _items(argument: str, things: OneOrMany[Any]) -> list[_Item]:
    """Return one thing, several, or several by name, with what messages call them."""
    if things is None:
        return []
    if isinstance(things, Mapping):
        return [_Item(f"{argument}[{name!r}]", name, obj) for name, obj in things.items()]
    if isinstance(things, list | tuple):
        return [_Item(f"{argument}[{number}]", "", obj) for number, obj in enumerate(things)]
    return [_Item(argument, "", things)]


def _renamed(items: Iterable[_Item], name: str) -> list[_Item]:
    """Give a name to those that have none; of several with one, the second is called ``name_1``."""
    counts = Counter[str]()
    named = []
    for item in items:
        first = item.name or name
        named.append(_Item(item.label, f"{first}_{counts[first]}" if counts[first] else first, item.obj))
        counts[first] += 1
    return named


def _parts(items: Iterable[_Item], problems: list[str]) -> Iterator[_Item]:
    """Yield each optimizer once, those in a joint one in its place."""
    seen = set[int]()
    for item in items:
        if not isinstance(item.obj, Optimizer):
            problems.append(f"{item.label}: found a {item.kind}, expected an optimizer")
            continue
        inner = updater(item.obj)
        for part in inner.optimizers if isinstance(inner, JointOptimizer) else (item.obj,):
            if id(updater(part)) not in seen:
                seen.add(id(updater(part)))
                yield _Item(item.label, item.name, part)


def _is_sparse(optimizer: Optimizer) -> bool:
    return isinstance(updater(optimizer), SparseOptimizer)


def _about_tables(tables: Mapping[str, SavableTable], sparse: Sequence[_Item]) -> Iterator[str]:
    """Yield what is wrong with the optimizers of tables."""
    for item in sparse:
        try:
            arguments.check_trained(item.obj, tables)
        except ValueError as error:
            yield f"{item.label}: {error}"
    if len(sparse) > 1:
        yield (
            f"{' and '.join(item.label for item in sparse)}: found {len(sparse)} optimizers of tables, expected one: "
            "make one with a group for each, such as SparseAdam([{'tables': [user], 'lr': 0.1}, {'tables': [item]}])"
        )
    among = [updater(item.obj) for item in sparse]
    for one, names in trainers_of(tables).items():
        if all(one is not other for other in among):
            yield f"optimizers: the {type(one).__name__} that trains {', '.join(map(repr, names))} is not among them"


def _about_parameters(model: nn.Module, dense: Sequence[_Item]) -> Iterator[str]:
    """Yield what is wrong with the optimizers of dense parameters; those of TorchRec name theirs by themselves."""
    own = {id(parameter) for parameter in model.parameters()}
    for item in (item for item in dense if not is_keyed(item.obj)):
        parameters = [parameter for group in item.obj.param_groups for parameter in group["params"]]
        trained = [parameter for parameter in parameters if has_values(parameter)]
        strange = [parameter for parameter in trained if id(parameter) not in own]
        if not trained:
            yield (
                f"{item.label}: {item.kind} trains nothing: all its parameters are empty, since model.parameters() has "
                "no rows of tables; recckpt.filter_out_sparse_param(model) gives the tables to an optimizer of tables"
            )
        elif strange:
            yield (
                f"{item.label}: {item.kind} trains {plural(len(strange), 'parameter')} that the model does not have "
                f"({_shapes(strange)}): attach a module that has all that is trained, such as a ModuleDict of the "
                "model and its loss; or make the optimizer of the parameters that the model has now"
            )


def _shapes(parameters: Sequence[Tensor]) -> str:
    shapes = ", ".join(str(tuple(parameter.shape)) for parameter in parameters[:3])
    return f"shape {shapes}{', ...' if len(parameters) > 3 else ''}"


def _about_schedulers(schedulers: Sequence[_Item], optimizers: Sequence[Optimizer]) -> Iterator[str]:
    """Yield what is wrong with schedulers: each is of optimizers that are saved too."""
    known = {id(one) for optimizer in optimizers if isinstance(optimizer, Optimizer) for one in _layers(optimizer)}
    for item in schedulers:
        if isinstance(item.obj, Optimizer):
            yield f"{item.label}: {item.kind} is an optimizer: give it in optimizers"
        several = getattr(item.obj, "optimizers", None)  # as accelerate's has them
        of = [getattr(item.obj, "optimizer", None), *(several if isinstance(several, list | tuple) else [])]
        strange = [one for one in of if isinstance(one, Optimizer) and id(one) not in known]
        if strange and not isinstance(item.obj, Optimizer):
            kinds = ", ".join(dict.fromkeys(type(updater(one)).__name__ for one in strange))
            yield f"{item.label}: {item.kind} is of an optimizer ({kinds}) that is not among the optimizers"


def _layers(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield an optimizer and those that it wraps."""
    yield optimizer
    if (inner := updater(optimizer)) is not optimizer:
        yield inner


def _about_names(objects: Sequence[_Item], positions: Sequence[_Item]) -> Iterator[str]:
    """Yield what cannot be registered, as registering it shows."""
    extra, io_state = extra_registry(), io_registry()
    for item in objects:
        try:
            arguments.check_registered(item.name, item.obj, None)
            extra.add(item.name, item.obj)
        except ValueError as error:
            yield f"{item.label}: {error}"
    for item in positions:
        if isinstance(item.obj, DataLoader) and not hasattr(item.obj, "state_dict"):
            yield (
                f"{item.label}: a {item.kind} of torch does not know where it is in the data: give torchdata's "
                "StatefulDataLoader in its place, or a dataset that has state_dict and load_state_dict, or omit it"
            )
            continue
        try:
            extra.check_new(item.name, item.obj)
            io_state.add(item.name, item.obj)
        except ValueError as error:
            yield f"{item.label}: {error}"


def _live_tables(
    model: nn.Module, optimizers: Sequence[Optimizer], tables: TablesOption, *, is_all_well: bool
) -> LiveTables | None:
    """Find the live tables of a model; those that were found for optimizers of before are closed where all is well."""
    if tables is None or isinstance(tables, LiveTables):
        live = tables
    elif isinstance(tables, Mapping):
        before = _live.get(id(model))
        if (
            is_all_well
            and before is not None
            and before.model is model
            and not _are_same(before.optimizers, optimizers)
        ):
            log.info("other optimizers train the model now: the manager that was attached for those of before is done")
            before.close()
        live = _live[id(model)] = live_tables(model, optimizers, **tables)
    else:
        what = "a dict of arguments of live_tables, what it has returned, or None"
        raise TypeError(f"found a {type(tables).__name__}, expected {what}")
    arguments.live_tables_of(model, live)
    if live is not None:
        _check_trainers(model, live, optimizers)
    return live


def _check_trainers(model: nn.Module, live: LiveTables, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that train live tables which were found for others: their steps would not be seen.

    Raises:
        ValueError: there is one; TorchRec's are not looked at.
    """
    weights = [(name, parameter) for name, parameter in parameters_of(model) if live.has_key(name)]
    for optimizer in (one for one in optimizers if not is_keyed(one)):
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        strange = [name for name, one in weights if id(one) in trained and not live.is_live(one, optimizer)]
        if strange:
            kind = type(updater(optimizer)).__name__
            raise ValueError(
                f"the {kind} here trains {first_few(strange)}, for which live_tables was given another optimizer: "
                "call it with those that train, or give arguments of it in place of what it returned"
            )


def _are_same(some: Iterable[object], others: Iterable[object]) -> bool:
    return {*map(id, some)} == {*map(id, others)}
