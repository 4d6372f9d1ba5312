"""Tables behind TorchRec's managed collision (MCH, ZCH) as live tables by raw id, read from the map's buffers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from recckpt.adapters.keyed import IdMap
from recckpt.errors import LiveTableError
from recckpt.live.attached import FoundTable, is_a
from recckpt.live.writes import WeakDoor
from recckpt.parallel.ranks import rank_and_size
from recckpt.sparse.files.owners import EVERY_ID, LEAST, IdBlock, IdSpan, IdSpans, OwnedIds
from recckpt.sparse.split import unwrapped, wrappers_in
from recckpt.types import Door, LiveTable, WatchedTable

_EMPTY = torch.iinfo(torch.int64).max  # marks a place without a raw id
_ROW = "zch_row"  # slot names are part of the format
_IDS, _ROWS = "_mch_sorted_raw_ids", "_mch_remapped_ids_mapping"
_MODULE, _CLASS = "torchrec.modules.mc_modules", "MCHManagedCollisionModule"
_UNSHARDED = "torchrec.modules.mc_embedding_modules", "BaseManagedCollisionEmbeddingCollection"


class SharedRows:
    """A live table saved as two tables: rows with an id, and rows without an id. Notifies of changes to both."""

    def __init__(self, live: LiveTable) -> None:
        self.live = live
        self._all = WeakDoor()
        self._detach: Callable[[], object] | None = None

    def attach(self, door: Door) -> Callable[[], object]:
        reference = weakref.ref(door)
        self._all.doors.append(reference)
        if self._detach is None:
            self._detach = self.live.attach(self._all)

        def end() -> None:
            self._all.doors.remove(reference)
            if not self._all.doors and self._detach is not None:
                self._detach()
                self._detach = None

        return end


class CollisionMap:
    """The id-to-row map of one managed-collision module, for the rows of this rank's shard. The last row has no id.

    ``first`` is the shard's first row in the whole table, ``fallback`` the row that all ids without a row share,
    ``buffers`` the module's buffers that a load rewrites, and ``id_bytes`` the number of bytes that a save copies per
    id. LiveTableError if the module is of another class.
    """

    def __init__(self, module: Any) -> None:
        if (type(module).__module__, type(module).__name__) != (_MODULE, _CLASS):
            raise LiveTableError(
                f"its ids are remapped by a {type(module).__name__}, whose map recckpt does not read, so table and map "
                f"are saved as whole dense tensors each time; remap them by {_CLASS} to save them by raw id"
            )
        self._module = module
        self._meta = {
            f"zch_{info.metadata_name}": f"_mch_{info.metadata_name}"
            for info in module._eviction_policy.metadata_info
            if info.is_mch_metadata
        }
        self.first, self.n_rows = int(module._output_global_offset), int(module._zch_size)
        self.fallback = self.n_rows - 1
        self.buffers = (_IDS, _ROWS, "_output_segments_tensor", *self._meta.values())
        self.id_bytes = 16 + 8 * len(self._meta)

    @property
    def looked_up(self) -> IdBlock:
        """The raw ids that TorchRec looks up on this rank.

        ``fbgemm::block_bucketize_sparse_features`` sends each rank one block of the ids; an id beyond all blocks goes
        to the rank ``id % n_shards``.
        """
        segments = [row for row in self._buffer("_output_segments_tensor").tolist() if row >= 0]  # including the end
        n_shards, size = len(segments) - 1, int(self._module._input_hash_size)
        return IdBlock(segments.index(self.first), n_shards, -(-size // n_shards))

    def check(self) -> None:
        """Raise LiveTableError unless the map's last entry is the fallback row, without an id."""
        last = int(getattr(self._module, _ROWS)[-1]) - self.first
        if last != self.fallback or int(getattr(self._module, _IDS)[-1]) != _EMPTY:
            raise LiveTableError(
                f"found row {last} at the end of {_ROWS}, expected {self.fallback}, the row reserved for no id: code "
                "outside the module has overwritten its buffers; load a checkpoint to rewrite them"
            )

    def read(self) -> IdMap:
        ids = self._buffer(_IDS)
        n_ids = int(torch.searchsorted(ids, torch.tensor([_EMPTY], device=ids.device)))
        rows = self._buffer(_ROWS)[:n_ids].clone()
        meta = {slot: self._buffer(name)[:n_ids].clone() for slot, name in self._meta.items()}
        return IdMap(ids[:n_ids].clone(), rows - self.first, {_ROW: rows, **meta})

    def free(self) -> Tensor:
        """Return the rows without an id, ascending, except the fallback row."""
        is_free = torch.ones(self.n_rows, dtype=torch.bool, device="cpu")
        is_free[self.read().rows.cpu()] = False
        is_free[self.fallback] = False
        return is_free.nonzero().flatten()

    def place(self, ids: Tensor, meta: Mapping[str, Tensor], *, drops: bool) -> Tensor:
        """Return a row for each of the ascending ids: the row saved with the id, if all those rows are on this shard.

        LiveTableError if there are more ids than rows and ``drops`` is False.
        """
        rows = meta[_ROW] - self.first
        is_here = bool(((rows >= 0) & (rows < self.fallback)).all())
        if is_here and len(torch.unique(rows)) == len(rows):
            return rows
        if len(ids) > self.fallback and not drops:
            raise LiveTableError(
                f"found {len(ids)} ids for the rows {self.first} to {self.first + self.fallback - 1}, expected at most "
                f"{self.fallback}: make zch_size larger, or keep the most counted ids by 'zch': 'drop' in load_conf"
            )
        places = torch.full_like(ids, -1)
        worth = next((meta[slot] for slot in ("zch_counts", "zch_last_access_iter") if slot in meta), ids)
        kept = torch.argsort(worth, descending=True, stable=True)[: self.fallback].sort().values
        places[kept] = torch.arange(len(kept), device="cpu")
        return places

    def write(self, id_map: IdMap) -> None:
        """Replace the map by ``id_map``; forgets look-ups since the last eviction, as TorchRec's own load does."""
        module, n_ids, device = self._module, len(id_map.ids), self._buffer(_IDS).device
        is_free = torch.ones(self.n_rows, dtype=torch.bool, device="cpu")
        is_free[id_map.rows] = False
        rows = torch.cat([id_map.rows, is_free.nonzero().flatten()])  # the last row has no id
        values = {_IDS: (id_map.ids, _EMPTY), _ROWS: (rows + self.first, 0)}
        values |= {name: (id_map.meta[slot], 0) for slot, name in self._meta.items()}
        with torch.no_grad():
            for name, (tensor, rest) in values.items():
                buffer = self._buffer(name)
                buffer[: len(tensor)] = tensor.to(device)
                buffer[len(tensor) :] = rest
            accesses = id_map.meta.get("zch_last_access_iter")
            newest = 0 if accesses is None or not n_ids else accesses.max()
            module._current_iter_tensor.clamp_(min=int(newest))  # no id of another run was looked up later than now
        module._current_iter = -1  # makes the module read it from the tensor
        module._current_history_buffer_offset, module._evicted = 0, False

    def _buffer(self, name: str) -> Tensor:
        tensor: Tensor = getattr(self._module, name)
        return tensor.detach()


