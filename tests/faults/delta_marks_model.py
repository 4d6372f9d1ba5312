"""A model of what a table remembers of its changes: marks, tombstones, ``replaced``, twice while a save is under way.

Rows are written, erased, cleared and inserted again, slots are added and stores swapped, while saves that hold a delta
are committed, fail, or are ephemeral. A base is a dict, and so is what its delta makes of it. Ids may lie on two ranks
and move between them; two savers may have the same model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from faults.all_states import Lost, all_states
from faults.delta_marks_table import MarkRules, Row, Since, Table

Content = frozenset[Row]


class Save(NamedTuple):
    """A save under way: what was in the tables, and the delta that is written of it."""

    saver: int
    ephemeral: bool
    content: Content
    upserts: Content
    deletes: frozenset[str]
    replaced: bool


class State(NamedTuple):
    """The ranks' parts of one table, and the savers."""

    tables: tuple[Table, ...]
    bases: tuple[Content, ...]  # of each saver
    owner: int  # the saver to whose base the marks belong
    left: int  # steps
    save: Save | None = None
    slots: int = 0
    clock: int = 0  # the last value that was written


@dataclass(frozen=True)
class Marks:
    """The marks within bounds.

    Args:
        rules: that the table keeps to.
        ids: that there are.
        depth: how many steps.
        n_ranks: on which the ids lie by turns.
        savers: of the same model.
        moves: whether an id that was erased on one rank may come back on another, as when slices change.
        swaps: whether a store may be swapped for a new one of the same name.
    """

    rules: MarkRules
    ids: str
    depth: int
    n_ranks: int = 1
    savers: int = 1
    moves: bool = False
    swaps: bool = False

    def check(self) -> int:
        """Go through all states and return how many there are.

        Raises:
            Lost: a delta makes something else of its base than was saved.
        """
        rows = [[Row(i, 0, 0) for i in self.ids[rank :: self.n_ranks]] for rank in range(self.n_ranks)]
        tables = tuple(Table(tuple(own), Since((False,) * len(own))) for own in rows)
        start = State(tables, (_content(tables),) * self.savers, 0, self.depth)
        return all_states(start, self._steps, lambda state: None)

    def _steps(self, state: State) -> Iterator[tuple[str, Iterator[State]]]:
        if not state.left:
            return
        state = state._replace(left=state.left - 1)
        for rank in range(self.n_ranks):
            for label, after in self._changes(state, rank):
                yield f"{label} on rank {rank}", iter([after])
        if not state.slots:
            wider = tuple(table.with_slot(self.rules) for table in state.tables)
            yield "add a slot", iter([state._replace(tables=wider, slots=1)])
        if state.save is not None:
            yield "commit", self._commit(state, state.save)
            failed = tuple(table.end(self.rules, moves_base=False) for table in state.tables)
            yield "fail", iter([state._replace(tables=failed, save=None)])
            return
        for saver in range(self.savers):
            for ephemeral in (False, True):
                word = "an ephemeral" if ephemeral else "a delta"
                yield f"stage {word} of saver {saver}", iter([self._stage(state, saver, ephemeral)])

    def _changes(self, state: State, rank: int) -> Iterator[tuple[str, State]]:
        table = state.tables[rank]
        elsewhere = {row.id for other in state.tables if other is not table for row in other.rows}

        def after(table: Table) -> State:
            tables = (*state.tables[:rank], table, *state.tables[rank + 1 :])
            return state._replace(tables=tables, clock=state.clock + 1)

        for number, i in enumerate(self.ids):
            if i in elsewhere or (not self.moves and number % self.n_ranks != rank):
                continue
            yield f"write {i}", after(table.write(Row(i, state.clock + 1, state.slots), self.rules))
            if table.position(i) is not None:
                yield f"erase {i}", after(table.erase(i, self.rules))
        if table.rows:
            yield "clear", after(table.clear(self.rules))
            if self.swaps:
                yield "swap the store", after(table.swap(self.rules))

    def _stage(self, state: State, saver: int, ephemeral: bool) -> State:
        """Take what is to be written; all that happens from now on is marked in the second set, too."""
        is_of_another = self.rules.marks_know_their_base and state.owner != saver
        any_replaced = any(table.one.replaced for table in state.tables)
        upserts: set[Row] = set()
        deletes: set[str] = set()
        for table in state.tables:
            replaced = any_replaced if self.rules.replaced_is_agreed else table.one.replaced
            found = table.delta(self.rules, replaced=is_of_another or replaced)
            upserts |= found[0]
            deletes |= found[1]
        save = Save(
            saver,
            ephemeral,
            _content(state.tables),
            frozenset(upserts),
            frozenset(deletes),
            is_of_another or any_replaced,
        )
        return state._replace(tables=tuple(table.begin(self.rules) for table in state.tables), save=save)

    def _commit(self, state: State, save: Save) -> Iterator[State]:
        base = frozenset() if save.replaced else state.bases[save.saver]
        upserted = {row.id for row in save.upserts}
        kept = {row for row in base if row.id not in upserted} | save.upserts
        beaten = upserted if self.rules.upserts_beat_deletes else set()
        restored = frozenset(row for row in kept if row.id not in save.deletes or row.id in beaten)
        if restored != save.content:
            raise Lost(f"restores {sorted(restored)}, was {sorted(save.content)}")
        moves = not (save.ephemeral and self.rules.ephemeral_keeps_marks)
        tables = tuple(table.end(self.rules, moves_base=moves) for table in state.tables)
        bases, owner = state.bases, state.owner
        if not save.ephemeral:
            bases, owner = (*bases[: save.saver], save.content, *bases[save.saver + 1 :]), save.saver
        yield state._replace(tables=tables, bases=bases, owner=owner, save=None)


def _content(tables: tuple[Table, ...]) -> Content:
    return frozenset(row for table in tables for row in table.rows)
