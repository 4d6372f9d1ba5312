"""The plan of a load and its outcome, for people and programs."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recckpt.format.names import GLOBAL_STEP, Name
from recckpt.load.inventory import Thing
from recckpt.text import count, escaped, first_few, grid, html, one_line, plural, shown, size
from recckpt.types import EMBEDDING

log = logging.getLogger("recckpt")

UNASKED = "nothing asks for it"  # why names that no entry requests are not loaded
SETTINGS_STAY = "the settings of this run stay"  # why the settings of an optimizer are not loaded
SCHEDULE_STAYS = "the schedule of this run stays"  # why a scheduler of another run is not loaded
OF_TRAINING = "only training needs it"  # why other state is not loaded into a model for evaluation or serving
SAVED_BY = "saved by "  # why the settings of another class of optimizer are not loaded
DECAY_STAYS = "the weight decay of this run stays: saved by "  # if the settings come from a similar class
_MOST = 8  # names in a line
_HEAD = ("name", "from", "name there", "rows", "bytes", "note")
_NUMBERS = ("rows", "bytes")
_STYLE = """
.recckpt.load h1 { font-size: 1.1em; } .recckpt.load .scroll { margin: .5em 0; }
.recckpt.load .scroll td:last-child { min-width: 12em; opacity: .75; }
"""


@dataclass(frozen=True)
class Planned:
    """The source of one name of the model, or the reason why its state stays.

    Attributes:
        name: its name in the model.
        offer: index of the candidate that the name is loaded from; None if the state stays.
        source: its name in that checkpoint.
        thing: what the checkpoint has; in a report, ``rows`` of a slot is the number of rows loaded.
        conversion: such as ``cast float32 -> float16``; "" if unconverted.
        reason: why the state stays; "" if the name is loaded.
    """

    name: Name
    offer: int | None = None
    source: str = ""
    thing: Thing = field(default_factory=Thing)
    conversion: str = ""
    reason: str = ""

    @property
    def table(self) -> str:
        """The table that these rows belong to, in the model or, for a dense tensor, in the checkpoint; "" otherwise."""
        return self.name.table if self.name.is_slot else self.thing.table if self.name.group == "dense" else ""


@dataclass(frozen=True, repr=False)
class LoadPlan:
    """The source of every name of the model, or the reason why the name keeps its initial value.

    The text has ``[0]`` for the first source. Notebooks show it as a table.

    Attributes:
        items: one per name.
        sources: the checkpoints, as paths, in the order of the bank.
        warnings: findings that are not errors.
    """

    items: tuple[Planned, ...]
    sources: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @property
    def taken(self) -> list[Planned]:
        return [item for item in self.items if item.offer is not None]

    def comes_only_from(self, number: int) -> bool:
        return all(item.offer == number for item in self.taken)

    @property
    def fresh(self) -> list[Planned]:
        return [item for item in self.items if item.offer is None]

    @property
    def fresh_parameters(self) -> tuple[str, ...]:
        """``optimizer: parameter`` for each parameter without a loaded state in a registered optimizer."""
        names = (item.name.text.rpartition("@") for item in self.fresh if item.name.parameter)
        return tuple(f"{optimizer}: {parameter}" for parameter, _, optimizer in names)

    def source_of(self, item: Planned) -> str:
        return "" if item.offer is None else self.sources[item.offer]

    def to_dict(self) -> dict[str, Any]:
        return {
            "items": [
                {
                    "name": item.name.text,
                    "group": item.name.group,
                    "source": self.source_of(item) or None,
                    "source_name": item.source or None,
                    "rows": item.thing.rows,
                    "bytes": item.thing.n_bytes,
                    "renamed": bool(item.source) and item.source != item.name.text,
                    "conversion": item.conversion or None,
                    "reason": item.reason or None,
                }
                for item in self.items
            ],
            "fresh_parameters": list(self.fresh_parameters),
            "sources": list(self.sources),
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        sources = [f"[{number}] {line}" for number, line in enumerate(self._taken_lines())]
        table = grid(*self._table(), right=_NUMBERS)
        return "\n".join([*sources, *([""] if sources else []), *table, *self._notes(), *filter(None, [self._read()])])

    @shown
    def __repr__(self) -> str:
        return self._verdict()

    def _repr_html_(self) -> str:
        sources = [f"<strong>[{number}]</strong> {html.text(line)}" for number, line in enumerate(self._taken_lines())]
        parts = [f"<h1>{html.text(self._verdict())}</h1>", *(f"<p>{source}</p>" for source in sources)]
        head, rows = self._table()
        parts.append(html.table(head, (list(map(html.text, row)) for row in rows), _NUMBERS))
        parts += [f"<p>{html.text(line)}</p>" for line in self._notes()]
        return html.body("load", parts, _STYLE)

    def _read(self) -> str:
        return ""

    def _verdict(self) -> str:
        sources = escaped(self.sources[0]) if len(self.sources) == 1 else plural(len(self.sources), "checkpoint")
        loaded = f"{count(len(self.taken))} of {plural(len(self.items), 'name')} from {sources}"
        return ": ".join(filter(None, [loaded, self._read()]))

    def log_summary(self) -> None:
        """Log how much comes from each source; log names that start from scratch as warnings."""
        for line in self._taken_lines():
            log.info("%s", line)
        for line in [*self._fresh_lines(), *self.warnings]:
            log.warning("%s", one_line(line))

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        rows = []
        for item in self.items:
            thing, has_rows = item.thing, item.offer is not None and item.table
            rows.append(
                (
                    escaped(item.name.text),
                    "-" if item.offer is None else f"[{item.offer}]",
                    escaped(item.source) if item.source not in ("", item.name.text) else "",
                    count(thing.rows) if has_rows else "",
                    size(thing.n_bytes) if thing.n_bytes or has_rows else "",
                    self._in_short(one_line(item.conversion or item.reason)),
                )
            )
        column = _HEAD.index("name there")
        if any(row[column] for row in rows):
            return _HEAD, rows
        head, *others = [(*row[:column], *row[column + 1 :]) for row in (_HEAD, *rows)]
        return head, others

    def _notes(self) -> list[str]:
        lines = [*self._fresh_lines(), *(f"warning: {one_line(text)}" for text in self.warnings)]
        return list(map(self._in_short, lines))

    def _in_short(self, text: str) -> str:
        numbers = {one_line(source): number for number, source in enumerate(self.sources)}
        if not numbers:
            return text
        paths = "|".join(map(re.escape, sorted(numbers, key=len, reverse=True)))
        return re.sub(rf"({paths})(?![\w/])", lambda match: f"[{numbers[match[1]]}]", text)

    def _fresh_lines(self) -> list[str]:
        tensors = {item.name.text for item in self.fresh if item.name.group == "dense"}
        items = [item for item in self.fresh if item.name.parameter not in tensors]
        # If the embedding has a reason, name the table instead of its slots.
        whole = {(item.name.table, item.reason) for item in items if item.name.slot == EMBEDDING}
        by_reason: dict[str, dict[str, None]] = {}
        for item in items:
            name, reason = item.name, item.reason
            belongs_to_resume = name.group == GLOBAL_STEP or (name.is_position and reason == UNASKED)
            if not belongs_to_resume and reason not in (SETTINGS_STAY, SCHEDULE_STAYS, OF_TRAINING):
                is_whole = (name.table, reason) in whole
                by_reason.setdefault(reason, {})[name.table if is_whole else name.text] = None
        return [
            f"from scratch: {first_few([*names], _MOST)}: {one_line(reason)}" for reason, names in by_reason.items()
        ]

    def _taken_lines(self) -> list[str]:
        lines = []
        for number, source in enumerate(self.sources):
            items = [item for item in self.taken if item.offer == number]
            tables: dict[str, int] = {}
            for item in items:
                if item.table:
                    tables[item.table] = max(item.thing.rows, tables.get(item.table, 0))
            tensors = sum(item.name.group == "dense" and not item.table for item in items)
            what = [plural(len(tables), "table"), plural(sum(tables.values()), "row"), plural(tensors, "tensor")]
            n_bytes = size(sum(item.thing.n_bytes for item in items))
            lines.append(f"{escaped(source)}: {', '.join(what)}, {n_bytes}")
        return lines


@dataclass(frozen=True, repr=False)
class LoadReport(LoadPlan):
    """A plan and its outcome. Rows and bytes of its items are what this rank has loaded.

    Attributes:
        rows_taken: table -> rows loaded on this rank; includes dense tensors that a table filled.
        rows_filtered: table -> rows that ``where`` left out.
        bytes_read: bytes of column values and whole files.
        seconds: duration of the whole load.
        global_step: the step that the load took over; None if it took over none.
    """

    rows_taken: Mapping[str, int] = field(default_factory=dict)
    rows_filtered: Mapping[str, int] = field(default_factory=dict)
    bytes_read: int = 0
    seconds: float = 0.0
    global_step: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            **super().to_dict(),
            "rows_taken": dict(self.rows_taken),
            "rows_filtered": dict(self.rows_filtered),
            "bytes_read": self.bytes_read,
            "seconds": self.seconds,
            "global_step": self.global_step,
        }

    def _read(self) -> str:
        taken, filtered = sum(self.rows_taken.values()), sum(self.rows_filtered.values())
        what = f"{plural(taken, 'row')} taken, {count(filtered)} filtered, {size(self.bytes_read)} read"
        return f"{what} in {self.seconds:.2f} s"
