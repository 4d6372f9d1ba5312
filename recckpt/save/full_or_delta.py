"""Whether a save is full or a delta, and which tables it holds whole: one answer, from what all ranks propose."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress

import numpy as np
import numpy.typing as npt

from recckpt.format.tables import LiveLayout
from recckpt.policies.deltas import MAX_DELTAS, Chain, Deltas
from recckpt.save.delta_base import Changes
from recckpt.sparse.files.reduced_rows import TableChoice
from recckpt.sparse.files.table_rows import TableSource
from recckpt.sparse.table.marks import FrozenRows


@dataclass(frozen=True, eq=False)
class TableChanges:
    """The tables on one rank: in columns, since rank 0 is sent those of all ranks and adds them up.

    Attributes:
        names: of the tables; each column has a value of each.
        n_changed: rows and deleted ids that a delta would hold.
        n_rows: all rows.
        row_bytes: 0 where conditions choose the rows: the room that they take is not known before they are written.
        is_replaced: whether a delta would have to hold all rows.
        is_saved_otherwise: than in the base, by what the saver was asked to save.
    """

    names: tuple[str, ...]
    n_changed: npt.NDArray[np.int64]
    n_rows: npt.NDArray[np.int64]
    row_bytes: npt.NDArray[np.int64]
    is_replaced: npt.NDArray[np.bool_]
    is_saved_otherwise: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, rows: Mapping[str, tuple[int, int, int, bool, bool]]) -> TableChanges:
        """Return those of tables by name; a row has the values of a table, in the order of the columns."""
        columns = np.array(list(rows.values()), np.int64).reshape(-1, 5).T
        return cls(tuple(rows), *columns[:3], *columns[3:].astype(np.bool_))


@dataclass(frozen=True)
class DeltaProposal:
    """What a rank would write as a delta; rank 0 knows the chain that it would stand on, where there is one."""

    policy: Deltas
    base: str | None
    chain: Chain | None
    tables: TableChanges


@dataclass(frozen=True)
class Kind:
    """What a save is."""

    base: str | None = None  # save id of the checkpoint that a delta stands on; None of a full one
    replaced: frozenset[str] = frozenset()  # tables of which a delta holds all rows
    why_full: str | None = None  # why it is no delta, where deltas are on
    n_links: int = 1  # of the chain, this one included
    stand_in: Kind | None = None  # of a full one that the policy asks for: the delta, where there is no room for it

    @property
    def name(self) -> str:
        """``"full"`` or ``"delta"``."""
        return "full" if self.base is None else "delta"


FULL = Kind()


def delta_proposal(
    changes: Changes,
    chain: Chain | None,
    tables: Sequence[TableSource],
    frozen: Mapping[str, FrozenRows],
    *,
    choices: Mapping[str, TableChoice],
    layouts: Mapping[str, LiveLayout],
) -> DeltaProposal:
    """Return what a rank would write.

    Args:
        changes: from which checkpoint it counts.
        chain: that a delta would stand on.
        tables: all rows.
        frozen: by name, which of them have changed.
        choices: by name, what is saved of tables that are not saved whole.
        layouts: by name, how live tables lie.
    """
    base = changes.base

    def changes_of(table: TableSource) -> tuple[int, int, int, bool, bool]:
        slots, reduced, is_filtered = table.slots, None, False
        if table.name in choices:
            choice = choices[table.name]
            slots, reduced, is_filtered = choice.slots, choice.reduced, choice.where is not None
        row_bytes = 0 if is_filtered else 8 + sum(slot.row_bytes for slot in slots)
        is_otherwise = base is not None and table.name in base.slots and base.reduced.get(table.name) != reduced
        marks = frozen.get(table.name)  # a table of the user's own has none
        is_replaced = base is None or marks is None or marks.is_replaced(base.save_id)
        is_replaced = is_replaced or marks is None or base is None or base.slots.get(table.name) != slots
        is_replaced = is_replaced or base is None or base.live.get(table.name) != layouts.get(table.name)
        n_changed = table.n_rows if is_replaced or marks is None else marks.n_changed
        return n_changed, table.n_rows, row_bytes, is_replaced, is_otherwise

    of_tables = TableChanges.of({table.name: changes_of(table) for table in tables})
    return DeltaProposal(changes.policy, base.save_id if base else None, chain, of_tables)


def agreed_kind(proposals: Sequence[DeltaProposal | None]) -> Kind:
    """Return what the save is, by what each rank proposes, None where it writes no deltas; pure."""
    first = proposals[0]
    if first is None:
        return FULL
    others = [rank for rank, each in enumerate(proposals) if each is None or each.base != first.base]
    if others:
        return Kind(why_full=f"rank {others[0]} counts changes from another checkpoint, or none")
    tables = _changes_of_all([each.tables for each in proposals if each is not None])
    for name in compress(tables.names, tables.is_saved_otherwise):
        return Kind(why_full=f"table {name!r} is not saved as before: other save_slots, save_where or store")
    n_changed = int(np.where(tables.is_replaced, tables.n_rows, tables.n_changed).sum())
    why_full = first.policy.why_full(first.chain, n_changed, int(tables.n_rows.sum()))
    if first.chain is None:
        return Kind(why_full=why_full)
    replaced = frozenset(compress(tables.names, tables.is_replaced))
    delta = Kind(first.base, replaced, n_links=first.chain.n_deltas + 2)
    if why_full is None:
        return delta
    return Kind(why_full=why_full, stand_in=delta if first.chain.n_deltas < MAX_DELTAS else None)


def _changes_of_all(ranks: Sequence[TableChanges]) -> TableChanges:
    """Add up the tables of the ranks; what is true of one on a rank is true of it in all."""
    alike: defaultdict[tuple[str, ...], list[TableChanges]] = defaultdict(list)
    for tables in ranks:
        alike[tables.names].append(tables)
    places = {name: place for place, name in enumerate(dict.fromkeys(chain.from_iterable(alike)))}
    n_changed, n_rows, row_bytes = np.zeros((3, len(places)), np.int64)
    is_replaced, is_saved_otherwise = np.zeros((2, len(places)), np.bool_)
    for names, group in alike.items():
        at = [places[name] for name in names]
        n_changed[at] += sum(tables.n_changed for tables in group)
        n_rows[at] += sum(tables.n_rows for tables in group)
        is_replaced[at] |= np.any([tables.is_replaced for tables in group], axis=0)
        is_saved_otherwise[at] |= np.any([tables.is_saved_otherwise for tables in group], axis=0)
    return TableChanges(tuple(places), n_changed, n_rows, row_bytes, is_replaced, is_saved_otherwise)


def spared_bytes(kind: Kind, proposal: DeltaProposal | None) -> int:
    """Return about how many bytes less than all its rows a rank writes."""
    if kind.base is None or proposal is None:
        return 0
    tables = proposal.tables
    n_spared = (tables.n_rows - tables.n_changed).clip(min=0)
    n_spared[[name in kind.replaced for name in tables.names]] = 0
    return int(n_spared @ tables.row_bytes)
