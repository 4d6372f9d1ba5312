"""Whether a save is full or a delta, and which tables it holds whole: one answer, from what all ranks propose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recckpt.policies.deltas import MAX_DELTAS, Chain, Deltas
from recckpt.save.delta_base import Changes
from recckpt.sparse.files.reduced_rows import TableChoice
from recckpt.sparse.files.table_rows import TableSource
from recckpt.sparse.table.marks import Frozen


@dataclass(frozen=True)
class TableChanges:
    """A table on one rank: rows and deleted ids that a delta would hold, of so many rows; or it has to hold all.

    ``row_bytes`` is 0 where conditions choose the rows: the room that they take is not known before they are written.
    """

    n_changed: int
    n_rows: int
    row_bytes: int
    is_replaced: bool
    is_saved_otherwise: bool  # than in the base, by what the saver was asked to save


@dataclass(frozen=True)
class DeltaProposal:
    """What a rank would write as a delta; rank 0 knows the chain that it would stand on, where there is one."""

    policy: Deltas
    base: str | None
    chain: Chain | None
    tables: Mapping[str, TableChanges]


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
    frozen: Mapping[str, Frozen],
    choices: Mapping[str, TableChoice],
) -> DeltaProposal:
    """Return what a rank would write; ``choices`` has, by name, the tables that are not saved whole."""
    base = changes.base

    def changes_of(table: TableSource) -> TableChanges:
        slots, reduced, is_filtered = table.slots, None, False
        if table.name in choices:
            choice = choices[table.name]
            slots, reduced, is_filtered = choice.slots, choice.reduced, choice.where is not None
        row_bytes = 0 if is_filtered else 8 + sum(slot.row_bytes for slot in slots)
        is_otherwise = base is not None and table.name in base.slots and base.reduced.get(table.name) != reduced
        marks = frozen.get(table.name)  # a table of the user's own has none
        is_replaced = base is None or marks is None or marks.is_replaced(base.save_id)
        is_replaced = is_replaced or marks is None or base is None or base.slots.get(table.name) != slots
        n_changed = table.n_rows if is_replaced or marks is None else marks.n_changed
        return TableChanges(n_changed, table.n_rows, row_bytes, is_replaced, is_otherwise)

    of_tables = {table.name: changes_of(table) for table in tables}
    return DeltaProposal(changes.policy, base.save_id if base else None, chain, of_tables)


def agreed_kind(proposals: Sequence[DeltaProposal | None]) -> Kind:
    """Return what the save is, by what each rank proposes, None where it writes no deltas; pure."""
    first = proposals[0]
    if first is None:
        return FULL
    others = [rank for rank, each in enumerate(proposals) if each is None or each.base != first.base]
    if others:
        return Kind(why_full=f"rank {others[0]} counts changes from another checkpoint, or none")
    tables: dict[str, list[TableChanges]] = {}
    for each in proposals:
        for name, table in each.tables.items() if each else ():
            tables.setdefault(name, []).append(table)
    otherwise = next((name for name, ranks in tables.items() if any(each.is_saved_otherwise for each in ranks)), None)
    if otherwise is not None:
        return Kind(why_full=f"table {otherwise!r} is not saved as before: other save_slots, save_where or store")
    replaced = frozenset(name for name, ranks in tables.items() if any(each.is_replaced for each in ranks))
    n_rows = {name: sum(each.n_rows for each in ranks) for name, ranks in tables.items()}
    n_changed = {name: sum(each.n_changed for each in ranks) for name, ranks in tables.items()} | {
        name: n_rows[name] for name in replaced
    }
    why_full = first.policy.why_full(first.chain, sum(n_changed.values()), sum(n_rows.values()))
    if first.chain is None:
        return Kind(why_full=why_full)
    delta = Kind(first.base, replaced, n_links=first.chain.n_deltas + 2)
    if why_full is None:
        return delta
    return Kind(why_full=why_full, stand_in=delta if first.chain.n_deltas < MAX_DELTAS else None)


def spared_bytes(kind: Kind, proposal: DeltaProposal | None) -> int:
    """Return about how many bytes less than all its rows a rank writes."""
    if kind.base is None or proposal is None:
        return 0
    kept = [table for name, table in proposal.tables.items() if name not in kind.replaced]
    return sum(max(0, table.n_rows - table.n_changed) * table.row_bytes for table in kept)
