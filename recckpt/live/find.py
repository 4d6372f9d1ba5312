"""Finds the live tables of a model, with names and optimizers; finders add tables of other libraries."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import nn
from torch.optim import Optimizer

from recckpt.dense.sharded import is_sharded
from recckpt.errors import LiveTableError
from recckpt.live.attached import FINGERPRINTS, HOOKED, OWN, Candidate, FoundTable
from recckpt.live.boxes import reshard, why_not_by_rows
from recckpt.live.torch_embedding import DTensorEmbedding, TorchEmbedding, has_foreign
from recckpt.live.torch_rules import optimizers_in, trainer_of
from recckpt.parallel.ranks import Ranks
from recckpt.sparse.split import parameters_of, unwrapped, wrappers_in
from recckpt.text import nearest
from recckpt.types import LiveTable, check_table_name

log = logging.getLogger("recckpt")


@dataclass(frozen=True)
class Search:
    model: nn.Module
    optimizers: Sequence[Optimizer]  # optimizers that train the model
    ranks: Ranks  # ranks that have the model
    exclude: Collection[str]  # paths of modules that stay dense
    options: str  # the arguments that choose tables, as text; equal on all ranks
    left: dict[str, str] = field(default_factory=dict)  # path of an embedding that stays dense -> reason
    missing: set[str] = field(default_factory=set)  # paths in ``left`` that no state dict has


@dataclass(frozen=True)
class TableFinder:
    # Takes the candidates found so far, some of which may be modules of this library, and returns the complete list.
    # Collective if the model is sharded; raises LiveTableError if the ranks together do not have all of a table.
    candidates: Callable[[Search, Sequence[Candidate]], Sequence[Candidate]]
    fitted: Callable[[FoundTable], FoundTable]  # returns a table of any finder in the form in which it is attached


def find_tables(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    ranks: Ranks,
    finders: Sequence[TableFinder],
    *,
    min_rows: int,
    names: dict[str, str],
    exclude: Collection[str],
    adapters: Sequence[LiveTable] = (),
) -> tuple[list[FoundTable], dict[str, str]]:
    """Return the tables of a model and ``adapters``, and path -> reason for embeddings that stay dense.

    Collective if the model is sharded. A single LiveTableError lists all tables that cannot be saved, and wrong paths.
    """
    reshard(model)
    options = f"min_rows={min_rows}, names={dict(sorted(names.items()))}, exclude={sorted(exclude)}"
    search = Search(model, optimizers_in(optimizers, model), ranks, exclude, options)
    everything: Sequence[Candidate] = list(_torch_tables(model, search.optimizers))
    for finder in finders:
        everything = finder.candidates(search, everything)
    candidates, left = {candidate.path: candidate for candidate in everything}, search.left
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
    for finder in finders:
        tables = [finder.fitted(table) for table in tables]
    unknown = {"names": names.keys() - known, "exclude": set(exclude) - known - beside}
    if problems := list(_problems(candidates.values(), tables, unknown, known | beside, exclude)):
        raise LiveTableError("; ".join(problems))
    if ranks.rank == 0:
        _warn_of({path: why for path, why in left.items() if path not in small and path not in exclude}, search.missing)
    return tables, left


def _warn_of(left: Mapping[str, str], missing_paths: Collection[str]) -> None:
    dense = [f"{path!r}: {why}" for path, why in left.items() if path not in missing_paths]
    if dense:
        log.warning("saved as dense tensors, whole at each save, and not as live tables: %s", "; ".join(dense))
    missing = [f"{path!r}: {why}" for path, why in left.items() if path in missing_paths]
    if missing:
        log.warning("not in the checkpoints are %s", "; ".join(missing))


def _problems(
    candidates: Iterable[Candidate],
    tables: Sequence[FoundTable],
    unknown: Mapping[str, Collection[str]],
    known: Collection[str],
    exclude: Collection[str],
) -> Iterator[str]:
    """Yield problems: unknown paths, partly excluded tables of one tensor, and names that are used twice.

    ``unknown`` maps an argument to its unknown paths.
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
            yield f"{' and '.join(map(repr, of_name))} are both named {name!r}: rename one with names="


def _torch_tables(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[Candidate]:
    """Yield torch's embeddings as candidates; several modules that share one weight are one candidate."""
    keys, modules = defaultdict[int, list[str]](list), defaultdict[int, list[nn.Module]](list)  # by id of a parameter
    for key, parameter in parameters_of(model):
        keys[id(parameter)].append(key)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            modules[id(parameter)].append(module)
    wrappers, paths = wrappers_in(model), set[str]()
    for at, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            own = tuple(keys[id(module.weight)])
            path = own[0].removesuffix(".weight") if own else unwrapped(at, wrappers)
            if path not in paths:
                paths.add(path)
                make = partial(
                    _torch_table,
                    path,
                    module,
                    keys=own,
                    tied=[other for other in modules[id(module.weight)] if other is not module],
                    optimizers=optimizers,
                )
                yield Candidate(path, path, len(module.weight), make, module=module)


def _torch_table(
    path: str,
    module: nn.Embedding | nn.EmbeddingBag,
    name: str,
    *,
    keys: tuple[str, ...],
    tied: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
) -> FoundTable:
    """Return the table of a torch module. Raises LiveTableError if its weight stays dense, with the reason."""
    weight = module.weight
    if not keys:
        raise LiveTableError(
            "its weight is computed from other tensors, such as by a parametrization; recckpt saves these as tensors"
        )
    is_spread = is_sharded(weight)
    if not is_spread and weight.dim() != 2:
        raise LiveTableError(
            f"its weight is {tuple(weight.shape)}, expected rows and columns: FullyShardedDataParallel flattens "
            "weights; use fully_shard, which does not"
        )
    if is_spread and (refusal := why_not_by_rows(weight)):
        raise LiveTableError(refusal)
    if is_spread and module.max_norm is not None:
        raise LiveTableError(
            "its max_norm writes in forward passes, which recckpt cannot detect for a DTensor: "
            "create it without max_norm"
        )
    optimizer, rule = trainer_of(weight, optimizers)
    live = (DTensorEmbedding if is_spread else TorchEmbedding)(name, module, optimizer, rule, tied)
    is_shared = weight.device.type == "cpu" and weight.is_shared()  # type: ignore[no-untyped-call]  # torch has no types
    is_seen = optimizer is not None and not is_shared
    if optimizer is None:
        why: str | None = "no optimizer trains it, so writes to it are not detected"
    elif not is_seen:
        why = "it lies in shared memory, so writes of other processes are not detected"
        log.warning("table %r: %s; so each save reads all rows, and training waits while they are copied", name, why)
    else:
        why = live.reason or (HOOKED if has_foreign(optimizer._optimizer_step_post_hooks) else None)
    marks = FINGERPRINTS if why else "gradient"
    kind = type(module).__name__
    if is_spread:  # not the module's class name, because FSDP2 makes a new class for each module
        parts = ("Replicate" if one.is_replicate() else "Shard(0)" for one in getattr(weight, "placements", ()))
        kind = f"{'EmbeddingBag' if isinstance(module, nn.EmbeddingBag) else 'Embedding'} {' x '.join(parts)}"
    found = FoundTable(live, path, kind, keys, lambda: (live.weight,), marks, is_announced=is_seen, optimizer=optimizer)
    return replace(found, why=why, tensors=keys)
