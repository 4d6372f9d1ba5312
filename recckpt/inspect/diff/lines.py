"""A comparison as text for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from recckpt.inspect.diff.result import Differences, Side, SlotDiff, TableDiff, TensorDiff, ValueDiff
from recckpt.inspect.spread import QUANTILES, Spread
from recckpt.text import Line, Table, cell, count, escaped, one_line, pairs, plural, section
from recckpt.text.columns import Tone

TABLE_HEAD = ("TABLE", "BEFORE", "AFTER", "ADDED", "GONE", "CHANGED", "SAME")
SHARES = tuple(f"{100 * share:g} %" for share in QUANTILES)
SLOT_HEAD = ("TABLE", "SLOT", "CHANGED", "DISTANCE", "LEAST", *SHARES, "MOST", "NOT FINITE")
MOVED_HEAD = ("TABLE", "ID", "L2", "COSINE")
TENSOR_HEAD = ("TENSOR", "STATUS", "RELATIVE", "LARGEST", "AT", "KIND")
VALUE_HEAD = ("WHAT", "NAME", "STATUS", "BEFORE", "AFTER")
UNCLEAR = "unclear: the file differs in which these lie together; which of them, no checksum says"
_TONES: dict[str, Tone] = {"added": "good", "gone": "damaged", "changed": "unsure", "unclear": "unsure"}
NUMBERS = frozenset({*TABLE_HEAD[1:], *SLOT_HEAD[4:], "CHANGED", "ID", "L2", "COSINE", "RELATIVE", "LARGEST"})


def lines_of(diff: Differences) -> list[Line]:
    """Return the lines that ``recckpt diff`` prints; what is the same is counted, not listed."""
    lines: list[Line] = list(pairs([("before", side_text(diff.before)), ("after", side_text(diff.after))]))
    if diff.tolerance:
        lines += pairs([("tolerance", f"{diff.tolerance:g}")])
    lines += _section("tables", TABLE_HEAD, map(table_row, diff.tables))
    lines += _section("how far rows moved that changed", SLOT_HEAD, slot_rows(diff.tables))
    lines += _section("embeddings that moved most", MOVED_HEAD, moved_rows(diff.tables))
    tensors = [each for each in diff.tensors if each.status != "same"]
    lines += _section("dense tensors", TENSOR_HEAD, map(tensor_row, tensors))
    values = [each for each in diff.values if each.status != "same"]
    lines += _section("all else", VALUE_HEAD, map(value_row, values))
    if any(each.status == "unclear" for each in values):
        lines.append(f"  {UNCLEAR}")
    return [*lines, "", verdict(diff)]


def verdict(diff: Differences) -> str:
    """Return the last line: whether the two are equal, and how many things differ."""
    if diff.is_equal:
        return f"equal: {plural(len(diff.tables), 'table')}, {plural(len(diff.tensors), 'tensor')} and all else"
    return "different: " + ", ".join(_counted(n, what) for what, n in diff.differing.items())


def _counted(n: int, what: str) -> str:
    one, of = {"training state": ("value", " of the training state"), "extra of ranks": ("extra", " of ranks")}.get(
        what, (what, "")
    )
    return plural(n, one) + of


def side_text(side: Side) -> str:
    """Return a side in one line."""
    step = "" if side.step is None else f", step {side.step}"
    links = f" of {plural(side.n_links, 'link')}" if side.n_links > 1 else ""
    reduced = "".join(f"; saved with {one_line(option)}" for option in side.reduced)
    return f"{one_line(side.path)} ({side.kind}{links}{step}, {plural(side.rows, 'row')}){reduced}"


def table_row(table: TableDiff) -> Sequence[str]:
    """Return what became of the rows of a table."""
    rows = ["-" if n is None else count(n) for n in (table.rows_before, table.rows_after)]
    return (escaped(table.name), *rows, *map(count, (table.added, table.gone, table.changed, table.same)))


def slot_rows(tables: Iterable[TableDiff]) -> Iterable[Sequence[str]]:
    """Yield a row for each distance of each slot that differs."""
    for table in tables:
        for slot in table.slots:
            if table.rows_before is None or table.rows_after is None or slot.is_same:
                continue
            names = escaped(table.name), escaped(slot.name)
            if slot.changed is None or (slot.before != slot.after and not slot.changed):
                yield (*names, "-", _kinds(slot), *[""] * (len(SLOT_HEAD) - 4))
                continue
            yield (*names, count(slot.changed), f"L2{_kinds_if_other(slot)}", *_spread(slot.l2))
            if slot.cosine is not None:
                yield (*names, "", "cosine", *_spread(slot.cosine))


def _kinds(slot: SlotDiff) -> str:
    return f"{slot.before or 'no such slot'} -> {slot.after or 'no such slot'}"


def _kinds_if_other(slot: SlotDiff) -> str:
    return "" if slot.before == slot.after else f", {_kinds(slot)}"


def _spread(spread: Spread | None) -> Sequence[str]:
    if spread is None:
        return [""] * (len(QUANTILES) + 3)
    values = (spread.least, *spread.quantiles.values(), spread.most) if spread.n else ()
    shown = [number(value) for value in values] or ["-"] * (len(QUANTILES) + 2)
    return [*shown, count(spread.not_finite)]


def moved_rows(tables: Iterable[TableDiff]) -> Iterable[Sequence[str]]:
    """Yield the rows that moved most, table by table."""
    for table in tables:
        for row in table.moved:
            yield (
                escaped(table.name),
                str(row.id),
                number(row.l2),
                "-" if math.isnan(row.cosine) else number(row.cosine),
            )


def tensor_row(tensor: TensorDiff) -> Sequence[str]:
    """Return what became of a dense tensor."""
    name = escaped(tensor.name) if tensor.of == "model" else f"{escaped(tensor.name)} (of {tensor.of})"
    kinds = tensor.before if tensor.before == tensor.after else f"{tensor.before or '-'} -> {tensor.after or '-'}"
    numbers = ["-" if value is None else number(value) for value in (tensor.relative, tensor.largest)]
    at = "-" if tensor.at is None else str(list(tensor.at))
    return name, tensor.status, *numbers, at, kinds or "-"


def value_row(value: ValueDiff) -> Sequence[str]:
    """Return what became of something else."""
    is_state = value.group == "training state"
    sides = [one_line(cell(side)) if is_state else "" for side in (value.before, value.after)]
    if value.status in ("added", "gone") and is_state:
        sides[0 if value.status == "added" else 1] = "-"
    return value.group, escaped(value.name), value.status, *sides


def number(value: float) -> str:
    """Return a distance in few digits."""
    return f"{value:.4g}"


def _section(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[Line]:
    listed = list(rows)
    at = head.index("STATUS") if "STATUS" in head else None
    tones = {n: _TONES[row[at]] for n, row in enumerate(listed) if at is not None and row[at] in _TONES}
    return section(title, [Table(head, listed, NUMBERS, tones)] if listed else [])
