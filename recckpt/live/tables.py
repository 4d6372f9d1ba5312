"""The live tables of a model: found, named, and attached once; what a saver takes as ``tables=``."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from recckpt.errors import LiveTableError
from recckpt.live.absent import AbsentTable
from recckpt.live.attached import AttachedTable
from recckpt.live.dtensor import local_of
from recckpt.live.find import find_tables
from recckpt.live.found import FINGERPRINTS, OWN, FoundTable, with_marks
from recckpt.live.keyed_table import AttachedKeyedTable
from recckpt.live.keyed_types import KeyedLiveTable
from recckpt.live.library_rows import LibraryRows
from recckpt.live.library_types import LibraryTable
from recckpt.live.options import check_names, check_options, listed_optimizers
from recckpt.parallel.ranks import DEFAULT_TIMEOUT_SEC, Ranks, RanksNow
from recckpt.text import Table, count, plain
from recckpt.types import EMBEDDING, LiveTable, SavableTable, SlotSpec

_made: weakref.WeakValueDictionary[int, LiveTables] = weakref.WeakValueDictionary()  # by id of the model


class LiveTables(Mapping[str, AttachedTable]):
    """The live tables of a model by name; ``print`` shows what is saved how, and why not better.

    Made by :func:`live_tables`.

    Attributes:
        optimizers: those that it was given, which may train other parameters too.
        libraries: by name, hash tables of other libraries, which are not among those of the model.
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
        libraries: Sequence[LibraryTable] = (),
    ) -> None:
        self._ranks = ranks if ranks is not None and any(table.collection for table in tables) else None
        self._model = None if model is None else weakref.ref(model)
        self._found = {table.live.name: table for table in tables}
        self._tables = _attached_all(self._found, audit)
        self._keys = frozenset(key for entry in self._found.values() for key in entry.keys)
        self._left = left
        self.optimizers = tuple(optimizers)
        self.libraries = {library.name: LibraryRows(library) for library in libraries}
        self._is_closed = False

    __eq__, __hash__ = object.__eq__, object.__hash__  # each has doors of its own

    def __getitem__(self, name: str) -> AttachedTable:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def model(self) -> nn.Module | None:
        """The model whose tables these are, while it is there."""
        return None if self._model is None else self._model()

    def joined(
        self, tables: Mapping[str, SavableTable], dense: Mapping[str, Any]
    ) -> tuple[dict[str, SavableTable], dict[str, Any]]:
        """Return the tables and the dense state of the model, with the weights of live tables among the tables.

        Raises:
            ValueError: a live table has the name of another table.
            LiveTableError: the model has other weights by now.
        """
        self._check_weights(dense)
        if twice := sorted(tables.keys() & (self.keys() | self.libraries.keys())):
            raise ValueError(f"two tables are named {twice[0]!r}: give the live one another name by names=")
        left = {key: value for key, value in dense.items() if key not in self._keys}
        return {**tables, **self, **self.libraries}, left

    @property
    def collections(self) -> Mapping[nn.Module, Collection[str]]:
        """The sharded collections that have some of the tables, with the keys of these in their state dicts."""
        collections = defaultdict[nn.Module, set[str]](set)
        for table in self._found.values():
            if table.collection is not None:
                collections[table.collection] |= table.keys_in_collection
        return collections

    def tensors_of(self, name: str) -> tuple[str, ...]:
        """Return the names of the dense tensor that a checkpoint without live tables has in place of a table."""
        return self._found[name].tensors

    def share_settings(self) -> None:
        """Let ranks that have no rows of a table know what others know of its optimizer. Collective, if there are such.

        Raises:
            RankLostError: a rank is missing.
        """
        if self._ranks is None:
            return
        here = {name: table.live for name, table in self.items() if _is_here(table)}
        of_ranks = self._ranks.on_all(lambda: {name: (t.scalars(), t.settings()) for name, t in here.items()})
        for name, table in self.items():
            if not _is_here(table):
                table.live.finish(*next(known[name] for known in of_ranks if name in known))

    def has_key(self, name: str) -> bool:
        """Say whether a key of a state dict, with or without a prefix of an optimizer, is a weight of a live table."""
        return name in self._keys or any(name.endswith(f".{key}") for key in self._keys)

    def is_live(self, parameter: Tensor, optimizer: Optimizer) -> bool:
        """Say whether what an optimizer keeps of a parameter is saved with the rows of a live table."""
        return any(
            parameter is weight and entry.is_trained_by(optimizer)
            for entry in self._found.values()
            for weight in entry.weights()
        )

    def without(self, parameters: Iterable[tuple[str, Tensor]], optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        """Yield those of named parameters of which an optimizer has a state that is not saved with rows."""
        return ((name, parameter) for name, parameter in parameters if not self.is_live(parameter, optimizer))

    def close(self) -> None:
        """Remove the hooks. Savers that have these tables refuse to save and load from now on; others can be made."""
        self._is_closed = True
        for table in self.values():
            table.close()
        if (model := self.model) is not None and _made.get(id(model)) is self:
            del _made[id(model)]

    def check_open(self) -> None:
        """Refuse tables that are closed.

        Raises:
            LiveTableError: they are.
        """
        if self._is_closed:
            raise LiveTableError(
                f"the live tables {', '.join(map(repr, self))} are closed: call live_tables once more, and give the "
                "saver what that returns"
            )

    def check_same(self, tables: Sequence[FoundTable], libraries: Sequence[LibraryTable]) -> None:
        """Refuse tables that are others than these.

        Raises:
            LiveTableError: they are.
        """
        before, now = (
            {one.live.name: (one.path, one.optimizer, one.marks, None if one.keys else one.live) for one in some}
            for some in (self._found.values(), tables)
        )
        if before != now or {id(table.library) for table in self.libraries.values()} != {*map(id, libraries)}:
            raise LiveTableError(
                "the model has live tables already, and others are asked for, or other optimizers train them: close() "
                "those, and make another saver"
            )

    def _check_weights(self, dense: Mapping[str, Any]) -> None:
        """Refuse a model that has another tensor in the place of a table, as once its vocabulary was resized."""
        other = [
            name
            for name, entry in self._found.items()
            for key in (entry.keys if entry.is_tensor else ())
            if isinstance(there := dense.get(key), Tensor) and not _is_same(there, self[name].live.tensors()[EMBEDDING])
        ]
        if other:
            raise LiveTableError(
                f"{', '.join(map(repr, dict.fromkeys(other)))}: the model has other weights than those that "
                "live_tables took: close() the live tables, call live_tables once more, and make another saver"
            )

    def __str__(self) -> str:
        rows = [
            _row(name, entry.live.n_rows, self[name].specs, entry.kind, entry.marks, entry.why or "")
            for name, entry in self._found.items()
        ]
        rows += [
            _row(name, len(table), table.specs, type(table.library).__name__, OWN, "")
            for name, table in self.libraries.items()
        ]
        table = Table(("table", "rows x dim", "kind", "slots", "marks", "why"), rows)
        left = [f"not a live table: {path}: {why}" for path, why in self._left.items()]
        return "\n".join([*plain([table] if rows else ["no live tables"]), *left])

    __repr__ = __str__


def live_tables(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer] = (),
    *,
    min_rows: int = 1000,
    names: Mapping[str, str] | None = None,
    exclude: Collection[str] = (),
    marks: str | Mapping[str, str] = "auto",
    audit: int = 0,
    adapters: Sequence[LiveTable | LibraryTable] = (),
) -> LiveTables:
    """Find the embedding tables of a model that recckpt saves where they lie, with their optimizers' states.

    Nothing of the model is replaced; hooks announce which rows change, while the tables are referenced, by a saver for
    one, and not closed. Call it on each rank once the model is wrapped and the optimizers are made,
    before training and restoring; a second call for the same model gives the same tables. Not thread-safe.
    Collective where TorchRec has sharded the model.

    Args:
        model: whose ``nn.Embedding`` and ``nn.EmbeddingBag``, kernels of FBGEMM and collections of TorchRec are tables.
        optimizers: those that train them; fused ones are found in the model.
        min_rows: smaller embeddings stay dense tensors.
        names: path of a module -> name of its table; other tables are called as their paths.
        exclude: paths of modules that stay dense.
        marks: how changed rows are known: ``"auto"``, or ``"fingerprints"``: by looking at all rows at each save,
            whoever writes them. For all tables, or by the names of tables.
        audit: every ``audit``-th save compares the marks of hooks with fingerprints, and fails where a row was missed;
            0 for never.
        adapters: tables in the memory of somebody else, which announce what changes in them, and hash tables of other
            libraries, which export it.

    Raises:
        LiveTableError: tables cannot be saved so; says all that is wrong at once.
        TypeError, ValueError: an argument is not what it can be.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, found a {type(model).__name__}")
    listed = listed_optimizers(optimizers)
    check_options(min_rows, names, exclude, audit, adapters)
    ranks = RanksNow(DEFAULT_TIMEOUT_SEC).of(None, None)
    libraries = [one for one in adapters if isinstance(one, LibraryTable)]
    announcing = [one for one in adapters if isinstance(one, LiveTable)]
    found, left = find_tables(
        model, listed, ranks, min_rows=min_rows, names=dict(names or {}), exclude=exclude, adapters=announcing
    )
    check_names(found, libraries)
    found = with_marks(found, marks)
    made = _made.get(id(model))
    if made is not None and made.model is model:
        made.check_same(found, libraries)
        return made
    tables = LiveTables(model, found, left, ranks, audit=audit, optimizers=listed, libraries=libraries)
    _made[id(model)] = tables
    return tables


def _attached_all(tables: Mapping[str, FoundTable], audit: int) -> dict[str, AttachedTable]:
    """Attach all tables, or none of them.

    Raises:
        LiveTableError: some cannot be saved; says all that is wrong.
    """
    attached, problems = dict[str, AttachedTable](), []
    for name, table in tables.items():
        try:
            attached[name] = _attached(table, audit)
        except LiveTableError as error:
            problems.append(str(error))
    if problems:
        for each in attached.values():
            each.close()
        raise LiveTableError("; ".join(problems))
    return attached


def _attached(table: FoundTable, audit: int) -> AttachedTable:
    says_what_changes = table.marks != FINGERPRINTS
    options: dict[str, Any] = {"is_announced": table.is_announced, "says_what_changes": says_what_changes}
    if isinstance(table.live, KeyedLiveTable):
        return AttachedKeyedTable(table.live, audit=audit, **options)
    return AttachedTable(table.live, audit=audit, **options)


def _is_here(table: AttachedTable) -> bool:
    return not isinstance(table.live, AbsentTable)


def _is_same(one: Tensor, other: Tensor) -> bool:
    here = local_of(one)
    return here.shape == other.shape and here.data_ptr() == other.data_ptr()


def _row(name: str, n_rows: int, specs: Sequence[SlotSpec], kind: str, *marks_and_why: str) -> tuple[str, ...]:
    embedding, *others = specs
    shape = f"{count(n_rows)} x {'x'.join(map(str, embedding.shape))}"
    return name, shape, kind, ", ".join(spec.name for spec in others) or "-", *marks_and_why


NO_TABLES = LiveTables(None, (), {})
