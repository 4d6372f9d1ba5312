"""Replaces the torch embeddings of a model by tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from recckpt.sparse.table.bags import Mode
from recckpt.sparse.table.table import HashTable, TableOptions
from recckpt.text import nearest

if TYPE_CHECKING:
    from typing_extensions import Unpack


class TableBag(nn.Module):
    """Wraps a table so that it is called like an ``nn.EmbeddingBag``."""

    def __init__(self, table: HashTable, mode: Mode, include_last_offset: bool) -> None:
        super().__init__()
        self.table, self.mode, self.include_last_offset = table, mode, include_last_offset

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Return one vector per bag of ids, with the arguments of ``nn.EmbeddingBag.forward``."""
        last = self.include_last_offset and offsets is not None
        return self.table.bag(input, offsets, mode=self.mode, weights=per_sample_weights, include_last_offset=last)


def replace_embeddings(
    model: nn.Module,
    modules: Iterable[str] | None = None,
    *,
    ids: Mapping[str, Tensor] | None = None,
    **options: Unpack[TableOptions],
) -> dict[str, HashTable]:
    """Replace each ``nn.Embedding`` and ``nn.EmbeddingBag`` of a model by a table, in place.

    The model behaves as before: same rows, same output, same gradients. Make the optimizers afterwards, because rows of
    tables are not parameters and need a sparse optimizer. A module that is registered several times becomes one table.

    Args:
        model: any module; not an embedding itself.
        modules: names of the modules to replace, as in ``model.named_modules()``; None for all.
        ids: name of a module -> the ids of its rows, as in :meth:`HashTable.from_embedding`.
        options: arguments of the tables, such as ``initializer``.

    Returns:
        Name -> table. The name of a module is the name of its table.

    Raises:
        TypeError, ValueError: a name does not name an embedding, another module uses a weight too, or
            :meth:`HashTable.from_embedding` refuses the module. The model is unchanged.
    """
    found = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    if "" in found:
        raise ValueError(f"found a {type(model).__name__}, expected a model that holds one: HashTable.from_embedding")
    chosen = list(found) if modules is None else [modules] if isinstance(modules, str) else list(modules)
    for name in (*chosen, *(ids or {})):
        if name not in found or name not in chosen:
            hint = nearest(name, found)
            raise ValueError(f"found the name {name!r}, expected one of the embeddings to replace, {chosen}{hint}")
    _check_ties(model, {name: found[name] for name in chosen})
    made: dict[str, HashTable | TableBag] = {}
    for name in chosen:
        replaced = found[name]
        table = HashTable.from_embedding(replaced, name=name, ids=(ids or {}).get(name), **options)
        table.train(replaced.training)
        made[name] = table
        if isinstance(replaced, nn.EmbeddingBag):
            bag = TableBag(table, replaced.mode, bool(replaced.include_last_offset))  # type: ignore[arg-type]
            made[name] = bag.train(replaced.training)
    everywhere = list(model.named_modules(remove_duplicate=False))  # a module may be registered several times
    places = [(path, made[name]) for name in chosen for path, other in everywhere if other is found[name]]
    for path, module in places:
        parent, _, last = path.rpartition(".")
        setattr(model.get_submodule(parent), last, module)
    return {name: module.table if isinstance(module, TableBag) else module for name, module in made.items()}


def _check_ties(model: nn.Module, replaced: Mapping[str, nn.Module]) -> None:
    """Refuse a weight that another module uses too, such as the output layer of a language model."""
    for name, module in replaced.items():
        for other_name, other in model.named_modules():
            for parameter_name, parameter in other.named_parameters(recurse=False):
                if parameter is module.weight and other is not module:
                    raise ValueError(
                        f"{name}.weight is {other_name}.{parameter_name} too, and a table cannot be: leave {name!r} out"
                    )
