"""The marks of deltas as a model of which all states are visited: a table, its marks, a trainer that saves them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from faults.all_states import Lost, all_states


@dataclass(frozen=True)
class MarkRules:
    """What a table keeps to. Without any one of its rules a delta makes something else of its base than was saved."""

    marks_kept_until_commit: bool = True  # without: cleared at the staging
    second_set: bool = True  # without: the commit clears what was marked since the staging
    second_set_is_told: bool = True  # of writes
    erase_moves_marks: bool = True  # along with the last row, which fills the gap
    erase_moves_second: bool = True
    tombstones_kept_on_failure: bool = True
    tombstones_in_both: bool = True
    replaced_kept_on_failure: bool = True
    replaced_in_both: bool = True
    present_are_not_deleted: bool = True  # an id that is there again at the save is no tombstone
    new_slot_replaces: bool = True
    new_store_replaces: bool = True  # a store that was swapped, copied or moved to a device has no base
    replaced_is_agreed: bool = True  # by all ranks
    ephemeral_keeps_marks: bool = True
    marks_know_their_base: bool = True  # the base of another saver is none
    upserts_beat_deletes: bool = True  # within one link, over all of its shards


class Row(NamedTuple):
    """An id, its value, and how many slots it has beside."""

    id: str
    value: int
    slots: int


class Since(NamedTuple):
    """What has changed since a moment: a mark for each row, the ids erased, and whether nothing is known of it."""

    marks: tuple[bool, ...]
    erased: frozenset[str] = frozenset()
    replaced: bool = False

    def fitted(self, n_rows: int) -> Since:
        """Return it with a mark for each row."""
        return self._replace(marks=(*self.marks, *(False for _ in range(n_rows - len(self.marks)))))

    def marked(self, position: int) -> Since:
        """Return it with a row marked, which may be new."""
        marks = self.fitted(position + 1).marks
        return self._replace(marks=(*marks[:position], True, *marks[position + 1 :]))

    def filled(self, position: int, *, moved: bool) -> Since:
        """Return it after the last row has come to this position, with its mark or without."""
        marks = list(self.marks)
        last = marks.pop()
        if position < len(marks):
            marks[position] = last if moved else marks[position]
        return self._replace(marks=tuple(marks))


class Table(NamedTuple):
    """Rows, what has changed since the base, and while a save is under way what has changed since its staging."""

    rows: tuple[Row, ...]
    one: Since
    two: Since | None = None

    def position(self, of_id: str) -> int | None:
        """Return where an id lies."""
        return next((position for position, row in enumerate(self.rows) if row.id == of_id), None)

    def write(self, row: Row, rules: MarkRules) -> Table:
        """Insert a row, or write over it."""
        found = self.position(row.id)
        at = len(self.rows) if found is None else found
        rows = (*self.rows[:at], row, *self.rows[at + 1 :])
        two = self.two and (self.two.marked(at) if rules.second_set_is_told else self.two.fitted(len(rows)))
        return Table(rows, self.one.marked(at), two)

    def erase(self, of_id: str, rules: MarkRules) -> Table:
        """Remove a row; the last one takes its place."""
        at = self.position(of_id)
        assert at is not None
        rows, last = self.rows[:-1], self.rows[-1]
        rows = (*rows[:at], last, *rows[at + 1 :]) if at < len(rows) else rows
        one = self.one.filled(at, moved=rules.erase_moves_marks)
        one = one._replace(erased=one.erased | {of_id})
        two = self.two and self.two.filled(at, moved=rules.erase_moves_marks and rules.erase_moves_second)
        if two and rules.tombstones_in_both:
            two = two._replace(erased=two.erased | {of_id})
        return Table(rows, one, two)

    def clear(self, rules: MarkRules) -> Table:
        """Remove all rows."""
        gone = Since((), replaced=True)
        two = gone if rules.replaced_in_both else self.two and self.two._replace(marks=())
        return Table((), gone, self.two and two)

    def swap(self, rules: MarkRules) -> Table:
        """Take a new store, which is empty."""
        fresh = Since((), replaced=rules.new_store_replaces)
        return Table((), fresh, self.two and fresh)

    def with_slot(self, rules: MarkRules) -> Table:
        """Add a slot to each row."""
        one = self.one._replace(replaced=self.one.replaced or rules.new_slot_replaces)
        two = self.two and self.two._replace(replaced=self.two.replaced or rules.new_slot_replaces)
        return Table(tuple(row._replace(slots=1) for row in self.rows), one, two)

    def delta(self, rules: MarkRules, *, replaced: bool) -> tuple[set[Row], set[str]]:
        """Return the rows and the deleted ids that a link holds of it."""
        if replaced:
            return set(self.rows), set()
        upserts = {row for row, is_marked in zip(self.rows, self.one.marks, strict=True) if is_marked}
        present = {row.id for row in self.rows} if rules.present_are_not_deleted else set()
        return upserts, set(self.one.erased - present)

    def begin(self, rules: MarkRules) -> Table:
        """Remember from now on what changes while a save is under way."""
        fresh = Since((False,) * len(self.rows))
        return Table(self.rows, self.one if rules.marks_kept_until_commit else fresh, fresh)

    def end(self, rules: MarkRules, *, moves_base: bool) -> Table:
        """Forget what was before the staging, where the base moves; else keep all."""
        assert self.two is not None
        if moves_base:
            return Table(self.rows, self.two if rules.second_set else Since((False,) * len(self.rows)))
        one = self.one
        if not rules.tombstones_kept_on_failure:
            one = one._replace(erased=self.two.erased)
        if not rules.replaced_kept_on_failure:
            one = one._replace(replaced=self.two.replaced)
        return Table(self.rows, one)


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
