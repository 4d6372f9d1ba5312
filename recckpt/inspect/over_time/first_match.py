"""What a search over the checkpoints of a run found, as data and as text (no torch here)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from recckpt.inspect.over_time.matches import Hit
from recckpt.output_dir.listing import Checkpoint
from recckpt.text import Line, Table, cell, count, escaped, html, one_line, plain, plural, section

MOST_EXAMPLES = 5  # rows of a table that are named


@dataclass(frozen=True, repr=False)
class FirstMatch:
    """The first checkpoint of a run in which a condition holds; prints as the text of ``recckpt first``.

    Attributes:
        url: the output dir.
        where: the condition.
        n_searched: how many checkpoints were looked at, oldest first.
        damage: directory of a checkpoint that was passed over -> what is wrong with it.
        before: id of the checkpoint before, in which the condition does not hold; None where it is the oldest.
        ckpt_id: id of the checkpoint that was found; None where the condition holds in none.
        step: its global step, None where the saver did not count.
        time: when it was committed, in UTC, as ISO 8601.
        rows: table -> rows that meet the condition, of the tables with any. Of a delta those that it changed.
        tensors: names of the dense tensors that do.
        examples: some of the rows, and the tensors.
        unread: names of registered objects, such as dense optimizers, of whose states nothing was looked at that is
            pickled, though the condition may hold of it.
    """

    url: str
    where: str
    n_searched: int
    damage: Mapping[str, str]
    before: str | None = None
    ckpt_id: str | None = None
    step: int | None = None
    time: str | None = None
    rows: Mapping[str, int] = field(default_factory=dict)
    tensors: tuple[str, ...] = ()
    examples: tuple[Hit, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def is_found(self) -> bool:
        """Whether the condition holds in any checkpoint."""
        return self.ckpt_id is not None

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as dicts, lists, numbers and strings, as ``--json`` has it."""
        return {"found": self.is_found, **asdict(self)}

    def __str__(self) -> str:
        return "\n".join(plain(lines_of(self)))

    def __repr__(self) -> str:
        return f"<FirstMatch {self.where!r} in {self.url!r}: {self.ckpt_id}>"

    def _repr_html_(self) -> str:
        return html.body("first", html.lines(lines_of(self)), "")


@dataclass
class Hits:
    """What meets a condition in one checkpoint; false where nothing does."""

    rows: dict[str, int] = field(default_factory=dict)
    tensors: list[str] = field(default_factory=list)
    examples: dict[str, list[Hit]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.rows or self.tensors)

    def add_rows(self, table: str, n_rows: int, examples: Iterable[Hit]) -> None:
        """Count rows of a table."""
        if n_rows:
            self.rows[table] = self.rows.get(table, 0) + n_rows
            named = self.examples.setdefault(table, [])
            named += [*examples][: MOST_EXAMPLES - len(named)]

    def add_tensor(self, name: str, values: Mapping[str, float] | None) -> None:
        """Count a tensor, unless nothing was compared of it that meets the condition."""
        if values is not None:
            self.tensors.append(name)
            self.examples.setdefault("", []).append(Hit(name, None, values))

    def first_in(self, checkpoint: Checkpoint, search: FirstMatch) -> FirstMatch:
        """Return what a search has found, once these are the first."""
        manifest = checkpoint.manifest
        return replace(
            search,
            ckpt_id=manifest.ckpt_id,
            step=manifest.step,
            time=manifest.time,
            rows=self.rows,
            tensors=tuple(self.tensors),
            examples=tuple(hit for hits in self.examples.values() for hit in hits),
        )


def lines_of(match: FirstMatch) -> list[Line]:
    """Return the lines that ``recckpt first`` prints."""
    condition = one_line(match.where)
    broken = [f"{escaped(directory)}: {one_line(reason)}" for directory, reason in match.damage.items()]
    passed_over = section("passed over", broken)
    if match.unread:
        objects = ", ".join(map(escaped, match.unread))
        passed_over = ["", f"not looked at: what is pickled of {objects}", *passed_over]
    if match.ckpt_id is None:
        return [f"{condition}: in none of {plural(match.n_searched, 'checkpoint')}", *passed_over]
    step = "" if match.step is None else f" of step {match.step}"
    before = (
        "the oldest that can be read" if match.before is None else f"not yet in {escaped(match.before)}, the one before"
    )
    lines: list[Line] = [f"{condition}: first in {escaped(match.ckpt_id)}{step}; {before}"]
    counts = [f"{plural(n, 'row')} of table {escaped(table)}" for table, n in match.rows.items()]
    counts += [plural(len(match.tensors), "dense tensor")] if match.tensors else []
    lines.append(", ".join(counts))
    names = list(dict.fromkeys(name for hit in match.examples for name in hit.values))
    rows = [_cells(hit, names) for hit in match.examples]
    shown = Table(("WHERE", "ID", *(name.upper() for name in names)), rows, ("ID", *(name.upper() for name in names)))
    return [*lines, *section("such as", [shown]), *passed_over]


def _cells(hit: Hit, names: Iterable[str]) -> list[str]:
    values = (hit.values.get(name) for name in names)
    numbers = (count(value) if isinstance(value, int) else "-" if value is None else cell(value) for value in values)
    return [escaped(hit.name), "-" if hit.id is None else str(hit.id), *numbers]
