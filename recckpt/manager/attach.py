"""Makes a manager from a model and its optimizers: finds and names the objects to save, and reports problems."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from recckpt.dense.keyed_optimizer import is_keyed
from recckpt.dense.optimizers import groups_of, has_values, layers, scheduled_by, updater
from recckpt.dense.registered import extra_registry, io_registry
from recckpt.live.attached import with_marks
from recckpt.live.find import find_tables
from recckpt.live.tables import NO_TABLES, LiveTableOptions, LiveTables, attached_once, check_options
from recckpt.manager.autosave import SideSaves
from recckpt.manager.options import ManagerOptions
from recckpt.output_dir.candidates import CandidateFinder
from recckpt.parallel.ranks import DEFAULT_TIMEOUT_SEC, RanksNow, this_rank
from recckpt.policies.options import Near
from recckpt.policies.when import Moment, When
from recckpt.save import arguments
from recckpt.saver import Saver
from recckpt.sparse.optim.joint import JointOptimizer
from recckpt.sparse.optim.optimizer import SparseOptimizer, made
from recckpt.sparse.split import parameters_of, state_of
from recckpt.sparse.table.table import HashTable
from recckpt.text import first_few, plural
from recckpt.types import LiveTable, SavableTable

log = logging.getLogger("recckpt")

_live: WeakValueDictionary[int, LiveTables] = WeakValueDictionary()  # tables found here, by id of the model
_T = TypeVar("_T")
_Manager = TypeVar("_Manager")
OneOrMany: TypeAlias = _T | Sequence[_T] | Mapping[str, _T] | None  # one, several, several by name, or nothing
TablesOption: TypeAlias = LiveTables | LiveTableOptions | None  # live tables, arguments that find them, or nothing
FIND_ALL: LiveTableOptions = {}
_MEANINGS = {  # meanings of options in the log
    "save_interval": "",
    "max_keep": "",
    "async_save": " (training continues meanwhile)",
    "deltas": " (only changes)",
}


class _Item(NamedTuple):
    """One object among the arguments; ``label`` is for messages, ``name`` "" if the caller gave none."""

    label: str
    name: str
    obj: Any

    @property
    def kind(self) -> str:
        return type(updater(self.obj) if isinstance(self.obj, Optimizer) else self.obj).__name__


def live_tables(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer] = (),
    *,
    min_rows: int = 1000,
    names: Mapping[str, str] | None = None,
    exclude: Collection[str] = (),
    marks: str | Mapping[str, str] = "auto",
    audit: int = 0,
    adapters: Sequence[LiveTable] = (),
) -> LiveTables:
    """Find the embedding tables of a model that recckpt can save and restore in place, with their optimizers' states.

    Nothing in the model is replaced. Hooks announce which rows change, as long as the tables are open and referenced,
    for example by a saver. Call it on each rank after the model is wrapped and the optimizers are made, and
    before training and restoring; a second call for the same model returns the same tables. Not thread-safe.
    Collective if TorchRec has sharded the model.

    Args:
        model: a model with ``nn.Embedding``, ``nn.EmbeddingBag``, kernels of FBGEMM or collections of TorchRec.
        optimizers: the optimizers that train the tables; fused optimizers are found in the model.
        min_rows: smaller embeddings stay dense tensors.
        names: path of a module -> name of its table; other tables are named by their paths.
        exclude: paths of modules that stay dense.
        marks: how changed rows are found. ``"auto"`` uses hooks where possible; ``"fingerprints"`` compares
            fingerprints of all rows at each save, so it finds changes by any code. One value for all tables, or a dict,
            table name -> value.
        audit: every ``audit``-th save compares the hooks' marks with fingerprints of all rows, and fails if a row was
            missed. 0: each save compares some rows, and saves all rows if one was missed.
        adapters: tables in the memory of other libraries; these tables announce their changes.

    Raises:
        LiveTableError: tables cannot be saved in place; the message lists all that is wrong.
        TypeError, ValueError: an argument is invalid.
    """
    from recckpt.adapters.torchrec import TORCHREC

    options: dict[str, Any] = {"min_rows": min_rows, "exclude": exclude, "adapters": adapters}
    listed = check_options(model, optimizers, names=names, audit=audit, **options)
    ranks = RanksNow(DEFAULT_TIMEOUT_SEC).of(None, None)
    found, left = find_tables(model, listed, ranks, [TORCHREC], names=dict(names or {}), **options)
    return attached_once(model, with_marks(found, marks), left, ranks, audit=audit, optimizers=listed)


def attached(
    saver: partial[Saver],
    manager: partial[_Manager],
    model: nn.Module,
    optimizers: OneOrMany[Optimizer],
    *,
    schedulers: OneOrMany[Any],
    loader: OneOrMany[Any],
    tables: TablesOption,
) -> _Manager:
    """Find and name everything to save, make a saver of it, and the manager; see ``CheckpointManager.attach``.

    ``saver`` and ``manager`` already have their options; the log names options with defaults in ``attach``.
    """
    wrong = list[str]()
    try:
        ManagerOptions(**{field.name: manager.keywords[field.name] for field in fields(ManagerOptions)})
    except (TypeError, ValueError) as error:
        wrong.append(str(error))
    own = arguments.check_parts(model, None)
    parts = list(_parts(_items("optimizers", optimizers), wrong))
    sparse = [part for part in parts if isinstance(updater(part.obj), SparseOptimizer)]
    dense = _renamed((part for part in parts if part not in sparse), "dense_optim")
    others = _renamed(_items("schedulers", schedulers), "scheduler")
    positions = _renamed(_items("loader", loader), "loader")
    wrong += _about_tables(own, sparse)
    wrong += _about_parameters(model, dense)
    wrong += _about_schedulers(others, [item.obj for item in (*_items("", optimizers), *parts)])
    wrong += _about_names([*dense, *(item for item in others if not isinstance(item.obj, Optimizer))], positions)
    try:
        live = _live_tables(model, [part.obj for part in dense], tables, is_all_well=not wrong)
    except (TypeError, ValueError) as error:
        wrong.append(f"tables: {error}")
    if wrong:
        raise ValueError(f"attach: {plural(len(wrong), 'problem')}; nothing was made:\n  " + "\n  ".join(wrong))
    # Refuses an invalid rank before anything is made.
    rank, _ = this_rank(manager.keywords["shard_id"], manager.keywords["shard_num"])
    made = saver(model, sparse[0].obj if sparse else None, tables=live)
    for item in (*dense, *others):
        made.register_for_checkpointing(item.name, item.obj)
    for item in positions:
        made.register_io_state(item.name, item.obj)
    run = manager(made)
    what = ", ".join(_saved(made, own, live, [*dense, *others, *positions]))  # on all ranks: FSDP gathers its state
    if rank == 0:
        how = ", ".join(_how({**saver.keywords, **manager.keywords}))
        log.info("%s: saves %s; %s", made.output_dir, what, how)
    return run


def guests_of(
    saver: Saver, regular: When, begin: Moment, is_first: Callable[[], bool]
) -> tuple[Sequence[SideSaves], CandidateFinder]:
    """Return the manager's saves beside checkpoints (near saves), and the candidates that it can restore.

    ``regular`` says when checkpoints are made, ``begin`` where the run begins, ``is_first`` whether this rank logs.
    """
    saves = saver.near_saves
    if saves is None:
        return (), CandidateFinder()
    from recckpt.near.steps import NearSteps

    return [NearSteps(saves, regular, begin, is_first)], saves.tier.finder


def _saved(
    saver: Saver, tables: Mapping[str, SavableTable], live: LiveTables | None, items: Iterable[_Item]
) -> Iterator[str]:
    live = NO_TABLES if live is None else live
    if tables:
        by = "" if saver.sparse_optim is None else f" of {type(saver.sparse_optim).__name__}"
        yield f"{plural(len(tables), 'table')}{by} ({first_few(list(tables))})"
    if live:
        yield f"{plural(len(live), 'live table')} ({first_few(list(live))})"
    yield plural(len(live.joined(*state_of(saver.model))[1]), "dense tensor")
    for name, obj in {item.name: item.obj for item in items}.items():
        yield f"{name!r} ({type(obj).__name__})"


def _how(options: Mapping[str, Any]) -> Iterator[str]:
    for name, meaning in _MEANINGS.items():
        yield f"{name}={options[name]!r}{meaning if options[name] else ''}"
    near: Near | None = options["near"]
    if near is not None:
        when = f"every {near.interval} steps" if isinstance(near.interval, int) else f"(interval={near.interval!r})"
        copies = "1 if there are several hosts" if near.copies is None else near.copies
        yield f"near={os.fspath(near.path)} {when}, copies={copies}"


def trainers_of(tables: Mapping[str, SavableTable]) -> dict[SparseOptimizer, list[str]]:
    """Return this process's optimizers that train one of the tables, with the names of those tables."""
    alive = [one for reference in made.valuerefs() if (one := reference()) is not None]
    own = {name: table for name, table in tables.items() if isinstance(table, HashTable)}
    trained = {one: [name for name, table in own.items() if one.trains(table)] for one in alive}
    return {one: names for one, names in trained.items() if names}


