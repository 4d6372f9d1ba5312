"""Which tensors of TorchRec belong to which table, by the names that its modules give to them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable

OF_ZCH = "_managed_collision_modules."
OF_KV_ZCH = ("bucket", "metadata")  # beside the ids, of tables behind a key-value store
_WEIGHT = re.compile(r"(?:.*\.)?(?:embedding_bags|embeddings)\.([^.]+)\.weight")
_STATE = re.compile(r"((?:.*\.)?(?:embedding_bags|embeddings)\.([^.]+)\.weight)\.(?:\2\.)?(?:weight\.)?([A-Za-z_0-9]+)")
_ZCH_MODULE = re.compile(rf"(?:(.*)\.)?{re.escape(OF_ZCH)}([^.]+)\.(\w+)")


def table_names(tensors: Iterable[str]) -> dict[str, str]:
    """Return tensor -> name of the table of which it is the matrix.

    The name is that of the table in its collection; of several that are called alike, with that of the collection.
    """
    short = {name: match[1] for name in tensors if (match := _WEIGHT.fullmatch(name))}
    counts = Counter(short.values())
    return {name: table if counts[table] == 1 else name.removesuffix(".weight") for name, table in short.items()}


def is_state(name: str) -> bool:
    """Say whether a name is that of a state of a fused optimizer."""
    return _STATE.fullmatch(name) is not None


def states_of(weight: str, tensors: Iterable[str], weights: Collection[str]) -> dict[str, str]:
    """Return the states of a fused optimizer for a matrix, tensor -> state.

    The name of a state ends as that of its matrix; what is before that differs, as the optimizer lies elsewhere.
    """
    matches = [match for name in tensors if (match := _STATE.fullmatch(name)) and match[2] == _table_of(weight)]
    rivals = [other for other in weights if _table_of(other) == _table_of(weight)]
    return {m[0]: m[3] for m in matches if max(rivals, key=lambda other: _common_end(m[1], other)) == weight}


def zch_of(weight: str, tensors: Iterable[str], weights: Collection[str]) -> dict[str, str]:
    """Return the state of ZCH for a matrix, its own name -> tensor; empty where it has none."""
    matches = [match for name in tensors if (match := _ZCH_MODULE.fullmatch(name)) and match[2] == _table_of(weight)]
    if sum(_table_of(other) == _table_of(weight) for other in weights) > 1:  # then only that of the same wrapper
        matches = [match for match in matches if weight.startswith(_wrapper(match[1] or ""))]
    return {match[3]: match[0] for match in matches}


def _table_of(weight: str) -> str:
    match = _WEIGHT.fullmatch(weight)
    return match[1] if match else ""


def _common_end(one: str, other: str) -> int:
    """Return how many parts of two names are the same, from the end on."""
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(one.count("."), other.count(".")) + 1)


def _wrapper(prefix: str) -> str:
    """Return how the names of a module of managed collision begin, of whose parts one has the remaps."""
    return prefix.rpartition("_managed_collision_collection")[0]
