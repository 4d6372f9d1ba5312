"""Tables of TorchRec's collections as live tables, found through the attributes of TorchRec 1.8."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recckpt.adapters.columns import AttachedColumns
from recckpt.adapters.fbgemm import (
    BY_DUMP,
    HASHED_KERNEL,
    IN_MEMORY,
    KERNEL,
    FbgemmTable,
    Kernel,
    announce_calls,
    kernel_tables,
)
from recckpt.adapters.keyed import AttachedKeyedTable, KeyedLiveTable
from recckpt.adapters.torchrec_collision import (
    Collision,
    collisions_in,
    collisions_of,
    sharded_table,
    unsharded_table,
)
from recckpt.errors import LiveTableError
from recckpt.live.attached import FINGERPRINTS, Candidate, FoundTable, is_a
from recckpt.live.boxes import AbsentTable, RankPart, column_ranges, problem_of
from recckpt.live.find import Search, TableFinder
from recckpt.live.torch_embedding import TorchEmbedding
from recckpt.live.torch_rules import TorchRule, trainer_of
from recckpt.live.writes import WeakDoor
from recckpt.sparse.split import behind, inner_name, load_dense, unwrapped, wrappers_in
from recckpt.sparse.table.checks import spec_of
from recckpt.types import EMBEDDING, Box, Door

_SHARDED = (
    ("torchrec.distributed.embeddingbag", "ShardedEmbeddingBagCollection"),
    ("torchrec.distributed.embedding", "ShardedEmbeddingCollection"),
)
_FUSED = ("torchrec.modules.fused_embedding_modules", "FusedEmbeddingBagCollection", "FusedEmbeddingCollection")
_UNSHARDED = ("torchrec.modules.embedding_modules", "EmbeddingBagCollection", "EmbeddingCollection")
_PARALLEL = "torchrec.distributed.model_parallel"
_COLLIDING = "torchrec.distributed.mc_embedding_modules", "BaseShardedManagedCollisionEmbeddingCollection"


@dataclass(frozen=True)
class Collection:
    module: Any  # the collection
    path: str  # path in the model, without wrappers
    is_sharded: bool  # whether its tables are sharded over ranks
    refusal: str | None = None  # why its tables cannot be live; None if they can
    # table -> the map from its raw ids to rows on this rank; {} if ids are rows
    collisions: Mapping[str, Collision] = field(default_factory=dict)

    @property
    def configs(self) -> Mapping[str, Any]:
        names = ("_embedding_bag_configs", "_embedding_configs")
        configs = next(getattr(self.module, name) for name in names if hasattr(self.module, name))
        return {config.name: config for config in configs}

    @property
    def kernels(self) -> Iterator[tuple[Any, Sequence[Any]]]:
        """The modules with a kernel on this rank, each with the configs of its tables in the kernel's order."""
        if not self.is_sharded:
            yield from zip(self.module._emb_modules, self.module._key_to_tables.values(), strict=True)
            return
        for lookup in self.module._lookups:
            inner = lookup.module if isinstance(lookup, nn.parallel.DistributedDataParallel) else lookup
            yield from ((owner, owner._config.embedding_tables) for owner in inner._emb_modules)

    def sharding_of(self, table: str) -> str | None:
        return str(self.module.module_sharding_plan[table].sharding_type) if self.is_sharded else None

    def module_of(self, table: str) -> Any:
        return getattr(self.module, self.attribute)[table]

    @property
    def attribute(self) -> str:
        return "embedding_bags" if hasattr(self.module, "embedding_bags") else "embeddings"