class _OfSharedRows:
    def __init__(self, name: str, rows: SharedRows, ids: CollisionMap) -> None:
        self.name, self.n_rows = name, rows.live.n_rows
        self._live, self._ids = rows.live, ids
        self.box, self.tensors, self.attach = rows.live.box, rows.live.tensors, rows.attach

    def look(self) -> None:
        if isinstance(self._live, WatchedTable):
            self._live.look()


class RawIdTable(_OfSharedRows):
    """The rows with an id, by raw id. ``owned_ids`` are the raw ids whose rows are on this rank."""

    def __init__(self, name: str, rows: SharedRows, ids: CollisionMap, n_ids: int, owned_ids: OwnedIds) -> None:
        super().__init__(name, rows, ids)
        self.n_ids: int | None = n_ids
        self.owned_ids = owned_ids
        self.scalars, self.settings, self.finish = rows.live.scalars, rows.live.settings, rows.live.finish
        self.id_map, self.take_ids = ids.read, ids.write

    def prepare(self) -> None:
        """Bring rows and map up to date; LiveTableError if the map's buffers are invalid."""
        self._live.prepare()
        try:
            self._ids.check()
        except LiveTableError as error:
            raise LiveTableError(f"table {self.name!r}: {error}") from error

    def place(self, ids: Tensor, meta: Mapping[str, Tensor], *, drops: bool) -> Tensor:
        try:
            return self._ids.place(ids, meta, drops=drops)
        except LiveTableError as error:
            raise LiveTableError(f"table {self.name!r}: {error}") from error


