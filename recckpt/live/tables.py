"""The live tables of a model, attached once per model: the ``tables=`` argument of a saver."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, TypedDict

from torch import Tensor, nn
from torch.optim import Optimizer

from recckpt.dense.optimizers import updater
from recckpt.errors import LiveTableError
from recckpt.live.attached import FINGERPRINTS, HOOKED, AttachedTable, FoundTable
from recckpt.live.boxes import AbsentTable, local_of
from recckpt.parallel.ranks import Ranks
from recckpt.sparse.optim.optimizer import SparseOptimizer, plain
from recckpt.sparse.split import load_dense
from recckpt.text import Table, count
from recckpt.text import plain as as_text
from recckpt.types import EMBEDDING, LiveTable, SavableTable, is_hashtable, is_list, positive_int

_made: weakref.WeakValueDictionary[int, LiveTables] = weakref.WeakValueDictionary()  # by id of the model


def check_options(
    model: Any, optimizers: Any, *, min_rows: Any, names: Any, exclude: Any, audit: Any, adapters: Any
) -> list[Optimizer]:
    """Check the arguments of ``live_tables`` and return the optimizers as a list."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, found a {type(model).__name__}")
    listed = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    for one in listed:
        if not isinstance(one, Optimizer):
            what = f"the class {one.__name__}" if isinstance(one, type) else f"a {type(one).__name__}"
            raise TypeError(f"optimizers must be optimizers of torch, found {what}")
    positive_int("min_rows", min_rows)
    if names is not None and not (isinstance(names, Mapping) and all(isinstance(path, str) for path in names)):
        raise TypeError(f"names must be a dict, path of a module -> name of its table, found {names!r:.200}")
    if not (is_list(exclude) or isinstance(exclude, Set)) or not all(isinstance(path, str) for path in exclude):
        raise TypeError(f"exclude must be a list of paths of modules, found {exclude!r:.200}")
    if type(audit) is not int or audit < 0:
        raise ValueError(f"audit must be an int of at least 0, found {audit!r}")
    if not is_list(adapters):
        raise TypeError(f"adapters must be a list of tables, found a {type(adapters).__name__}")
    for adapter in adapters:
        if not isinstance(adapter, LiveTable):
            hint = ", a SavableTable: return it from the state dict of the model" if is_hashtable(adapter) else ""
            raise TypeError(
                f"adapters must be tables as recckpt.types.LiveTable, found a {type(adapter).__name__}{hint}"
            )
    return listed


