"""Tables behind TorchRec's managed collision (MCH, ZCH) as live ones: by raw ids, and the rows without one beside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from recckpt.errors import LiveTableError
from recckpt.live.collision_map import CollisionMap
from recckpt.live.found import FoundTable
from recckpt.live.keyed_types import IdMap
from recckpt.live.kinds import is_a
from recckpt.live.shared_rows import SharedRows
from recckpt.parallel.ranks import rank_and_size
from recckpt.sparse.files.owners import EVERY_ID, LEAST, IdSpan, IdSpans, OwnedIds
from recckpt.types import Box, Door, WatchedTable

_UNSHARDED = "torchrec.modules.mc_embedding_modules", "BaseManagedCollisionEmbeddingCollection"


class _OfSharedRows:
    """What both tables of shared rows have of the rows.

    Args:
        name: in checkpoints.
        rows: the rows of this rank.
        ids: which raw id has which of them.
    """

    def __init__(self, name: str, rows: SharedRows, ids: CollisionMap) -> None:
        self.name, self.n_rows = name, rows.live.n_rows
        self._rows, self._ids = rows, ids

    def box(self) -> Box:
        """Return the rows of this rank."""
        return self._rows.live.box()

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the slots of all rows, as they lie."""
        return self._rows.live.tensors()

    def attach(self, door: Door) -> Callable[[], object]:
        """Announce changes of rows; which ids have them is asked for at each save."""
        return self._rows.attach(door)

    def look(self) -> None:
        """Look for writes that were not announced, where the rows can say so."""
        if isinstance(self._rows.live, WatchedTable):
            self._rows.live.look()


class RawIdTable(_OfSharedRows):
    """The rows that have an id, by their raw ids.

    Args:
        n_ids: how many ids there can be over all ranks.
        owned_ids: the raw ids that this rank has rows for.
        others: as of the base.
    """

    def __init__(self, name: str, rows: SharedRows, ids: CollisionMap, n_ids: int, owned_ids: OwnedIds) -> None:
        super().__init__(name, rows, ids)
        self.n_ids: int | None = n_ids
        self.owned_ids = owned_ids

    def prepare(self) -> None:
        """Bring rows and map up to date.

        Raises:
            LiveTableError: the buffers of the map are not as its module leaves them; or as of the rows.
        """
        self._rows.live.prepare()
        try:
            self._ids.check()
        except LiveTableError as error:
            raise LiveTableError(f"table {self.name!r}: {error}") from error

    def scalars(self) -> Mapping[str, int | float]:
        """Return those of the optimizer."""
        return self._rows.live.scalars()

    def settings(self) -> Mapping[str, Any]:
        """Return those of the optimizer."""
        return self._rows.live.settings()

    def finish(self, scalars: Mapping[str, int | float], settings: Mapping[str, Any]) -> None:
        """Take over scalars and settings of the optimizer."""
        self._rows.live.finish(scalars, settings)

    def id_map(self) -> IdMap:
        """Return the raw ids of now."""
        return self._ids.read()

    def place(self, ids: Tensor, meta: Mapping[str, Tensor], *, drops: bool) -> Tensor:
        """Return the rows for raw ids."""
        try:
            return self._ids.place(ids, meta, drops=drops)
        except LiveTableError as error:
            raise LiveTableError(f"table {self.name!r}: {error}") from error

    def take_ids(self, id_map: IdMap) -> None:
        """Make these the raw ids."""
        self._ids.write(id_map)