def collections_of(model: nn.Module) -> Iterator[Collection]:
    """Yield the known collections of a model, except those whose tables are plain torch modules."""
    named, of_torch = list(model.named_modules()), dict(wrappers_in(model))
    wrappers = []  # paths of modules that torch or TorchRec has wrapped, outer ones first
    for name, module in named:
        before = behind(name)
        if is_a(module, _PARALLEL, "DistributedModelParallel"):
            wrappers.append((before, "_dmp_wrapped_module."))
        elif before in of_torch:
            wrappers.append((before, of_torch[before]))
    for name, module in named:
        is_sharded = any(is_a(module, *kind) for kind in _SHARDED)
        if is_sharded or is_a(module, *_FUSED):
            outer = [(path, other) for path, other in named if not path or name.startswith(f"{path}.")]
            above = {path: other for path, other in outer if path != name}
            collisions = {
                table: collision
                for path, other in above.items()
                if is_a(other, *_COLLIDING)
                for table, collision in collisions_in(path, other, wrappers).items()
            }
            refusal = None
            if any(is_a(other, _PARALLEL, "DMPCollection") for other in above.values()):
                refusal = (
                    "its replicas differ until DMPCollection.sync(): use DistributedModelParallel, or keep it dense"
                )
            yield Collection(module, unwrapped(name, wrappers), is_sharded, refusal, collisions)


class CollectionTable(FbgemmTable):
    """A table in a fused kernel of a collection; the collection's own methods load the table and its optimizer."""

    def __init__(self, name: str, kernel: Kernel, number: int, box: Box, n_rows: int, *, collection: nn.Module) -> None:
        super().__init__(name, kernel, number, box, n_rows)
        self._collection: Any = collection

    def attach(self, door: Door) -> Callable[[], object]:
        hooks, owner = self._kernel.hooks, self._kernel.owner
        removers = [
            super().attach(door),
            self._collection.register_load_state_dict_pre_hook(WeakDoor(door).announce_all).remove,
            announce_calls(owner, "init_parameters", hooks.announce_all),
            announce_calls(owner.fused_optimizer, "post_load_state_dict", hooks.replaced),
        ]
        return lambda: [remove() for remove in removers]


@dataclass(frozen=True)
class _Local:
    """This rank's view of a collection's table: a shard, a copy, or no rows."""

    collection: Collection
    table: str
    part: RankPart
    shard: tuple[Kernel, int] | None = None  # a kernel, and the table's number in it
    trainer: tuple[Optimizer | None, TorchRule | None] | None = None

    @property
    def path(self) -> str:
        parts = self.collection.path, self.collection.attribute, self.table
        return ".".join(part for part in parts if part)


def _candidates(search: Search, of_torch: Sequence[Candidate]) -> list[Candidate]:
    """Return the tables of collections, of kernels and of plain torch modules.

    Torch tables in unsharded collections get the names in their configs; tables behind managed collision are saved by
    raw ids.
    """
    modules, collisions = search.model.modules(), collisions_of(search.model)
    in_collections = {id(table) for one in modules if is_a(one, *_UNSHARDED) for table in one.modules()}

    def own(candidate: Candidate) -> Candidate:
        if id(candidate.module) in in_collections:
            candidate = replace(candidate, name=candidate.path.rpartition(".")[2])
        collision = collisions.get(id(candidate.module))
        if collision is None:
            return candidate
        return replace(candidate, make=lambda name: unsharded_table(candidate.make(name), collision))

    return [*_collection_tables(search), *kernel_tables(search), *map(own, of_torch)]


def _fitted(table: FoundTable) -> FoundTable:
    """Return a table in the form to attach it: by ids, by columns, or as plain rows."""
    if isinstance(table.live, KeyedLiveTable):
        return replace(table, attached=AttachedKeyedTable)
    return replace(table, attached=AttachedColumns) if table.live.box().columns else table