def _items(argument: str, things: OneOrMany[Any]) -> list[_Item]:
    if things is None:
        return []
    if isinstance(things, Mapping):
        return [_Item(f"{argument}[{name!r}]", name, obj) for name, obj in things.items()]
    if isinstance(things, list | tuple):
        return [_Item(f"{argument}[{number}]", "", obj) for number, obj in enumerate(things)]
    return [_Item(argument, "", things)]


def _renamed(items: Iterable[_Item], name: str) -> list[_Item]:
    """Name the objects without a name; the second object of a name is called ``name_1``."""
    counts = Counter[str]()
    named = []
    for item in items:
        first = item.name or name
        named.append(_Item(item.label, f"{first}_{counts[first]}" if counts[first] else first, item.obj))
        counts[first] += 1
    return named


def _parts(items: Iterable[_Item], problems: list[str]) -> Iterator[_Item]:
    """Yield each optimizer once; yield the parts of a joint optimizer in place of the joint optimizer."""
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


def _about_tables(tables: Mapping[str, SavableTable], sparse: Sequence[_Item]) -> Iterator[str]:
    for item in sparse:
        try:
            arguments.check_trained(item.obj, tables)
        except ValueError as error:
            yield f"{item.label}: {error}"
    if len(sparse) > 1:
        yield (
            f"{' and '.join(item.label for item in sparse)}: found {len(sparse)} optimizers of tables, expected one: "
            "make one with a group per table, such as SparseAdam([{'tables': [user], 'lr': 0.1}, {'tables': [item]}])"
        )
    among = [updater(item.obj) for item in sparse]
    for one, names in trainers_of(tables).items():
        if all(one is not other for other in among):
            yield f"optimizers: the {type(one).__name__} that trains {', '.join(map(repr, names))} is not among them"


