"""What a rank checks of its model before it stages it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recckpt.format.buckets import Slice
from recckpt.live.attached import AttachedTable
from recckpt.save.arguments import check_trained
from recckpt.save.job import Live
from recckpt.save.room import estimated_bytes
from recckpt.types import RowShare, SavableTable

Owned = Mapping[Slice | RowShare | None, Sequence[str]]  # names of tables, by the ids that a rank owns of them


@dataclass(frozen=True)
class Checked:
    """What other ranks have to know of a model.

    ``unmatched`` names the options that match no table of this rank.
    """

    owned: Owned
    unmatched: frozenset[str]
    n_bytes: int  # about what this rank writes in a full save


def check(live: Live, tables: Mapping[str, SavableTable], dense: Mapping[str, Any], rank: int) -> Checked:
    """Check the tables and the dense state of the model of this rank.

    Raises:
        ValueError: the optimizer trains other tables, or an option cannot apply to what it matches.
    """
    check_trained(live.sparse_optim, tables)  # tables may be others than when the saver was made
    live.choice.check(tables)
    n_bytes = estimated_bytes(tables, dense, rank, live.choice)
    return Checked(_owned(tables), live.choice.unmatched(tables), n_bytes)


def _owned(tables: Mapping[str, SavableTable]) -> Owned:
    names: dict[Slice | RowShare | None, list[str]] = {}
    for name, table in tables.items():
        own = table.share if isinstance(table, AttachedTable) else getattr(table, "slice", None)
        names.setdefault(own, []).append(name)
    return {own: tuple(of_slice) for own, of_slice in names.items()}