def _collection_tables(search: Search) -> list[Candidate]:
    """Return the tables of all collections. Collective if the model has sharded collections.

    One LiveTableError lists all tables with rows that the ranks together lack; excluded tables are not checked. It is
    also raised if ranks got different options.
    """
    ranks, options = search.ranks, search.options
    collections = collections_of(search.model)
    locals_ = [local for collection in collections for local in _locals(collection, search.optimizers)]
    if not locals_:
        return []
    is_sharded = any(local.collection.is_sharded for local in locals_)
    own = {local.path: local.part for local in locals_}
    proposals = ranks.on_all(lambda: (options, own)) if is_sharded else [(options, own)]
    for rank, (other, _) in enumerate(proposals):
        if other != proposals[0][0]:
            raise LiveTableError(
                f"live_tables was given {proposals[0][0]} on rank 0, and {other} on rank {rank}: make them equal"
            )
    of_ranks = [parts for _, parts in proposals]
    unknown = sorted({path for paths in of_ranks for path in paths.keys() ^ own.keys()})
    if unknown:
        raise LiveTableError(f"{unknown[0]!r} is not a table on all ranks: make the same model on all ranks")
    candidates, problems = [], []
    for local in locals_:
        parts = [paths[local.path] for paths in of_ranks]
        refusal = next((part.refusal for part in parts if part.refusal), None)
        problem = None if refusal or local.path in search.exclude else problem_of(parts)
        if refusal and BY_DUMP in refusal:
            search.missing.add(local.path)
        if problem:
            problems.append(f"{local.path!r}: {problem}")
        make = partial(_made, replace(local, part=replace(local.part, refusal=refusal)), parts)
        candidates.append(Candidate(local.path, local.table, local.part.n_rows, make))
    if problems:
        raise LiveTableError(
            f"tables cannot be saved by rows: {'; '.join(problems)}: use one plan on all ranks, or exclude them"
        )
    return candidates


def _locals(collection: Collection, optimizers: Sequence[Optimizer]) -> Iterator[_Local]:
    kernels: dict[int, Kernel | str] = {}
    placed: dict[str, list[tuple[Any, Any, int, Any]]] = {}
    for owner, configs in collection.kernels:
        for number, config in enumerate(configs):
            placed.setdefault(config.name, []).append((owner, owner._emb_module, number, config))
    for table, config in collection.configs.items():
        n_rows, shards = int(config.num_embeddings), placed.get(table, [])
        if collection.refusal or not shards:
            yield _Local(collection, table, RankPart(n_rows, refusal=collection.refusal))
            continue
        owner, module, number, config_here = shards[0]
        if collection.sharding_of(table) == "data_parallel":
            yield _copied(collection, table, n_rows, optimizers)
        elif len(shards) > 1 or not is_a(module, *KERNEL):
            several = f"{len(shards)} of its shards are on one rank, expected one: plan one shard per rank"
            remedy = BY_DUMP if is_a(module, *HASHED_KERNEL) else IN_MEMORY
            refusal = several if len(shards) > 1 else f"its kernel is a {type(module).__name__}: {remedy}"
            yield _Local(collection, table, RankPart(n_rows, refusal=refusal))
        else:
            kernel = kernels[id(module)] = kernels.get(id(module)) or _kernel(owner, module)
            if isinstance(kernel, str):
                yield _Local(collection, table, RankPart(n_rows, refusal=kernel))
            else:
                part = _part(config, kernel, number, config_here)
                yield _Local(collection, table, part, (kernel, number))


def _kernel(owner: Any, module: Any) -> Kernel | str:
    if any(getattr(config, "stash_weights", False) for config in owner._config.embedding_tables):
        return (
            "its weights are stashed in forward passes, which frees memory that a save may read: create it "
            "without stash_weights=True"
        )
    try:
        return Kernel(module, owner)
    except LiveTableError as error:
        return str(error)


def _part(config: Any, kernel: Kernel, number: int, config_here: Any) -> RankPart:
    tensors = kernel.tensors(number)
    place = getattr(config_here, "local_metadata", None)
    first, begin = map(int, place.shard_offsets[:2]) if place is not None else (0, 0)
    n_rows_here, n_columns = tensors[EMBEDDING].shape
    width = int(config.embedding_dim)
    return RankPart(
        int(config.num_embeddings),
        (first, first + n_rows_here),
        columns=(begin, begin + n_columns) if n_columns < width else None,
        width=width if n_columns < width else 0,
        slots=tuple(spec_of(name, tensor) for name, tensor in tensors.items()),
        scalars={"step": kernel.step},
        settings=kernel.settings,
        why=kernel.reason,
    )