def _about_parameters(model: nn.Module, dense: Sequence[_Item]) -> Iterator[str]:
    """Yield problems of optimizers of dense parameters; TorchRec's optimizers name their own parameters."""
    own = {id(parameter) for parameter in model.parameters()}
    for item in (item for item in dense if not is_keyed(item.obj)):
        parameters = [parameter for group in groups_of(item.obj) for parameter in group["params"]]
        trained = [parameter for parameter in parameters if has_values(parameter)]
        strange = [parameter for parameter in trained if id(parameter) not in own]
        if not trained:
            yield (
                f"{item.label}: {item.kind} trains nothing: all its parameters are empty, because model.parameters() "
                "contains no rows of tables; pass recckpt.recis.filter_out_sparse_param(model) to an optimizer of "
                "tables"
            )
        elif strange:
            shapes = ", ".join(str(tuple(parameter.shape)) for parameter in strange[:3])
            shapes += ", ..." if len(strange) > 3 else ""
            yield (
                f"{item.label}: {item.kind} trains {plural(len(strange), 'parameter')} that the model does not have "
                f"(shape {shapes}): attach a module with all trained parameters, such as a ModuleDict of the model "
                "and its loss; or create the optimizer with the model's present parameters"
            )


def _about_schedulers(schedulers: Sequence[_Item], optimizers: Sequence[Optimizer]) -> Iterator[str]:
    known = {id(one) for optimizer in optimizers if isinstance(optimizer, Optimizer) for one in layers(optimizer)}
    for item in schedulers:
        if isinstance(item.obj, Optimizer):
            yield f"{item.label}: {item.kind} is an optimizer: pass it in optimizers"
        strange = [one for one in scheduled_by(item.obj) if id(one) not in known]
        if strange:
            kinds = ", ".join(dict.fromkeys(type(updater(one)).__name__ for one in strange))
            yield f"{item.label}: {item.kind} belongs to an optimizer ({kinds}) that is not among the optimizers"


def _about_names(objects: Sequence[_Item], positions: Sequence[_Item]) -> Iterator[str]:
    """Try to register each object, and yield the problems."""
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
                f"{item.label}: a {item.kind} of torch has no state with its position: pass torchdata's "
                "StatefulDataLoader, or ElasticLoader or ElasticShards of recckpt.positions, or a dataset that has "
                "state_dict and load_state_dict, or omit it"
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
    """Find a model's live tables; if there are no problems, close the tables found for earlier optimizers."""
    if tables is None or isinstance(tables, LiveTables):
        live = tables
    elif isinstance(tables, Mapping):
        before = _live.get(id(model))
        is_before = is_all_well and before is not None and before.model is model
        if before is not None and is_before and {*map(id, before.optimizers)} != {*map(id, optimizers)}:
            log.info(
                "other optimizers train the model now; the manager that was attached for the earlier "
                "optimizers is closed"
            )
            before.close()
        live = _live[id(model)] = live_tables(model, optimizers, **tables)
    else:
        what = "a dict of arguments of live_tables, its result, or None"
        raise TypeError(f"found a {type(tables).__name__}, expected {what}")
    arguments.live_tables_of(model, live)
    if live is not None:
        # Steps of optimizers that live_tables was not given would not be seen, except TorchRec's, which have hooks.
        weights = [(name, parameter) for name, parameter in parameters_of(model) if live.has_key(name)]
        for optimizer in (one for one in optimizers if not is_keyed(one)):
            trained = {id(parameter) for group in groups_of(optimizer) for parameter in group["params"]}
            strange = [name for name, one in weights if id(one) in trained and not live.is_live(one, optimizer)]
            if strange:
                kind = type(updater(optimizer)).__name__
                raise ValueError(
                    f"the {kind} here trains {first_few(strange)}, but live_tables was given another optimizer for it: "
                    "pass the optimizers that train to live_tables, or pass its arguments in place of its result"
                )
    return live