class UnassignedTable(_OfSharedRows):
    """The rows without an id, saved because a newly admitted id starts from the value of one of them.

    The id of a row is its index; the fallback row ``r`` of a shard has the id ``~r``. The optimizer's scalars and
    settings are saved with the table of raw ids, whose ``prepare`` also covers this table.
    """

    n_ids: int | None = None

    def __init__(self, name: str, rows: SharedRows, ids: CollisionMap) -> None:
        super().__init__(name, rows, ids)
        self.scalars: Callable[[], Mapping[str, int | float]] = dict
        self.settings: Callable[[], Mapping[str, Any]] = dict

    def prepare(self) -> None: ...

    def finish(self, scalars: Mapping[str, int | float], settings: Mapping[str, Any]) -> None: ...

    def id_map(self) -> IdMap:
        fallback, free = torch.tensor([self._ids.fallback], device="cpu"), self._ids.free()
        first = self._ids.first
        return IdMap(torch.cat([~(fallback + first), free + first]), torch.cat([fallback, free]), {})

    @property
    def owned_ids(self) -> OwnedIds:
        """The rows on this rank, and the ids of fallback rows."""
        first = self._ids.first
        own = IdSpan.of_rows(first, first + self._ids.n_rows, self.n_rows)
        return IdSpans((IdSpan(LEAST, -1), own)) if first else own

    def place(self, ids: Tensor, meta: Mapping[str, Tensor], *, drops: bool) -> Tensor:
        """Return each id's former row, -1 for none; in a table of another size, only fallback rows are kept."""
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
        """Do nothing: which rows have no id follows from the raw ids."""


@dataclass(frozen=True)
class Collision:
    module: Any  # the module
    path: str  # path in the model


def collisions_of(model: nn.Module) -> dict[int, Collision]:
    """Return the managed-collision modules in front of unsharded embeddings, by ``id()`` of the embedding."""
    collisions, wrappers = dict[int, Collision](), wrappers_in(model)
    for path, wrapper in model.named_modules():
        if is_a(wrapper, *_UNSHARDED):
            inner: Any = wrapper._embedding_module
            embeddings = inner.embedding_bags if hasattr(inner, "embedding_bags") else inner.embeddings
            collisions |= {id(embeddings[name]): one for name, one in collisions_in(path, wrapper, wrappers).items()}
    return collisions


def collisions_in(path: str, wrapper: Any, wrappers: list[tuple[str, str]]) -> dict[str, Collision]:
    """Return table -> managed-collision module, for a collection that may be sharded."""
    collection = "_managed_collision_collection", "_managed_collision_modules"
    modules = wrapper._managed_collision_collection._managed_collision_modules
    paths = {name: ".".join(part for part in (path, *collection, name) if part) for name in modules}
    return {name: Collision(module, unwrapped(paths[name], wrappers)) for name, module in modules.items()}


def unsharded_table(table: FoundTable, collision: Collision) -> FoundTable:
    """Return a table by raw ids for a table of numbered rows; the rows without an id become a companion table.

    LiveTableError says why the table cannot be saved by raw ids.
    """
    ids = CollisionMap(collision.module)
    if rank_and_size()[1] > 1:
        raise LiveTableError(
            "managed collision remaps its ids on each rank separately, so copies differ: shard it row_wise"
        )
    return _by_raw_ids(table, ids, collision.path, table.live.n_rows - 1, EVERY_ID)


def sharded_table(table: FoundTable, collision: Collision) -> FoundTable:
    """Return a shard's rows as a table of the raw ids that are looked up there; see :func:`unsharded_table`."""
    ids = CollisionMap(collision.module)
    owned = ids.looked_up
    return _by_raw_ids(table, ids, collision.path, table.live.n_rows - owned.size, owned)


def _by_raw_ids(table: FoundTable, ids: CollisionMap, path: str, n_ids: int, owned_ids: OwnedIds) -> FoundTable:
    """Return a table by raw ids for a table of numbered rows; ``path`` is the path of the collision module."""
    rows = table.live
    shared = SharedRows(rows)
    cost = f"the map of its ids, {ids.id_bytes} bytes per id, is copied at each save while training waits"
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
        tensors=(),  # the tensors have rows by number, not by raw id
        why="; ".join(filter(None, (table.why, cost))),
        companions=(unassigned,),
    )
