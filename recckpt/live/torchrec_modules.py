"""Where TorchRec's collections keep their tables: read from their attributes, which TorchRec 1.8 has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from recckpt.live.kinds import is_a
from recckpt.live.torchrec_collision import Collision, collisions_in
from recckpt.sparse.split import inner_name, unwrapped, wrappers_in

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
    """A collection of tables in a model.

    Attributes:
        module: the collection.
        path: of it in the model, without wrappers.
        is_sharded: whether its tables are spread over ranks.
        refusal: why none of its tables can be a live one, None where they can.
        collisions: what maps raw ids to the rows of each table on this rank, by table; none where ids are rows.
    """

    module: Any
    path: str
    is_sharded: bool
    refusal: str | None = None
    collisions: Mapping[str, Collision] = field(default_factory=dict)

    @property
    def configs(self) -> Mapping[str, Any]:
        """The configs of its tables by name, of those of all ranks."""
        names = ("_embedding_bag_configs", "_embedding_configs")
        configs = next(getattr(self.module, name) for name in names if hasattr(self.module, name))
        return {config.name: config for config in configs}

    @property
    def kernels(self) -> Iterator[tuple[Any, Sequence[Any]]]:
        """What has a kernel on this rank, and the configs of its tables in the order of the kernel."""
        if not self.is_sharded:
            yield from zip(self.module._emb_modules, self.module._key_to_tables.values(), strict=True)
            return
        for lookup in self.module._lookups:
            inner = lookup.module if isinstance(lookup, nn.parallel.DistributedDataParallel) else lookup
            yield from ((owner, owner._config.embedding_tables) for owner in inner._emb_modules)

    def sharding_of(self, table: str) -> str | None:
        """Return how a table is spread over ranks; None where it is not."""
        return str(self.module.module_sharding_plan[table].sharding_type) if self.is_sharded else None

    def module_of(self, table: str) -> Any:
        """Return the module that has the weight of a table."""
        return getattr(self.module, self._attribute)[table]

    def path_of(self, table: str) -> str:
        """Return the path of that module in the model."""
        return ".".join(part for part in (self.path, self._attribute, table) if part)

    @property
    def _attribute(self) -> str:
        return "embedding_bags" if hasattr(self.module, "embedding_bags") else "embeddings"


def collections_of(model: nn.Module) -> Iterator[Collection]:
    """Yield the collections of a model that recckpt knows, but for those whose tables are plain modules of torch."""
    wrappers, named = _wrappers(model), list(model.named_modules())
    for name, module in named:
        is_sharded = any(is_a(module, *kind) for kind in _SHARDED)
        if is_sharded or is_a(module, *_FUSED):
            above = {path: other for path, other in named if path != name and _is_above(path, name)}
            collisions = {
                table: replace(collision, path=unwrapped(collision.path, wrappers))
                for path, other in above.items()
                if is_a(other, *_COLLIDING)
                for table, collision in collisions_in(path, other).items()
            }
            yield Collection(module, unwrapped(name, wrappers), is_sharded, _refusal(above.values()), collisions)


def inner_of(module: nn.Module) -> nn.Module | None:
    """Return what a wrapper, of torch or of TorchRec, has inside; None where a module is not one."""
    name = "_dmp_wrapped_module." if is_a(module, _PARALLEL, "DistributedModelParallel") else inner_name(module)
    inner: nn.Module | None = getattr(module, name[:-1]) if name else None
    return inner


def is_collection(module: object) -> bool:
    """Say whether a module is a collection whose tables are plain modules of torch."""
    return is_a(module, *_UNSHARDED)


def _refusal(above: Iterable[object]) -> str | None:
    if any(is_a(module, _PARALLEL, "DMPCollection") for module in above):
        return "its replicas differ until DMPCollection.sync(): use DistributedModelParallel, or leave it dense"
    return None


def _wrappers(model: nn.Module) -> list[tuple[str, str]]:
    """Return where in a model a module is wrapped, outer ones first, by torch or by TorchRec."""
    of_torch = dict(wrappers_in(model))
    wrappers = []
    for name, module in model.named_modules():
        before = f"{name}." if name else ""
        if is_a(module, _PARALLEL, "DistributedModelParallel"):
            wrappers.append((before, "_dmp_wrapped_module."))
        elif before in of_torch:
            wrappers.append((before, of_torch[before]))
    return wrappers


def _is_above(path: str, name: str) -> bool:
    return not path or name.startswith(f"{path}.")