class LiveTables(Mapping[str, AttachedTable]):
    """The live tables of a model by name; ``print`` shows how each is saved, and why a faster method is not possible.

    Made by :func:`recckpt.live.live_tables`.

    Attributes:
        optimizers: the optimizers that were passed; they may also train other parameters.
    """

    def __init__(
        self,
        model: nn.Module | None,
        tables: Sequence[FoundTable],
        left: Mapping[str, str],
        ranks: Ranks | None = None,
        *,
        audit: int = 0,
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        self._ranks = ranks if ranks is not None and any(table.collection for table in tables) else None
        self._model = None if model is None else weakref.ref(model)
        self._found = {table.live.name: table for table in tables}
        self._tables = _attached_all(self._found, audit)
        self._keys = frozenset(key for entry in self._found.values() for key in entry.keys)
        self._left = left
        self.optimizers = tuple(optimizers)
        self._is_closed = False

    __eq__, __hash__ = object.__eq__, object.__hash__  # by identity: each object has hooks of its own

    def __getitem__(self, name: str) -> AttachedTable:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def model(self) -> nn.Module | None:
        return None if self._model is None else self._model()

    def joined(
        self, tables: Mapping[str, SavableTable], dense: Mapping[str, Any]
    ) -> tuple[dict[str, SavableTable], dict[str, Any]]:
        """Internal: return tables and dense state of the model, with weights of live tables among the tables.

        Raises:
            ValueError: a live table has the name of another table.
            LiveTableError: the model's weights were replaced later, for example by resizing its vocabulary.
        """
        other = []
        for name, entry in self._found.items():
            for key in entry.keys if entry.is_tensor else ():
                there = dense.get(key)
                if isinstance(there, Tensor):
                    local, here = local_of(there), self[name].live.tensors()[EMBEDDING]
                    if (local.shape, local.data_ptr()) != (here.shape, here.data_ptr()):
                        other.append(name)
        if other:
            raise LiveTableError(
                f"{', '.join(map(repr, dict.fromkeys(other)))}: the model's weights were replaced after live_tables "
                "was called: close() the live tables, call live_tables again, and make a new saver"
            )
        if twice := sorted(tables.keys() & self.keys()):
            raise ValueError(f"two tables are named {twice[0]!r}: rename the live one with names=")
        left = {key: value for key, value in dense.items() if key not in self._keys}
        return {**tables, **self}, left

    def load_dense(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Internal: load the dense state of a model; sharded collections keep the values of their live tables."""
        collections = defaultdict[nn.Module, set[str]](set)
        load: Callable[[nn.Module, Mapping[str, Tensor]], object] = load_dense
        for table in self._found.values():
            if table.collection is not None and table.load_around is not None:
                load = partial(table.load_around, collections)
                # Only keys inside this table's module: other keys belong to modules that map its ids.
                keys = {key for key in table.keys if key.startswith(f"{table.path}.")}
                collections[table.collection] |= {".".join(key.rsplit(".", 3)[-3:]) for key in keys}
        load(model, state)

    def tensors_of(self, name: str) -> tuple[str, ...]:
        """Internal: return the names under which a checkpoint without live tables has a table's tensors."""
        return self._found[name].tensors

    def share_settings(self) -> None:
        """Internal: send a table's optimizer settings to ranks without its rows. Collective if there are such ranks.

        Raises:
            RankLostError: a rank is missing.
        """
        if self._ranks is None:
            return
        here = {name: table.live for name, table in self.items() if not isinstance(table.live, AbsentTable)}
        of_ranks = self._ranks.on_all(lambda: {name: (t.scalars(), t.settings()) for name, t in here.items()})
        for name, table in self.items():
            if name not in here:
                table.live.finish(*next(known[name] for known in of_ranks if name in known))

    def has_key(self, name: str) -> bool:
        """Internal: return whether a key, with or without an optimizer's prefix, is a weight of a live table."""
        return name in self._keys or any(name.endswith(f".{key}") for key in self._keys)

    def is_live(self, parameter: Tensor, optimizer: Optimizer) -> bool:
        """Internal: return whether an optimizer's state of a parameter is saved with the rows of a live table."""
        for entry in self._found.values():
            if any(parameter is weight for weight in entry.weights()):
                is_trained = entry.is_announced if entry.optimizer is None else updater(optimizer) is entry.optimizer
                if is_trained:
                    return True
        return False

    def weights_with_states(self) -> Iterator[Tensor]:
        """Internal: yield the weights whose optimizers' states are saved with the rows."""
        for entry in self._found.values():
            if entry.is_announced or entry.optimizer is not None:
                yield from entry.weights()

    def close(self) -> None:
        """Remove the hooks. Savers with these tables refuse to save and load from then on; new ones can be made."""
        self._is_closed = True
        for table in self.values():
            table.close()
        if (model := self.model) is not None and _made.get(id(model)) is self:
            del _made[id(model)]

    def check_open(self) -> None:
        """Internal: raise an error if the tables are closed.

        Raises:
            LiveTableError: the tables are closed.
        """
        if self._is_closed:
            raise LiveTableError(
                f"the live tables {', '.join(map(repr, self))} are closed: call live_tables again, and pass its "
                "result to the saver"
            )

    def check_same(self, tables: Sequence[FoundTable]) -> None:
        """Internal: raise an error if ``tables`` differ from these tables.

        Raises:
            LiveTableError: the tables differ.
        """
        before, now = (
            {
                one.live.name: (
                    *(one.path, one.optimizer, None if one.keys else one.live),
                    "gradient" if one.why == HOOKED else one.marks,  # other code may have added hooks since
                )
                for one in some
            }
            for some in (self._found.values(), tables)
        )
        if before != now:
            raise LiveTableError(
                "the model already has live tables that differ from the requested ones, or have other optimizers: "
                "close() the existing ones, and make a new saver"
            )

    def __str__(self) -> str:
        rows = []
        for name, entry in self._found.items():
            marks, why, (embedding, *others) = entry.marks, entry.why or "", self[name].specs
            if marks != FINGERPRINTS and not self[name].rows.says_what_changes:
                marks = FINGERPRINTS
                why = "a save found changed rows that no hook had marked: some code writes rows without calling a hook"
            shape = f"{count(entry.live.n_rows)} x {'x'.join(map(str, embedding.shape))}"
            slots = ", ".join(spec.name for spec in others) or "-"
            rows.append((name, shape, entry.kind, slots, marks, why))
        table = Table(("table", "rows x dim", "kind", "slots", "marks", "why"), rows)
        left = [f"not a live table: {path}: {why}" for path, why in self._left.items()]
        return "\n".join([*as_text([table] if rows else ["no live tables"]), *left])

    __repr__ = __str__


class LiveTableOptions(TypedDict, total=False):  # arguments of live_tables
    min_rows: int
    names: Mapping[str, str] | None
    exclude: Collection[str]
    marks: str | Mapping[str, str]
    audit: int
    adapters: Sequence[LiveTable]


def attached_once(
    model: nn.Module, tables: Sequence[FoundTable], left: Mapping[str, str], ranks: Ranks, **options: Any
) -> LiveTables:
    """Return the live tables that a model already has, or new ones. Raises LiveTableError if they differ."""
    made = _made.get(id(model))
    if made is not None and made.model is model:
        made.check_same(tables)
        return made
    made = _made[id(model)] = LiveTables(model, tables, left, ranks, **options)
    return made


def _attached_all(tables: Mapping[str, FoundTable], audit: int) -> dict[str, AttachedTable]:
    """Attach all tables or none; a single LiveTableError lists all tables that cannot be saved."""
    attached, problems = dict[str, AttachedTable](), []
    for name, table in tables.items():
        how: dict[str, Any] = {"is_announced": table.is_announced, "says_what_changes": table.marks != FINGERPRINTS}
        try:
            attached[name] = table.attached(table.live, audit=audit, **how)
        except LiveTableError as error:
            problems.append(str(error))
    if problems:
        for each in attached.values():
            each.close()
        raise LiveTableError("; ".join(problems))
    return attached


NO_TABLES = LiveTables(None, (), {})


class RowOptimizers:
    """The optimizer state saved with the rows of all tables: steps by table, and settings.

    ``sparse_optim`` is the optimizer of recckpt's own tables, or None; each live table has a group of its own.
    """

    def __init__(self, sparse_optim: Optimizer | None, tables: LiveTables) -> None:
        self._sparse_optim, self._tables = sparse_optim, tables

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The settings of all groups; groups of live tables are copies."""
        own = self._sparse_optim.param_groups if self._sparse_optim is not None else []
        return [*own, *self._groups()]

    def state_dict(self) -> dict[str, Any]:
        own = self._sparse_optim.state_dict() if self._sparse_optim is not None else {}
        slots = {slot for table in self._tables.values() for slot in table.live.tensors() if slot != EMBEDDING}
        steps = {
            name: {"step": int(step)}
            for name, table in self._tables.items()
            if (step := table.live.scalars().get("step")) is not None
        }
        return {
            "slots": [*own.get("slots", ()), *sorted(slots - {*own.get("slots", ())})],
            "state": {**own.get("state", {}), **steps},
            "param_groups": [*own.get("param_groups", ()), *self._groups()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load each optimizer's part of a saved state; a live table without a saved step starts at step 0."""
        groups = state["param_groups"]
        if self._sparse_optim is not None:
            ours = [group for group in groups if not {*group["tables"]} <= self._tables.keys()]
            steps = {name: values for name, values in state["state"].items() if name not in self._tables}
            slots = self._sparse_optim.state_dict()["slots"]
            self._sparse_optim.load_state_dict({"slots": slots, "state": steps, "param_groups": ours})
        now = {name: group for group in self._groups() for name in group["tables"]}
        settings = {name: group for group in groups for name in group["tables"] if name in self._tables}
        # Tables may share a group: set changed settings last, so that a table that is not loaded overwrites nothing.
        for name in sorted(settings, key=lambda name: settings[name] != now.get(name)):
            own = {key: value for key, value in settings[name].items() if key != "tables"}
            self._tables[name].live.finish({}, own)
        scalars = {name: state["state"].get(name, {"step": 0}) for name in self._tables}
        # The tables of a kernel share one step: set the largest last, so that a table at step 0 does not reset it.
        for name in sorted(scalars, key=lambda name: int(scalars[name].get("step", 0))):
            self._tables[name].live.finish(scalars[name], {})

    def is_live(self, table: str) -> bool:
        return table in self._tables

    def set_settings(self, groups: Iterable[Mapping[str, Any]]) -> None:
        groups = list(groups)
        own = self._sparse_optim.param_groups if self._sparse_optim is not None else []
        for now, before in zip(own, groups, strict=False):
            now.update({key: value for key, value in before.items() if key != "params"})
        if isinstance(self._sparse_optim, SparseOptimizer):
            self._sparse_optim.declare_slots()
        for group in groups[len(own) :]:
            [name] = group["tables"]
            self._tables[name].live.finish({}, {key: value for key, value in group.items() if key != "tables"})

    def _groups(self) -> list[dict[str, Any]]:
        return [
            {**{key: plain(value) for key, value in table.live.settings().items()}, "tables": [name]}
            for name, table in self._tables.items()
            if table.live.settings()
        ]


def row_optimizers(sparse_optim: Optimizer | None, tables: LiveTables) -> Optimizer | RowOptimizers | None:
    """Return an object with the optimizer state of all tables; without live tables, the sparse optimizer itself."""
    return RowOptimizers(sparse_optim, tables) if tables else sparse_optim
