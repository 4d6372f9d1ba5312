"""Which modules of a model are live tables, under which names, trained by which optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from recckpt.dense.optimizer_class import updater
from recckpt.dense.sharded import is_sharded
from recckpt.errors import LiveTableError
from recckpt.live.torch_embedding import TorchEmbedding
from recckpt.live.torch_rules import KNOWN, rule_of
from recckpt.sparse.split import parameters_of, unwrapped, wrappers_in
from recckpt.text import nearest
from recckpt.types import LiveTable, check_table_name

FINGERPRINTS = "fingerprints"  # of all rows, at each save


@dataclass(frozen=True)
class FoundTable:
    """A live table of a model.

    Attributes:
        live: the table.
        path: of its module.
        kind: of module.
        keys: of its weight in the state dict of the model.
        weights: returns the parameters that are its rows by now.
        marks: how its changes are known: ``"gradient"`` by the optimizer's step, or ``FINGERPRINTS`` by looking at
            all rows at a save.
        is_announced: whether all that changes rows is announced; otherwise training waits while they are copied.
        optimizer: that trains it; None where it is frozen, or updates itself.
        why: why that is not the best; None where it is.
    """

    live: LiveTable
    path: str
    kind: str
    keys: tuple[str, ...]
    weights: Callable[[], tuple[Tensor, ...]]
    marks: str
    is_announced: bool
    optimizer: Optimizer | None = None
    why: str | None = None

    def is_trained_by(self, optimizer: Optimizer) -> bool:
        """Say whether the table has the states that an optimizer keeps of its weights."""
        return self.is_announced if self.optimizer is None else updater(optimizer) is self.optimizer


def find_tables(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    min_rows: int,
    names: dict[str, str],
    exclude: Collection[str],
) -> tuple[list[FoundTable], dict[str, str]]:
    """Return the tables of a model, and path -> why of embeddings that stay dense.

    Raises:
        LiveTableError: tables cannot be saved so, or a path is not one of an embedding; all of it.
    """
    tables: list[FoundTable] = []
    left: dict[str, str] = {}
    problems: list[str] = []
    keys: dict[int, tuple[str, ...]] = {}
    for key, parameter in parameters_of(model):
        keys[id(parameter)] = (*keys.get(id(parameter), ()), key)
    embeddings = _embeddings(model, keys)
    for path in (*names, *exclude):
        if path not in embeddings:
            problems.append(f"{path!r} is not the path of an embedding{nearest(path, embeddings)}")
    for path, module in embeddings.items():
        if path in exclude:
            continue
        if len(module.weight) < min_rows and path not in names:
            left[path] = f"{len(module.weight)} rows, fewer than min_rows={min_rows}"
            continue
        try:
            if dict(module.named_parameters(recurse=False)).get("weight") is None:
                raise LiveTableError("its weight is made of other tensors, as by a parametrization: they are saved")
            if is_sharded(module.weight):
                raise LiveTableError("its weight is sharded over ranks, and saved in pieces")
            name = check_table_name(names.get(path, path))
            tables.append(_torch_table(name, path, module, keys[id(module.weight)], optimizers))
        except LiveTableError as error:
            left[path] = str(error)
    problems += _repeated(tables)
    if problems:
        raise LiveTableError("; ".join(problems))
    return tables, left


def _torch_table(
    name: str,
    path: str,
    module: nn.Embedding | nn.EmbeddingBag,
    keys: tuple[str, ...],
    optimizers: Sequence[Optimizer],
) -> FoundTable:
    """Return the table of a module of torch.

    Raises:
        LiveTableError: its weight is to stay a dense tensor; says why.
    """
    weight = module.weight
    inner = [one if _is_zero(one) else updater(one) for one in optimizers]
    own = [one for one in inner for group in one.param_groups if any(weight is each for each in group["params"])]
    if len(own) > 1:
        raise LiveTableError(f"{len(own)} of the optimizers train it, expected one")
    optimizer = own[0] if own else None
    rule = None if optimizer is None else rule_of(optimizer)
    if optimizer is None and weight.requires_grad:
        raise LiveTableError("none of the optimizers trains it: give live_tables the one that does, or freeze it")
    if optimizer is not None and rule is None:
        raise LiveTableError(f"{type(optimizer).__name__} is not an optimizer that is known: {', '.join(KNOWN)}")
    if optimizer is not None and rule is not None:
        group = next(group for group in optimizer.param_groups if any(weight is each for each in group["params"]))
        if why := rule.refusal(group):
            raise LiveTableError(f"{type(optimizer).__name__}: {why}")
    live = TorchEmbedding(name, module, optimizer, rule)
    why = live.reason if optimizer is not None else "no optimizer trains it: whoever writes it is not seen"
    marks, kind = FINGERPRINTS if why else "gradient", type(module).__name__
    return FoundTable(
        live,
        path,
        kind,
        keys,
        lambda: (live.weight,),
        marks,
        is_announced=optimizer is not None,
        optimizer=optimizer,
        why=why,
    )


def _embeddings(model: nn.Module, keys: Mapping[int, tuple[str, ...]]) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Return the embeddings of a model by path; those of a tied weight are one."""
    wrappers = wrappers_in(model)
    embeddings: dict[str, nn.Embedding | nn.EmbeddingBag] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            of_weight = keys.get(id(dict(module.named_parameters(recurse=False)).get("weight")))
            path = of_weight[0].removesuffix(".weight") if of_weight else unwrapped(name, wrappers)
            embeddings.setdefault(path, module)
    return embeddings


def _is_zero(optimizer: Optimizer) -> bool:
    """Say whether the optimizer that updates has a part of the parameters only."""
    return callable(getattr(optimizer, "consolidate_state_dict", None))


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