def _box(part: RankPart, parts: Sequence[RankPart]) -> Box:
    columns = column_ranges(parts)
    return Box(part.rows, columns=columns, part=columns.index(part.columns) if part.columns in columns else 0)


def _copied(collection: Collection, table: str, n_rows: int, optimizers: Sequence[Optimizer]) -> _Local:
    module = collection.module_of(table)
    try:
        trainer = trainer_of(module.weight, optimizers)
    except LiveTableError as error:
        return _Local(collection, table, RankPart(n_rows, refusal=str(error)))
    return _Local(collection, table, RankPart(n_rows, (0, n_rows), is_copy=True), trainer=trainer)


def _made(local: _Local, parts: Sequence[RankPart], name: str) -> FoundTable:
    """Return this rank's table; LiveTableError if the table stays dense on all ranks."""
    if local.part.refusal:
        raise LiveTableError(local.part.refusal)
    collection, table, n_rows = local.collection, local.table, local.part.n_rows
    live: FbgemmTable | AbsentTable | TorchEmbedding
    marks, optimizer, is_announced = "backward", None, True
    if local.trainer is not None:
        live = TorchEmbedding(name, collection.module_of(table), *local.trainer)
        marks, optimizer = "gradient", local.trainer[0]
        is_announced = optimizer is not None
    elif local.shard is not None:
        live = CollectionTable(name, *local.shard, _box(local.part, parts), n_rows, collection=collection.module)
    else:
        there = next(part for part in parts if part.slots)
        live = AbsentTable(name, there, replace(_box(there, parts), rows=(0, 0)))
    why = live.reason if is_announced else "no optimizer trains it, so writes to it are not detected"
    by_rows = FoundTable(
        live,
        local.path,
        f"{type(collection.module).__name__} {collection.sharding_of(table) or ''}".strip(),
        (f"{local.path}.weight",),
        lambda: (collection.module_of(table).weight,),
        FINGERPRINTS if why else marks,
        is_announced=is_announced,
        optimizer=optimizer,
        why=why,
        is_tensor=False,
        collection=collection.module if collection.is_sharded else None,
        load_around=load_around if collection.is_sharded else None,
        tensors=(f"{local.path}.weight",),
    )
    collision = collection.collisions.get(table)
    return by_rows if collision is None else sharded_table(by_rows, collision)


def load_around(collections: Mapping[nn.Module, Set[str]], model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load dense state by names without wrappers; the rest of the model stays unchanged.

    TorchRec's sharded collections must load all their tables at the same time. So this function skips collections
    without dense tensors, and passes other collections the present values of their live tables, which changes nothing.
    ``collections`` maps each collection to the keys of its live tables in its state dict.
    """
    if model in collections:
        own = model.state_dict()
        if own.keys() - collections[model]:
            load_dense(model, {**{key: own[key] for key in collections[model]}, **state})
        return
    if not any(module in collections for module in model.modules()):
        load_dense(model, state)
        return
    is_wrapper = is_a(model, _PARALLEL, "DistributedModelParallel")
    name = "_dmp_wrapped_module." if is_wrapper else inner_name(model)  # a wrapper of torch or of TorchRec
    if name:
        load_around(collections, getattr(model, name[:-1]), state)
        return
    direct = {key: value for key, value in state.items() if "." not in key}
    errors: list[str] = []
    model._load_from_state_dict(direct, "", {}, False, [], [], errors)
    if errors:
        raise RuntimeError("; ".join(errors))
    for name, child in model.named_children():
        of_child = {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
        load_around(collections, child, of_child)


TORCHREC = TableFinder(_candidates, _fitted)
