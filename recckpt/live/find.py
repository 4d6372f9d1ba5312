"""Which modules of a model are live tables, under which names, trained by which optimizer."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recckpt.dense.sharded import is_sharded
from recckpt.errors import LiveTableError
from recckpt.live.attached import FINGERPRINTS, HOOKED, OWN, Candidate, FoundTable, is_a
from recckpt.live.boxes import reshard, why_not_by_rows
from recckpt.live.fbgemm import BY_DUMP, HASHED_KERNEL, IN_MEMORY, KERNEL, OTHER_KERNEL, FbgemmTable, Kernel
from recckpt.live.torch_embedding import DTensorEmbedding, TorchEmbedding, has_foreign
from recckpt.live.torch_rules import optimizers_in, trainer_of
from recckpt.live.torchrec import UNSHARDED, collection_tables
from recckpt.live.torchrec_collision import Collision, collisions_of, unsharded_table
from recckpt.parallel.ranks import Ranks
from recckpt.sparse.split import parameters_of, unwrapped, wrappers_in
from recckpt.text import nearest
from recckpt.types import Box, LiveTable, check_table_name

log = logging.getLogger("recckpt")


def find_tables(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    ranks: Ranks,
    *,
    min_rows: int,
    names: dict[str, str],
    exclude: Collection[str],
    adapters: Sequence[LiveTable] = (),
) -> tuple[list[FoundTable], dict[str, str]]:
    """Return the tables of a model and of ``adapters``, and path -> why of embeddings that stay dense.

    Collective where the model is sharded.

    Raises:
        LiveTableError: tables cannot be saved so, or a path is not one of an embedding; all of it.
    """
    reshard(model)
    optimizers = optimizers_in(optimizers, model)
    left: dict[str, str] = {}
    options = f"min_rows={min_rows}, names={dict(sorted(names.items()))}, exclude={sorted(exclude)}"
    candidates = {
        candidate.path: candidate
        for candidate in (
            *collection_tables(model, optimizers, ranks, exclude, options),
            *_kernel_tables(model, left),
            *_torch_tables(model, optimizers),
        )
    }
    known = candidates.keys() | left.keys()
    tables, small, beside = list[FoundTable](), set[str](), set[str]()
    for path, candidate in candidates.items():
        if path in exclude:
            continue
        if candidate.n_rows < min_rows and path not in names:
            small.add(path)
            left[path] = f"{candidate.n_rows} rows, fewer than min_rows={min_rows}"
            continue
        try:
            table = candidate.make(check_table_name(names.get(path, candidate.name)))
            tables += [table, *(other for other in table.companions if other.path not in exclude)]
            beside |= {other.path for other in table.companions}
        except LiveTableError as error:
            left[path] = str(error)
    for number, live in enumerate(adapters):
        path = f"adapters[{number}]"
        tables.append(FoundTable(live, path, type(live).__name__, (), lambda: (), OWN, is_announced=True))
    unknown = {"names": names.keys() - known, "exclude": set(exclude) - known - beside}
    if problems := list(_problems(candidates.values(), tables, unknown, known | beside, exclude)):
        raise LiveTableError("; ".join(problems))
    if ranks.rank == 0:
        _warn_of({path: why for path, why in left.items() if path not in small and path not in exclude})
    return tables, left


def _warn_of(left: Mapping[str, str]) -> None:
    """Log which embeddings, with why by path, are saved otherwise than as live tables, or not at all."""
    dense = [f"{path!r}: {why}" for path, why in left.items() if BY_DUMP not in why]
    if dense:
        log.warning("no live tables, but dense tensors, saved whole each time, are %s", "; ".join(dense))
    missing = [f"{path!r}: {why}" for path, why in left.items() if BY_DUMP in why]
    if missing:
        log.warning("not in the checkpoints are %s", "; ".join(missing))


def _problems(
    candidates: Iterable[Candidate],
    tables: Sequence[FoundTable],
    unknown: Mapping[str, Collection[str]],
    known: Collection[str],
    exclude: Collection[str],
) -> Iterator[str]:
    """Yield what is wrong: paths that are not of an embedding, tables of one tensor torn apart, and names given twice.

    ``unknown`` are such paths by the argument that has them.
    """
    for argument, some in unknown.items():
        for path in sorted(some):
            module = path.removesuffix(".weight")
            hint = f"; did you mean {module!r}?" if module in known else nearest(path, known)
            yield f"{argument}: {path!r} is not the path of an embedding{hint}"
    groups, paths = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for candidate in candidates:
        if candidate.together is not None:
            groups[candidate.together].append(candidate.path)
    for path, together in groups.items():
        left = [table for table in together if table not in exclude]
        if left and len(left) < len(together):
            yield f"the tables of {path!r} are one tensor: exclude {', '.join(map(repr, left))} too, or none"
    for table in tables:
        paths[table.live.name].append(table.path)
    for name, of_name in paths.items():
        if len(of_name) > 1:
            yield f"{' and '.join(map(repr, of_name))} are both named {name!r}: tell them apart by names="


def _torch_tables(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[Candidate]:
    """Yield the embeddings of torch, those of TorchRec's unsharded collections by the names of their configs.

    Those of a tied weight, which has several keys in the state dict and several modules, are one.
    """
    keys, modules = defaultdict[int, list[str]](list), defaultdict[int, list[nn.Module]](list)  # by id of a parameter
    for key, parameter in parameters_of(model):
        keys[id(parameter)].append(key)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            modules[id(parameter)].append(module)
    of_collections = {id(table) for one in model.modules() if is_a(one, *UNSHARDED) for table in one.modules()}
    wrappers, paths = wrappers_in(model), set[str]()
    collisions = {
        id(module): replace(collision, path=unwrapped(collision.path, wrappers))
        for module, collision in collisions_of(model)
    }
    for at, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            own = tuple(keys[id(module.weight)])
            path = own[0].removesuffix(".weight") if own else unwrapped(at, wrappers)
            name = path.rpartition(".")[2] if id(module) in of_collections else path
            if path not in paths:
                paths.add(path)
                make = partial(
                    _torch_table,
                    path,
                    module,
                    keys=own,
                    tied=[other for other in modules[id(module.weight)] if other is not module],
                    optimizers=optimizers,
                    collision=collisions.get(id(module)),
                )
                yield Candidate(path, name, len(module.weight), make)


def _torch_table(
    path: str,
    module: nn.Embedding | nn.EmbeddingBag,
    name: str,
    *,
    keys: tuple[str, ...],
    tied: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    collision: Collision | None,
) -> FoundTable:
    """Return the table of a module of torch; ``collision`` maps its ids.

    Raises:
        LiveTableError: its weight is to stay a dense tensor; says why.
    """
    weight = module.weight
    if not keys:
        raise LiveTableError("its weight is made of other tensors, as by a parametrization: they are saved, as tensors")
    is_spread = is_sharded(weight)
    if not is_spread and weight.dim() != 2:
        raise LiveTableError(
            f"its weight is {tuple(weight.shape)}, expected rows and columns: where FullyShardedDataParallel has "
            "flattened it, use fully_shard, which does not"
        )
    if is_spread and (refusal := why_not_by_rows(weight)):
        raise LiveTableError(refusal)
    if is_spread and module.max_norm is not None:
        raise LiveTableError("its max_norm writes in forward passes, which is not seen of a DTensor: make it without")
    optimizer, rule = trainer_of(weight, optimizers)
    live = (DTensorEmbedding if is_spread else TorchEmbedding)(name, module, optimizer, rule, tied)
    is_shared = weight.device.type == "cpu" and weight.is_shared()  # type: ignore[no-untyped-call]  # torch has no types
    is_seen = optimizer is not None and not is_shared
    if optimizer is None:
        why: str | None = "no optimizer trains it: whoever writes it is not seen"
    elif not is_seen:
        why = "it lies in shared memory: what other processes write is not seen"
        log.warning("table %r: %s; so each save looks at all rows, in a copy for which training waits", name, why)
    else:
        why = live.reason or (HOOKED if has_foreign(optimizer._optimizer_step_post_hooks) else None)
    marks = FINGERPRINTS if why else "gradient"
    kind = type(module).__name__
    if is_spread:  # FSDP2 makes a class of its own of each module
        parts = ("Replicate" if one.is_replicate() else "Shard(0)" for one in getattr(weight, "placements", ()))
        kind = f"{'EmbeddingBag' if isinstance(module, nn.EmbeddingBag) else 'Embedding'} {' x '.join(parts)}"
    found = FoundTable(live, path, kind, keys, lambda: (live.weight,), marks, is_announced=is_seen, optimizer=optimizer)
    found = replace(found, why=why, tensors=keys)
    return found if collision is None else unsharded_table(found, collision)


def _kernel_tables(model: nn.Module, left: dict[str, str]) -> Iterator[Candidate]:
    """Yield the tables of FBGEMM's kernels that are modules of the model; put into ``left`` those that cannot be."""
    wrappers = wrappers_in(model)
    for at, module in model.named_modules():
        path = unwrapped(at, wrappers)
        if is_a(module, *OTHER_KERNEL):
            left[path] = (
                f"a {type(module).__name__} keeps its rows on an SSD or in a store, not in tensors: {IN_MEMORY}"
            )
        if is_a(module, *HASHED_KERNEL):
            left[path] = f"a {type(module).__name__} keeps its rows in hash tables, which no state dict has: {BY_DUMP}"
        if not is_a(module, *KERNEL):
            continue
        try:
            kernel = Kernel(module)
        except LiveTableError as error:
            left[path] = str(error)
            continue
        # All of them or none, by the largest: their rows are one tensor of the state dict.
        of_kernel: Any = module
        sizes = [rows for rows, *_ in of_kernel.embedding_specs]
        keys = tuple(f"{path}.{key}" if path else key for key in module.state_dict())
        paths = [f"{path}.{number}" if path else str(number) for number in range(len(sizes))]
        for number, (name, of_table) in enumerate(zip(of_kernel.table_names or paths, paths, strict=True)):
            make = partial(_kernel_table, kernel, number, of_table, keys)
            yield Candidate(of_table, name, max(sizes), make, together=path)


def _kernel_table(kernel: Kernel, number: int, path: str, keys: tuple[str, ...], name: str) -> FoundTable:
    n_rows = int(kernel.module.embedding_specs[number][0])
    live = FbgemmTable(name, kernel, number, Box((0, n_rows)), n_rows)
    kind, marks = type(kernel.module).__name__, FINGERPRINTS if live.reason else "backward"
    return FoundTable(
        live,
        path,
        kind,
        keys,
        lambda: tuple(kernel.module.parameters()),
        marks,
        is_announced=True,
        why=live.reason,
        is_tensor=False,
    )
