"""The history of rows as text for people (no torch here)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recckpt.inspect.over_time.row_history import RowAt, RowHistory, TableHistory
from recckpt.text import Line, Table, cell, escaped, html, one_line, plain, plural, section
from recckpt.text.columns import Tone

_HEAD = ("CHECKPOINT", "STEP", "ROW", "SINCE STEP", "NORM", "MOVED")
_TONES: dict[str, Tone] = {"changed": "newest", "new": "good", "back": "good", "gone": "past", "damaged": "damaged"}


class PrintedHistory(TableHistory):
    """Rows of a table over the checkpoints of a run; prints as ``recckpt history``, and is tables in a notebook."""

    def __str__(self) -> str:
        return "\n".join(plain(lines_of(self)))

    def __repr__(self) -> str:
        rows, name = plural(len(self.rows), "row"), escaped(self.table)
        return f"<PrintedHistory {self.url!r}: {rows} of table {name}>"

    def _repr_html_(self) -> str:
        return html.body("history", html.lines(lines_of(self)), "")


def lines_of(history: TableHistory) -> list[Line]:
    """Return a table for each row, and what is damaged."""
    lines = [line for row in history.rows for line in section(_title(history, row), _lines_of_row(row))]
    broken = [f"{escaped(directory)}: {one_line(reason)}" for directory, reason in history.damage.items()]
    return [*lines, *section("damaged", broken)][1:]


def _title(history: TableHistory, row: RowHistory) -> str:
    forgotten = ", which was asked to be forgotten" if row.was_forgotten else ""
    return f"{escaped(history.table)} {row.id}{forgotten}"


def _lines_of_row(row: RowHistory) -> Iterator[Line]:
    if not row.is_known and all(state.change == "absent" for state in row.states):
        yield f"in none of {plural(len(row.states), 'checkpoint')}"
        return
    slots = list(dict.fromkeys(name for state in row.states for name in state.slots or ()))
    head = (*_HEAD, *map(escaped, slots))
    tones = {number: _TONES[state.change] for number, state in enumerate(row.states) if state.change in _TONES}
    yield Table(head, [_cells(state, slots) for state in row.states], (*_HEAD[3:], "STEP", *map(escaped, slots)), tones)


def _cells(state: RowAt, slots: Sequence[str]) -> Sequence[str]:
    values = [state.norm, state.moved, *((state.slots or {}).get(name) for name in slots)]
    steps = [_step(state.step), state.change, _step(state.since_step)]
    return [escaped(state.ckpt_id), *steps, *("-" if value is None else cell(value) for value in values)]


def _step(step: int | None) -> str:
    return "-" if step is None else str(step)
