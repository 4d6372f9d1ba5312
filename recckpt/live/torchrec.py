"""The tables of TorchRec's collections: sharded ones, and unsharded ones with fused optimizers."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recckpt.errors import LiveTableError
from recckpt.live.absent import AbsentTable
from recckpt.live.boxes import RankPart, column_ranges, problem_of
from recckpt.live.fbgemm import IN_MEMORY, FbgemmTable, Kernel, is_kernel
from recckpt.live.found import FINGERPRINTS, Candidate, FoundTable
from recckpt.live.hooks import AnnounceAll, WeakDoor
from recckpt.live.torch_embedding import TorchEmbedding
from recckpt.live.torch_optimizers import trainer_of
from recckpt.live.torch_rules import TorchRule
from recckpt.live.torchrec_collision import sharded_table
from recckpt.live.torchrec_modules import Collection, collections_of
from recckpt.parallel.ranks import Ranks
from recckpt.sparse.table.checks import spec_of
from recckpt.types import EMBEDDING, Box, Door


@dataclass(frozen=True)
class Shard:
    """Where the rows of a table are on a rank: in a kernel, under a number; ``owner`` has it, and its optimizer."""

    kernel: Kernel
    number: int
    owner: Any


class CollectionTable(FbgemmTable):
    """A table in a fused kernel that a collection owns, which loads it and its optimizer in ways of its own.

    Args:
        name, box, n_rows: as of FbgemmTable.
        shard: where it is.
        collection: whose state dict has the weights.
    """

    def __init__(self, name: str, shard: Shard, box: Box, n_rows: int, collection: nn.Module) -> None:
        super().__init__(name, shard.kernel, shard.number, box, n_rows)
        self._shard = shard
        self._collection: Any = collection

    def attach(self, door: Door) -> Callable[[], object]:
        """Announce what backward passes, loads and methods are about to change."""
        kernel, owner = self._shard.kernel, self._shard.owner
        removers = [
            super().attach(door),
            self._collection.register_load_state_dict_pre_hook(AnnounceAll(WeakDoor(door))).remove,
            kernel.announce_calls(owner, "init_parameters"),
            kernel.note_replaced(owner.fused_optimizer, "post_load_state_dict"),
        ]
        return lambda: [remove() for remove in removers]


@dataclass(frozen=True)
class _Local:
    """A table of a collection as this rank sees it: a shard, a copy, or neither."""

    collection: Collection
    table: str
    part: RankPart
    shard: Shard | None = None
    trainer: tuple[Optimizer | None, TorchRule | None] | None = None

    @property
    def path(self) -> str:
        return self.collection.path_of(self.table)


def collection_tables(
    model: nn.Module, optimizers: Sequence[Optimizer], ranks: Ranks, exclude: Container[str], options: str
) -> list[Candidate]:
    """Return the tables of all collections. Collective where the model has sharded ones.

    What the ranks have of those in ``exclude``, by path, need not make up a table. The ``options`` that choose tables
    are the same on all ranks.

    Raises:
        LiveTableError: what the ranks have does not make up the tables; says all that is wrong. Or options differ.
    """
    locals_ = [local for collection in collections_of(model) for local in _locals(collection, optimizers)]
    if not locals_:
        return []
    is_sharded = any(local.collection.is_sharded for local in locals_)
    own = {local.path: local.part for local in locals_}
    proposals = ranks.on_all(lambda: (options, own)) if is_sharded else [(options, own)]
    for rank, (other, _) in enumerate(proposals):
        if other != proposals[0][0]:
            raise LiveTableError(
                f"live_tables was given {proposals[0][0]} on rank 0, and {other} on rank {rank}: give the same to all"
            )
    of_ranks = [parts for _, parts in proposals]
    unknown = sorted({path for paths in of_ranks for path in paths.keys() ^ own.keys()})
    if unknown:
        raise LiveTableError(f"{unknown[0]!r} is not a table on all ranks: make the same model on each of them")
    candidates, problems = [], []
    for local in locals_:
        parts = [paths[local.path] for paths in of_ranks]
        refusal = next((part.refusal for part in parts if part.refusal), None)
        problem = None if refusal or local.path in exclude else problem_of(parts)
        if problem:
            problems.append(f"{local.path!r}: {problem}")
        make = partial(_made, replace(local, part=replace(local.part, refusal=refusal)), parts)
        candidates.append(Candidate(local.path, local.table, local.part.n_rows, make))
    if problems:
        raise LiveTableError(
            f"tables cannot be saved by rows: {'; '.join(problems)}: make the same plan on all ranks, or exclude them"
        )
    return candidates


def _locals(collection: Collection, optimizers: Sequence[Optimizer]) -> Iterator[_Local]:
    """Yield the tables of a collection as they are on this rank."""
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
        elif len(shards) > 1 or not is_kernel(module):
            several = f"{len(shards)} shards of it lie on one rank, expected one: plan it with one on each"
            refusal = several if len(shards) > 1 else f"its kernel is a {type(module).__name__}: {IN_MEMORY}"
            yield _Local(collection, table, RankPart(n_rows, refusal=refusal))
        else:
            kernel = kernels[id(module)] = kernels.get(id(module)) or _kernel(owner, module)
            if isinstance(kernel, str):
                yield _Local(collection, table, RankPart(n_rows, refusal=kernel))
            else:
                part = _part(config, kernel, number, config_here)
                yield _Local(collection, table, part, Shard(kernel, number, owner))


def _kernel(owner: Any, module: Any) -> Kernel | str:
    if any(getattr(config, "stash_weights", False) for config in owner._config.embedding_tables):
        return (
            "its weights are stashed in forward passes, which frees what a save still reads: make it without "
            "stash_weights=True"
        )
    try:
        return Kernel(module, next(iter(owner.fused_optimizer.param_groups)))
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
    """Return what a rank has, of the columns that other ranks have the rest of."""
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
    """Return the table of this rank.

    Raises:
        LiveTableError: it is to stay dense on all ranks.
    """
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
        live = CollectionTable(name, local.shard, _box(local.part, parts), n_rows, collection.module)
    else:
        there = next(part for part in parts if part.slots)
        live = AbsentTable(name, there, replace(_box(there, parts), rows=(0, 0)))
    why = live.reason if is_announced else "no optimizer trains it: whoever writes it is not seen"
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
        tensors=(f"{local.path}.weight",),
    )
    collision = collection.collisions.get(table)
    return by_rows if collision is None else sharded_table(by_rows, collision)
