"""A table of the model of marks: its rows, and what it remembers of their changes since two moments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


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
