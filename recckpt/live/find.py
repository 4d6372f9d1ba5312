"""Which modules of a model are live tables, under which names, trained by which optimizer."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recckpt.dense.sharded import is_sharded
from recckpt.errors import LiveTableError
from recckpt.live.dtensor import reshard, why_not_by_rows
from recckpt.live.dtensor_embedding import DTensorEmbedding, kind_of
from recckpt.live.fbgemm import IN_MEMORY, FbgemmTable, Kernel, is_kernel, is_other_kernel
from recckpt.live.found import FINGERPRINTS, OWN, Candidate, FoundTable
from recckpt.live.torch_embedding import TorchEmbedding
from recckpt.live.torch_optimizers import optimizers_in, trainer_of
from recckpt.live.torchrec import collection_tables
from recckpt.live.torchrec_collision import Collision, collisions_of, unsharded_table
from recckpt.live.torchrec_modules import is_collection
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
    tables += [_adapted(live, number) for number, live in enumerate(adapters)]
    unknown = {"names": names.keys() - known, "exclude": set(exclude) - known - beside}
    problems = list(_unknown(unknown, known | beside))
    problems += [*_torn(candidates.values(), exclude), *_repeated(tables)]
    if problems:
        raise LiveTableError("; ".join(problems))
    dense = [f"{path!r}: {why}" for path, why in left.items() if path not in small]
    if dense and ranks.rank == 0:
        log.warning("no live tables, but dense tensors, saved whole each time, are %s", "; ".join(dense))
    return tables, left


def _unknown(paths: Mapping[str, Collection[str]], known: Collection[str]) -> Iterator[str]:
    """Yield messages of paths, by the argument that has them, which are not of an embedding."""
    for argument, some in paths.items():
        for path in sorted(some):
            module = path.removesuffix(".weight")
            hint = f"; did you mean {module!r}?" if module in known else nearest(path, known)
            yield f"{argument}: {path!r} is not the path of an embedding{hint}"


def _torch_tables(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[Candidate]:
    """Yield the embeddings of torch, those of TorchRec's unsharded collections by the names of their configs.

    Those of a tied weight are one.
    """
    owners = _owners(model)
    of_collections = {id(table) for one in model.modules() if is_collection(one) for table in one.modules()}
    collisions = {id(module): collision for module, collision in collisions_of(model)}
    wrappers, paths = wrappers_in(model), set[str]()
    for at, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            owner = owners.get(id(module.weight), _Owner())
            path = owner.keys[0].removesuffix(".weight") if owner.keys else unwrapped(at, wrappers)
            name = path.rpartition(".")[2] if id(module) in of_collections else path
            if path not in paths:
                paths.add(path)
                make = partial(_torch_table, path, module, owner, optimizers)
                if id(module) in collisions:
                    make = partial(_colliding_table, make, collisions[id(module)], wrappers)
                yield Candidate(path, name, len(module.weight), make)


@dataclass(frozen=True)
class _Owner:
    """Who has a parameter: under which keys of the state dict, and in which modules; a tied one has several."""

    keys: tuple[str, ...] = ()
    modules: Sequence[nn.Module] = ()


def _owners(model: nn.Module) -> dict[int, _Owner]:
    """Return who has the parameters of a model, by their ids."""
    keys, modules = defaultdict[int, list[str]](list), defaultdict[int, list[nn.Module]](list)
    for key, parameter in parameters_of(model):
        keys[id(parameter)].append(key)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            modules[id(parameter)].append(module)
    return {parameter: _Owner(tuple(some), modules[parameter]) for parameter, some in keys.items()}


def _torch_table(
    path: str,
    module: nn.Embedding | nn.EmbeddingBag,
    owner: _Owner,
    optimizers: Sequence[Optimizer],
    name: str,
) -> FoundTable:
    """Return the table of a module of torch.

    Raises:
        LiveTableError: its weight is to stay a dense tensor; says why.
    """
    weight = module.weight
    if not owner.keys:
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
    live = (DTensorEmbedding if is_spread else TorchEmbedding)(
        name, module, optimizer, rule, [other for other in owner.modules if other is not module]
    )
    why = live.reason if optimizer is not None else "no optimizer trains it: whoever writes it is not seen"
    marks = FINGERPRINTS if why else "gradient"
    kind = kind_of(module, weight) if is_spread else type(module).__name__
    return FoundTable(
        live,
        path,
        kind,
        owner.keys,
        lambda: (live.weight,),
        marks,
        is_announced=optimizer is not None,
        optimizer=optimizer,
        why=why,
        tensors=owner.keys,
    )


def _colliding_table(
    make: Callable[[str], FoundTable], collision: Collision, wrappers: list[tuple[str, str]], name: str
) -> FoundTable:
    """Return the table of a module of torch whose ids are remapped.

    Raises:
        LiveTableError: it is to stay a dense tensor; says why.
    """
    return unsharded_table(make(name), replace(collision, path=unwrapped(collision.path, wrappers)))


def _kernel_tables(model: nn.Module, left: dict[str, str]) -> Iterator[Candidate]:
    """Yield the tables of FBGEMM's kernels that are modules of the model; put into ``left`` those that cannot be."""
    wrappers = wrappers_in(model)
    for at, module in model.named_modules():
        path = unwrapped(at, wrappers)
        if is_other_kernel(module):
            left[path] = (
                f"a {type(module).__name__} keeps its rows on an SSD or in a store, not in tensors: {IN_MEMORY}"
            )
        if not is_kernel(module):
            continue
        try:
            kernel = Kernel(module)
        except LiveTableError as error:
            left[path] = str(error)
            continue
        yield from _tables_of(kernel, path)


def _tables_of(kernel: Kernel, path: str) -> Iterator[Candidate]:
    """Yield the tables of a kernel, all or none by its largest: their rows are one tensor of the state dict."""
    module: Any = kernel.module
    sizes = [rows for rows, *_ in module.embedding_specs]
    keys = tuple(f"{path}.{key}" if path else key for key in module.state_dict())
    paths = [f"{path}.{number}" if path else str(number) for number in range(len(sizes))]
    for number, (name, of_table) in enumerate(zip(module.table_names or paths, paths, strict=True)):
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


def _adapted(live: LiveTable, number: int) -> FoundTable:
    return FoundTable(live, f"adapters[{number}]", type(live).__name__, (), lambda: (), OWN, is_announced=True)


def _torn(candidates: Iterable[Candidate], exclude: Collection[str]) -> Iterator[str]:
    """Yield messages of modules whose tables are one tensor, and of which some are excluded."""
    groups: dict[str, list[str]] = {}
    for candidate in candidates:
        if candidate.together is not None:
            groups.setdefault(candidate.together, []).append(candidate.path)
    for path, tables in groups.items():
        left = [table for table in tables if table not in exclude]
        if left and len(left) < len(tables):
            yield f"the tables of {path!r} are one tensor: exclude {', '.join(map(repr, left))} too, or none"


def _repeated(tables: Sequence[FoundTable]) -> list[str]:
    """Return messages of names that several tables have."""
    paths: dict[str, list[str]] = {}
    for table in tables:
        paths.setdefault(table.live.name, []).append(table.path)
    return [
        f"{' and '.join(map(repr, of_name))} are both named {name!r}: tell them apart by names="
        for name, of_name in paths.items()
        if len(of_name) > 1
    ]
