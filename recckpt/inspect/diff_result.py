"""The differences of two checkpoints as data, as text, and as a self-contained page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from recckpt.inspect.spread import QUANTILES, Spread
from recckpt.text import Line, Table, cell, count, escaped, html, one_line, pairs, plain, plural, section
from recckpt.text.columns import Tone

Status = Literal["same", "changed", "added", "gone", "unclear"]
_Section = tuple[str, Sequence[str], list[Sequence[str]]]  # title, column heads, rows

TABLE_HEAD = ("TABLE", "BEFORE", "AFTER", "ADDED", "GONE", "CHANGED", "SAME")
SLOT_HEAD = (
    *("TABLE", "SLOT", "CHANGED", "DISTANCE", "LEAST"),
    *(f"{100 * share:g} %" for share in QUANTILES),
    *("MOST", "NOT FINITE"),
)
MOVED_HEAD = ("TABLE", "ID", "L2", "COSINE")
TENSOR_HEAD = ("TENSOR", "STATUS", "RELATIVE", "LARGEST", "AT", "KIND")
VALUE_HEAD = ("WHAT", "NAME", "STATUS", "BEFORE", "AFTER")
KEY_HEAD = ("KEY", "STATUS", "LARGEST", "BEFORE", "AFTER")
_MOST_KEYS = 20  # most keys of one object to list in the text
UNCLEAR = "unclear: one of these differs; their file is too large, or not as recckpt writes it, so it is compared whole"
_TONES: dict[str, Tone] = {"added": "good", "gone": "damaged", "changed": "unsure", "unclear": "unsure"}
NUMBERS = frozenset({*TABLE_HEAD[1:], *SLOT_HEAD[4:], "CHANGED", "ID", "L2", "COSINE", "RELATIVE", "LARGEST"})
_SHARES = ("added", "gone", "changed", "same")
_STYLE = """
.recckpt.diff .bar { display: flex; height: .8em; min-width: 9em; border-radius: .2em; overflow: hidden; }
.recckpt.diff .bar i { display: block; }
.recckpt.diff .added { background: #2e9e5b; } .recckpt.diff .gone { background: #d1495b; }
.recckpt.diff .changed { background: #e09f3e; } .recckpt.diff .same { background: #8886; }
.recckpt.diff .key i { display: inline-block; width: .8em; height: .8em; border-radius: .2em; margin: 0 .3em 0 1em; }
.recckpt.diff .key i:first-child { margin-left: 0; }
"""


@dataclass(frozen=True)
class Side:
    path: str  # path or URL of the checkpoint
    ckpt_id: str
    kind: str  # ``"full"`` or ``"delta"``
    step: int | None  # global step; None if the saver does not count steps
    rows: int  # rows of all tables
    n_links: int  # checkpoints in the chain; 1 for a full checkpoint
    # how ``Choose`` reduced the saved tables: which rows and slots it omitted

    reduced: tuple[str, ...]


@dataclass(frozen=True)
class SlotDiff:
    name: str
    before: str | None  # dtype and shape before, such as ``float32[16]``; None if absent
    after: str | None  # dtype and shape after; None if absent
    # rows with a value that differs by more than the tolerance; None if shapes differ or one side lacks the slot
    changed: int | None
    l2: Spread | None  # Euclidean distances of changed rows, in the slot's unit; None without changes
    cosine: Spread | None  # cosine distances, 0 to 2, of changed rows; scalars and rows of zeros have none

    @property
    def is_same(self) -> bool:
        return self.before == self.after and self.changed == 0


@dataclass(frozen=True)
class MovedRow:
    id: int
    l2: float  # distance that the embedding moved; NaN or infinite if one of its values is
    cosine: float  # cosine distance; NaN if undefined


@dataclass(frozen=True)
class TableDiff:
    name: str
    status: Status  # whether the table was added, is gone, or has changed
    rows_before: int | None  # None if absent
    rows_after: int | None  # None if absent
    added: int  # ids only in the later checkpoint
    gone: int  # ids only in the earlier checkpoint
    changed: int  # ids in both with a value that differs by more than the tolerance, in a comparable slot
    same: int  # other ids in both
    slots: tuple[SlotDiff, ...]  # slots of either side
    # rows whose embeddings moved most, farthest first; rows that became NaN or infinite come before all others
    moved: tuple[MovedRow, ...]


@dataclass(frozen=True)
class TensorDiff:
    name: str
    of: str  # owner: ``"model"``, or ``"extra"`` for a registered object that is sharded over ranks
    status: Status  # whether the tensor was added, is gone, or has changed
    before: str | None  # dtype and shape; None if absent
    after: str | None  # dtype and shape after; None if absent
    # norm of the change divided by the norm before; non-finite values that stayed are ignored; infinite if the norm
    # before was 0; None if the shapes differ
    relative: float | None = None
    largest: float | None = None  # largest difference of a single value; NaN if a NaN appeared or disappeared
    at: tuple[int, ...] | None = None  # index of the largest difference


@dataclass(frozen=True)
class KeyDiff:
    """A key that differs in a state, such as ``.param_groups[0].lr``; the key "" means the whole state."""

    key: str
    status: Status  # ``"changed"``, ``"added"`` or ``"gone"``
    before: Any  # a number, a tensor's dtype and shape, or other values as shortened text; None if absent
    after: Any  # the same after the change
    largest: float | None = None  # for tensors: largest difference of a single value; NaN if a NaN came or went


@dataclass(frozen=True)
class ValueDiff:
    # ``"training state"``, with values; ``"extra"`` or ``"extra of ranks"``: registered objects; ``"position"`` of a
    # dataset; ``"plain value"`` of the model; ``"random state"``
    group: str
    name: str
    # what happened to the value; ``"unclear"`` if it shares a file with others, that file differs, and the file is too
    # large or not as recckpt writes it
    status: Status
    before: Any = None  # value of training state before
    after: Any = None  # value of training state after
    inside: tuple[KeyDiff, ...] = ()  # keys that differ, except in random states


@dataclass(frozen=True, repr=False)
class CheckpointDiff:
    """The differences of two checkpoints. Prints as the text of ``recckpt diff``; notebooks show a page."""

    before: Side  # the earlier side
    after: Side  # the later side
    tolerance: float  # smaller differences of single values are ignored
    tables: tuple[TableDiff, ...]  # tables of either side, by name
    tensors: tuple[TensorDiff, ...]  # dense tensors of either side
    values: tuple[ValueDiff, ...]  # training state, and the names of all other values

    @property
    def is_equal(self) -> bool:
        return not self.differing

    @property
    def differing(self) -> dict[str, int]:
        every = [("table", each.status) for each in self.tables] + [("tensor", each.status) for each in self.tensors]
        every += [(each.group, each.status) for each in self.values]
        return dict(Counter(group for group, status in every if status != "same"))

    def table(self, name: str) -> TableDiff:
        return {table.name: table for table in self.tables}[name]

    def to_dict(self) -> Mapping[str, Any]:
        return {"equal": self.is_equal, **asdict(self)}

    def to_html(self) -> str:
        return html.page(f"{escaped(self.before.ckpt_id)} and {escaped(self.after.ckpt_id)}", self._repr_html_())

    def _repr_html_(self) -> str:
        parts = [f"<h1>{html.text(verdict(self))}</h1>"]
        parts += [f"<p>{name}: {html.text(_side_text(getattr(self, name)))}</p>" for name in ("before", "after")]
        if self.tolerance:
            parts.append(f"<p>tolerance {self.tolerance:g}</p>")
        if self.tables:
            key = " ".join(f'<i class="{share}"></i>{share}' for share in _SHARES)
            rows = ([*map(html.text, _table_row(table)), _bar(table)] for table in self.tables)
            parts += ["<h2>Tables</h2>", html.table((*TABLE_HEAD, "ROWS"), rows, NUMBERS), f'<p class="key">{key}</p>']
        for title, head, rows_of in _sections(self):
            parts += html.section(title.capitalize(), head, rows_of, NUMBERS)
        if any(each.status == "unclear" for each in self.values):
            parts.append(f"<p>{html.text(UNCLEAR)}</p>")
        return html.body("diff", parts, _STYLE)

    def __str__(self) -> str:
        return "\n".join(plain(lines_of(self)))

    def __repr__(self) -> str:
        counts = ", ".join(f"{n} of {what}" for what, n in self.differing.items()) or "equal"
        return f"<CheckpointDiff {self.before.ckpt_id!r} -> {self.after.ckpt_id!r}: {counts}>"


def lines_of(diff: CheckpointDiff) -> list[Line]:
    """Return the lines that ``recckpt diff`` prints; equal items are counted, not listed."""
    lines: list[Line] = [
        verdict(diff),
        "",
        *pairs([("before", _side_text(diff.before)), ("after", _side_text(diff.after))]),
    ]
    if diff.tolerance:
        lines += pairs([("tolerance", f"{diff.tolerance:g}")])
    tables = ("tables", TABLE_HEAD, [_table_row(table) for table in diff.tables])
    for title, head, rows in [tables, *_sections(diff)]:
        at = head.index("STATUS") if "STATUS" in head else None
        tones = {n: _TONES[row[at]] for n, row in enumerate(rows) if at is not None and row[at] in _TONES}
        lines += section(title, [Table(head, rows, NUMBERS, tones)] if rows else [])
    if any(each.status == "unclear" for each in diff.values):
        lines.append(f"  {UNCLEAR}")
    return lines


def verdict(diff: CheckpointDiff) -> str:
    """Return the first line: whether the two are equal, and how many things differ."""
    if diff.is_equal:
        else_too = " and all else" if diff.values else ""
        return f"equal: {plural(len(diff.tables), 'table')}, {plural(len(diff.tensors), 'tensor')}{else_too}"
    longer = {"training state": ("value", " of the training state"), "extra of ranks": ("extra", " of ranks")}
    words = ((n, *longer.get(what, (what, ""))) for what, n in diff.differing.items())
    return "different: " + ", ".join(plural(n, one) + of for n, one, of in words)


def _bar(table: TableDiff) -> str:
    counts = {share: getattr(table, share) for share in _SHARES}
    total = max(1, sum(counts.values()))
    shares = (
        f'<i class="{share}" style="width:{100 * n / total:.2f}%" title="{share}: {count(n)}"></i>'
        for share, n in counts.items()
        if n
    )
    return f'<div class="bar">{"".join(shares)}</div>'


def _side_text(side: Side) -> str:
    step = "" if side.step is None else f", step {side.step}"
    links = f" of {plural(side.n_links, 'link')}" if side.n_links > 1 else ""
    reduced = "".join(f"; saved with {one_line(option)}" for option in side.reduced)
    return f"{one_line(side.path)} ({side.kind}{links}{step}, {plural(side.rows, 'row')}){reduced}"


def _table_row(table: TableDiff) -> Sequence[str]:
    rows = ["-" if n is None else count(n) for n in (table.rows_before, table.rows_after)]
    return (escaped(table.name), *rows, *map(count, (table.added, table.gone, table.changed, table.same)))


def _sections(diff: CheckpointDiff) -> list[_Section]:
    moved = [
        (escaped(table.name), str(row.id), f"{row.l2:.4g}", "-" if math.isnan(row.cosine) else f"{row.cosine:.4g}")
        for table in diff.tables
        for row in table.moved
    ]
    return [
        ("how far rows moved that changed", SLOT_HEAD, list(_slot_rows(diff.tables))),
        ("embeddings that moved most", MOVED_HEAD, [*moved]),
        ("dense tensors", TENSOR_HEAD, [_tensor_row(each) for each in diff.tensors if each.status != "same"]),
        ("all else", VALUE_HEAD, [_value_row(each) for each in diff.values if each.status != "same"]),
        ("inside of that", KEY_HEAD, [row for each in diff.values for row in _key_rows(each)]),
    ]


def _slot_rows(tables: Iterable[TableDiff]) -> Iterable[Sequence[str]]:
    for table in tables:
        for slot in table.slots:
            if table.rows_before is None or table.rows_after is None or slot.is_same:
                continue
            names = escaped(table.name), escaped(slot.name)
            kinds = f"{slot.before or 'no such slot'} -> {slot.after or 'no such slot'}"
            is_alike = slot.before == slot.after
            if slot.changed is None or (not is_alike and not slot.changed):
                yield (*names, "-", kinds, *[""] * (len(SLOT_HEAD) - 4))
                continue
            yield (*names, count(slot.changed), "L2" if is_alike else f"L2, {kinds}", *_spread(slot.l2))
            if slot.cosine is not None:
                yield (*names, "", "cosine", *_spread(slot.cosine))


def _spread(spread: Spread | None) -> Sequence[str]:
    if spread is None:
        return [""] * (len(QUANTILES) + 3)
    values = (spread.least, *spread.quantiles.values(), spread.most) if spread.n else ()
    shown = [f"{value:.4g}" for value in values] or ["-"] * (len(QUANTILES) + 2)
    return [*shown, count(spread.not_finite)]


def _tensor_row(tensor: TensorDiff) -> Sequence[str]:
    name = escaped(tensor.name) if tensor.of == "model" else f"{escaped(tensor.name)} (of {tensor.of})"
    kinds = tensor.before if tensor.before == tensor.after else f"{tensor.before or '-'} -> {tensor.after or '-'}"
    numbers = ["-" if value is None else f"{value:.4g}" for value in (tensor.relative, tensor.largest)]
    at = "-" if tensor.at is None else str(list(tensor.at))
    return name, tensor.status, *numbers, at, kinds or "-"


def _value_row(value: ValueDiff) -> Sequence[str]:
    is_state = value.group == "training state"
    sides = [one_line(cell(side)) if is_state else "" for side in (value.before, value.after)]
    if value.status in ("added", "gone") and is_state:
        sides[0 if value.status == "added" else 1] = "-"
    return value.group, escaped(value.name), value.status, *sides


def _key_rows(value: ValueDiff) -> Iterable[Sequence[str]]:
    for each in value.inside[:_MOST_KEYS]:
        sides = ["-" if side is None else one_line(cell(side)) for side in (each.before, each.after)]
        largest = "" if each.largest is None else f"{each.largest:.4g}"
        yield escaped(value.name + each.key), each.status, largest, *sides
    if len(value.inside) > _MOST_KEYS:
        yield escaped(value.name), f"and {plural(len(value.inside) - _MOST_KEYS, 'more key')}", "", "", ""
