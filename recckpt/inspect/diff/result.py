"""The differences between two checkpoints, as data (no torch here)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from recckpt.inspect.spread import Spread

Status = Literal["same", "changed", "added", "gone", "unclear"]


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints.

    Attributes:
        path: its own path or URL.
        ckpt_id: its id.
        kind: ``"full"`` or ``"delta"``.
        step: global step, None where the saver did not count.
        rows: of all tables.
        n_links: what its rows were read from: 1 of a full checkpoint.
        reduced: how its tables were not saved as they were, by ``save_slots``, ``save_where`` or ``store``: it lacks
            rows and slots that the run had.
    """

    path: str
    ckpt_id: str
    kind: str
    step: int | None
    rows: int
    n_links: int
    reduced: tuple[str, ...]


@dataclass(frozen=True)
class SlotDiff:
    """A slot of a table, over the rows whose ids are in both.

    Attributes:
        name: of the slot.
        before: dtype and shape, such as ``float32[16]``; None where it is not there.
        after: the same on the other side.
        changed: rows of which a value differs by more than the tolerance; None where shapes differ or one side has no
            such slot.
        l2: Euclidean distance, in the slot's own unit, of the rows that changed; None where none did.
        cosine: cosine distance, 0 to 2, of those of them that have one: not of scalars and rows of zeros.
    """

    name: str
    before: str | None
    after: str | None
    changed: int | None
    l2: Spread | None
    cosine: Spread | None

    @property
    def is_same(self) -> bool:
        """Whether dtype and shape agree and no row differs."""
        return self.before == self.after and self.changed == 0


@dataclass(frozen=True)
class MovedRow:
    """A row among those that moved most.

    Attributes:
        id: its id.
        l2: how far its embedding moved; NaN or infinite where a value is.
        cosine: cosine distance; NaN where there is none.
    """

    id: int
    l2: float
    cosine: float


@dataclass(frozen=True)
class TableDiff:
    """A table.

    Attributes:
        name: of the table.
        status: what became of it.
        rows_before: None where it is not there.
        rows_after: None where it is not there.
        added: ids that only the later has.
        gone: ids that only the earlier has.
        changed: ids in both, of which a value of a slot that can be compared differs by more than the tolerance.
        same: ids in both of which none does.
        slots: those of both sides.
        moved: rows whose embeddings moved most, farthest first, those that became NaN or infinite before all others.
    """

    name: str
    status: Status
    rows_before: int | None
    rows_after: int | None
    added: int
    gone: int
    changed: int
    same: int
    slots: tuple[SlotDiff, ...]
    moved: tuple[MovedRow, ...]


@dataclass(frozen=True)
class TensorDiff:
    """A dense tensor.

    Attributes:
        name: of the tensor.
        of: ``"model"``, or ``"extra"``: of a registered object, sharded over ranks.
        status: what became of it.
        before: dtype and shape; None where it is not there.
        after: the same on the other side.
        relative: norm of the change over the norm before, without what is not finite and stays; infinite where that
            was 0; None where shapes differ.
        largest: the largest difference of a single value; NaN where a NaN came or went.
        at: where that is.
    """

    name: str
    of: str
    status: Status
    before: str | None
    after: str | None
    relative: float | None = None
    largest: float | None = None
    at: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ValueDiff:
    """Something with a name beside tables and tensors.

    Attributes:
        group: ``"training state"``, with values; ``"extra"`` or ``"extra of ranks"``, a registered object;
            ``"position"``, of a dataset; ``"plain value"``, of the model; ``"random state"``.
        name: of it.
        status: what became of it; ``"unclear"`` where the file differs that holds it together with others.
        before: its value before, of training state.
        after: its value after, of training state.
    """

    group: str
    name: str
    status: Status
    before: Any = None
    after: Any = None


@dataclass(frozen=True, repr=False)
class Differences:
    """All that differs between two checkpoints.

    Attributes:
        before: the one side.
        after: the other.
        tolerance: differences of single values up to this count as none.
        tables: all tables of both, by name.
        tensors: all dense tensors of both.
        values: training state, and names of all else.
    """

    before: Side
    after: Side
    tolerance: float
    tables: tuple[TableDiff, ...]
    tensors: tuple[TensorDiff, ...]
    values: tuple[ValueDiff, ...]

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differing

    @property
    def differing(self) -> dict[str, int]:
        """How many of each group differ, of those groups of which any does."""
        every = [("table", each.status) for each in self.tables] + [("tensor", each.status) for each in self.tensors]
        every += [(each.group, each.status) for each in self.values]
        return dict(Counter(group for group, status in every if status != "same"))

    def table(self, name: str) -> TableDiff:
        """Return a table by its name; KeyError where neither side has it."""
        return {table.name: table for table in self.tables}[name]

    def to_dict(self) -> Mapping[str, Any]:
        """Return all of it as dicts, lists, numbers and strings, as ``--json`` has it."""
        return {"equal": self.is_equal, **asdict(self)}