class UnassignedTable(_OfSharedRows):
    """The rows that no id has: an id that is admitted starts from what lies there.

    Their ids are the numbers of rows; that of the row ``r`` which all ids without a row of a shard share is ``~r``.
    """

    n_ids: int | None = None

    def prepare(self) -> None:
        """Do nothing: the table of the raw ids has done it."""

    def scalars(self) -> Mapping[str, int | float]:
        """Return nothing: they stand with the raw ids."""
        return {}

    def settings(self) -> Mapping[str, Any]:
        """Return nothing."""
        return {}

    def finish(self, scalars: Mapping[str, int | float], settings: Mapping[str, Any]) -> None:
        """Do nothing."""

    def id_map(self) -> IdMap:
        """Return the rows of now that have no raw id."""
        fallback, free = torch.tensor([self._ids.fallback], device="cpu"), self._ids.free()
        first = self._ids.first
        return IdMap(torch.cat([~(fallback + first), free + first]), torch.cat([fallback, free]), {})

    @property
    def owned_ids(self) -> OwnedIds:
        """The rows on this rank, and those that stand for all ids without a row."""
        first = self._ids.first
        own = IdSpan.of_rows(first, first + self._ids.n_rows, self.n_rows)
        return IdSpans((IdSpan(LEAST, -1), own)) if first else own

    def place(self, ids: Tensor, meta: Mapping[str, Tensor], *, drops: bool) -> Tensor:
        """Return the rows for what they were; in a table of another size only the shared row has one, the first one."""
        places, shared = torch.full_like(ids, -1), ~ids[ids < 0]
        if not len(shared):
            return places
        if int(shared.max()) + 1 == self.n_rows:
            rows = self._ids.free()
            is_free = torch.zeros(self._ids.n_rows, dtype=torch.bool, device="cpu")
            is_free[rows] = True
            own = ((ids >= self._ids.first) & (ids < self._ids.first + self._ids.n_rows)).nonzero().flatten()
            local = ids[own] - self._ids.first
            places[own] = torch.where(is_free[local], local, -1)
        fallback = self._ids.first + self._ids.fallback
        like = fallback if int(shared.max()) + 1 == self.n_rows and fallback in shared else int(shared.min())
        places[ids == ~like] = self._ids.fallback
        return places

    def take_ids(self, id_map: IdMap) -> None:
        """Do nothing: rows have no id where no raw id has them."""


@dataclass(frozen=True)
class Collision:
    """The module that maps raw ids to the rows of an embedding.

    Attributes:
        module: the module.
        path: of it in the model.
    """

    module: Any
    path: str


def collisions_of(model: nn.Module) -> Iterator[tuple[nn.Module, Collision]]:
    """Yield the embeddings of unsharded collections behind managed collision, each with what maps its ids."""
    for path, wrapper in model.named_modules():
        if is_a(wrapper, *_UNSHARDED):
            inner: Any = wrapper._embedding_module
            embeddings = inner.embedding_bags if hasattr(inner, "embedding_bags") else inner.embeddings
            yield from ((embeddings[name], collision) for name, collision in collisions_in(path, wrapper).items())


def collisions_in(path: str, wrapper: Any) -> dict[str, Collision]:
    """Return what maps the ids of the tables of a collection behind managed collision, sharded or not, by table."""
    collection = "_managed_collision_collection", "_managed_collision_modules"
    modules = wrapper._managed_collision_collection._managed_collision_modules
    return {
        name: Collision(module, ".".join(part for part in (path, *collection, name) if part))
        for name, module in modules.items()
    }


def unsharded_table(table: FoundTable, collision: Collision) -> FoundTable:
    """Return a table of numbered rows as one of raw ids, with the rows without one beside it.

    Raises:
        LiveTableError: it cannot be saved by raw ids; says why.
    """
    ids = CollisionMap(collision.module)
    if rank_and_size()[1] > 1:
        raise LiveTableError(
            "its ids are remapped by managed collision on each rank by itself, so that copies differ: shard it row_wise"
        )
    return _by_raw_ids(table, ids, collision.path, table.live.n_rows - 1, EVERY_ID)


def sharded_table(table: FoundTable, collision: Collision) -> FoundTable:
    """Return the rows of a shard as a table of the raw ids that are looked up there, as of :func:`unsharded_table`.

    Raises:
        LiveTableError: it cannot be saved by raw ids; says why.
    """
    ids = CollisionMap(collision.module)
    return _by_raw_ids(table, ids, collision.path, table.live.n_rows - ids.n_shards, ids.looked_up)


def _by_raw_ids(table: FoundTable, ids: CollisionMap, path: str, n_ids: int, owned_ids: OwnedIds) -> FoundTable:
    """Return a table of numbered rows as one of raw ids; ``path`` is that of what maps them."""
    rows = table.live
    shared = SharedRows(rows)
    cost = f"the map of its ids, {ids.id_bytes} bytes each, is copied at a save while training waits"
    unassigned = replace(
        table,
        live=UnassignedTable(f"{rows.name}.unassigned", shared, ids),
        path=f"{table.path}.unassigned",
        kind="rows without an id",
        keys=(),
        weights=tuple,
        is_tensor=False,
        tensors=(),
    )
    return replace(
        table,
        live=RawIdTable(rows.name, shared, ids, n_ids, owned_ids),
        kind=f"{table.kind} by raw ids",
        keys=(*table.keys, *(f"{path}.{name}" for name in ids.buffers)),
        is_tensor=False,
        tensors=(),  # whose rows go by numbers, and not by raw ids
        why="; ".join(filter(None, (table.why, cost))),
        companions=(unassigned,),
    )
