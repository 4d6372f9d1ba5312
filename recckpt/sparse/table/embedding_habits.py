"""What users of ``nn.Embedding`` type, and the line that a table takes in its place."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from recckpt.text import nearest

_P = ParamSpec("_P")
_T = TypeVar("_T")

_POSITIONS = ("num_embeddings", "embedding_dim", "padding_idx")
_DIMENSION = "the first argument is the dimension"
_GROWS = "a table grows, and is not given a number of rows"
_NO_NORM = (
    "rows are not renormalised: torch.nn.functional.normalize(table(ids), dim=-1) does that to what is looked up, "
    "recckpt.sparse.clip_grad_norm_ limits the gradients"
)
_SPARSE = "gradients are always of the rows in a batch alone, and go to recckpt.sparse.SparseAdam([table]) or another"
_ARGUMENTS = {  # of nn.Embedding and nn.EmbeddingBag -> what is different
    "num_embeddings": _GROWS,
    "embedding_dim": _DIMENSION,
    "padding_idx": "its padding_id may be any int64",
    "max_norm": _NO_NORM,
    "norm_type": _NO_NORM,
    "scale_grad_by_freq": "gradients of an id that occurs several times add up, and are not scaled by how often",
    "sparse": _SPARSE,
    "mode": 'a table is called for rows, and table.bag(ids, mode="mean") pools them',
    "include_last_offset": "it is an argument of table.bag(ids, offsets, include_last_offset=True)",
    "_weight": "HashTable.from_embedding(module, name=...) takes the rows of an nn.Embedding",
}
_ATTRIBUTES = {  # the same -> code of a table `{0}`
    "weight": (
        "rows go by id: read them by {0}.lookup(ids)[0], set them by {0}.insert(ids, rows), take all of them by "
        "{0}.ids() and {0}.embeddings(), their gradients by {0}.grad, and freeze them by {0}.requires_grad_(False)"
    ),
    "num_embeddings": "write len({0}), the rows that there are: it grows",
    "embedding_dim": "write {0}.embedding_shape[-1]",
    "padding_idx": "write {0}.padding_id",
    "max_norm": _NO_NORM.replace("table", "{0}"),
    "norm_type": _NO_NORM.replace("table", "{0}"),
    "scale_grad_by_freq": _ARGUMENTS["scale_grad_by_freq"],
    "sparse": _SPARSE.replace("[table]", "[{0}]"),
    "reset_parameters": "write {0}.clear(): ids get new rows when training meets them again",
    "mode": 'write {0}.bag(ids, mode="mean")',
}


def answers_habits(init: Callable[Concatenate[_T, _P], None]) -> Callable[Concatenate[_T, _P], None]:
    """Let the ``__init__`` of a table answer arguments of ``nn.Embedding`` with the line to write instead."""
    signature = inspect.signature(init)
    own = list(signature.parameters)[1:]

    @functools.wraps(init)
    def call(self: _T, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            signature.bind(self, *args, **kwargs)
        except TypeError:
            raise TypeError(_advice(type(self).__name__, own, args, kwargs)) from None
        init(self, *args, **kwargs)

    return call


def refuse_habit(table: Any, name: str) -> None:
    """Raise AttributeError for an attribute of ``nn.Embedding``, with the code to write instead."""
    if name in _ATTRIBUTES:
        kind = type(table).__name__
        advice = _ATTRIBUTES[name].format("table")
        raise AttributeError(f"{kind} {vars(table).get('name', '')!r} has no {name!r}: {advice}", name=name, obj=table)


def _advice(kind: str, own: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the call to write instead of one with these arguments, and why; ``own`` are those of the table."""
    unknown = [name for name in kwargs if name not in own and name not in _ARGUMENTS]
    if unknown:
        return f"{kind} has no argument {unknown[0]!r}{nearest(unknown[0], own)}"
    habits = {**dict(zip(_POSITIONS if len(args) > 1 else own, args, strict=False)), **kwargs}
    dim = habits.get("embedding_dim", habits.get("embedding_shape", 16))
    options = {name: value for name, value in kwargs.items() if name in own and name not in (own[0], "name")}
    if habits.get("padding_idx") is not None:
        options["padding_id"] = habits["padding_idx"]
    reasons = [_ARGUMENTS[name] for name in habits if name in _ARGUMENTS]
    if not habits.keys() & {"embedding_dim", own[0]}:
        reasons.append(_DIMENSION)
    if "name" not in kwargs:
        reasons.append("its name is that in checkpoints, and no other table of the model has it")
    call = _call(kind, [dim], {"name": kwargs.get("name", "item"), **options})
    return f"found {_call(kind, args, kwargs)}, expected {call}: {'; '.join(dict.fromkeys(reasons))}"


def _call(kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    values = [*(f"{value!r:.40}" for value in args), *(f"{name}={value!r:.40}" for name, value in kwargs.items())]
    return f"{kind}({', '.join(values)})"
