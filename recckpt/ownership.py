"""Which rank owns which ids of a table: every id one rank alone, or what they save together could not be loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import nn

from recckpt.group import Group
from recckpt.sparse.buckets import Slice
from recckpt.split import split_sparse_dense_state_dict, unwrap

Owned = Mapping[Slice | None, Sequence[str]]


def check_owners(model: nn.Module, group: Group) -> None:
    """Refuse tables of which several ranks own the same ids. Collective; all ranks raise alike.

    Raises:
        ValueError: names the tables.
    """
    if group.size == 1:
        return
    owned = group.all_gather(_owned(model))
    overlaps = [text for name in _names(owned) for text in _overlap(name, owned)]
    if overlaps:
        raise ValueError(
            f"{'; '.join(overlaps)}: an id belongs to one rank, or it is saved several times and cannot be loaded; "
            "make the table a recckpt.sparse.ShardedHashTable, or give it slice=gen_slice(rank, ranks)"
        )


def _owned(model: nn.Module) -> Owned:
    """Return the names of tables by slice; those of a model that staging refuses are of no account."""
    found: dict[Slice | None, list[str]] = {}
    try:
        tables = split_sparse_dense_state_dict(unwrap(model).state_dict())[0]
    except Exception:
        return found
    for name, table in tables.items():
        found.setdefault(getattr(table, "slice", None), []).append(name)
    return found


def _names(owned: Sequence[Owned]) -> list[str]:
    return sorted({name for of_rank in owned for names in of_rank.values() for name in names})


def _overlap(name: str, owned: Sequence[Owned]) -> list[str]:
    """Say which two ranks own the same ids of a table, if two do: neighbours, once they are in the order of ids."""
    ranges = sorted(
        ((own.begin / own.size, own.end / own.size, rank) if own else (0.0, 1.0, rank))
        for rank, of_rank in enumerate(owned)
        for own, names in of_rank.items()
        if name in names and (own is None or own.begin < own.end)
    )
    for (_, end, one), (begin, _, other) in pairwise(ranges):
        if begin < end:
            return [f"table {name!r}: ranks {min(one, other)} and {max(one, other)} own the same ids"]
    return []
