"""What became of a row from one checkpoint to the next; pure (no torch here)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from recckpt.inspect.norms import squares
from recckpt.inspect.over_time.named_rows import NamedRows, StoredRow
from recckpt.output_dir.listing import Checkpoint
from recckpt.types import EMBEDDING

Change = Literal["there", "new", "changed", "same", "gone", "back", "absent", "damaged"]


@dataclass(frozen=True)
class RowAt:
    """A row in one checkpoint.

    Attributes:
        ckpt_id: the checkpoint.
        step: its global step, None where the saver did not count.
        time: when it was committed, in UTC, as ISO 8601.
        change: what became of the row since the checkpoint before: ``"new"``; ``"changed"``: a value of any slot is
            another; ``"same"``; ``"gone"``; ``"back"``: it was gone, and is there again; ``"absent"``: it was not there
            before either. In the oldest checkpoint ``"there"`` or ``"absent"``; ``"damaged"`` where a file that would
            say so is damaged.
        since: the oldest checkpoint from which on the row has been as it is in this one; None where it is not there.
        since_step: its step.
        norm: Euclidean norm of the embedding, NaN where a value is not finite; None where the row is not there.
        moved: Euclidean distance of the embedding from that before, where it has changed.
        slots: the other slots: the value of one that is a single number, and the norm of any other.
    """

    ckpt_id: str
    step: int | None
    time: str
    change: Change
    since: str | None = None
    since_step: int | None = None
    norm: float | None = None
    moved: float | None = None
    slots: Mapping[str, float] | None = None


@dataclass(frozen=True)
class RowHistory:
    """A row over the checkpoints of a run.

    Attributes:
        id: its id.
        states: the row in each checkpoint, oldest first.
        was_forgotten: whether the audit has the id among those that were asked to be forgotten.
    """

    id: int
    states: tuple[RowAt, ...]
    was_forgotten: bool = False

    @property
    def is_known(self) -> bool:
        """Whether the row is in any checkpoint."""
        return any(state.norm is not None for state in self.states)


@dataclass(frozen=True, repr=False)
class TableHistory:
    """Rows of a table over the checkpoints of a run.

    Attributes:
        url: the output dir.
        table: name of the table.
        rows: in the order of the ids that were asked for.
        damage: directory of a checkpoint -> what is wrong with it, or with a link that it stands on.
    """

    url: str
    table: str
    rows: tuple[RowHistory, ...]
    damage: Mapping[str, str]

    def row(self, id_: int) -> RowHistory:
        """Return the history of an id; KeyError where it was not asked for."""
        return {row.id: row for row in self.rows}[id_]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as dicts, lists, numbers and strings, as ``--json`` has it."""
        return asdict(self)


def history_of_row(
    id_: int, checkpoints: Sequence[Checkpoint], table: str, links: Mapping[str, NamedRows]
) -> tuple[RowAt, ...]:
    """Return a row in each of the checkpoints, oldest first.

    Args:
        id_: its id.
        checkpoints: oldest first.
        table: name of the table.
        links: directory of each link of theirs -> what its own files say of the row.
    """
    return tuple(_states(id_, checkpoints, table, links))


def _states(id_: int, checkpoints: Sequence[Checkpoint], table: str, links: Mapping[str, NamedRows]) -> Iterator[RowAt]:
    before: StoredRow | None = None
    since: Checkpoint | None = None
    was_there, is_first = False, True
    for checkpoint in checkpoints:
        manifest = checkpoint.manifest
        head = (manifest.ckpt_id, manifest.step, manifest.time)
        row = _row_in(checkpoint, table, id_, links)
        if isinstance(row, str):
            yield RowAt(*head, "damaged")
            continue
        change = _change(before, row, is_first=is_first, was_there=was_there)
        moved = _distance(before, row) if change == "changed" and before is not None and row is not None else None
        since = None if row is None else since if change == "same" else checkpoint
        norm = None if row is None else _size(row[EMBEDDING])
        slots = None if row is None else {name: _number(value) for name, value in row.items() if name != EMBEDDING}
        yield RowAt(
            *head,
            change,
            since=None if since is None else since.ckpt_id,
            since_step=None if since is None else since.manifest.step,
            norm=norm,
            moved=moved,
            slots=slots,
        )
        before, is_first, was_there = row, False, was_there or row is not None


def _row_in(checkpoint: Checkpoint, table: str, id_: int, links: Mapping[str, NamedRows]) -> StoredRow | str | None:
    """Return a row by the newest link that names it, None where it is not there; a text where a link is damaged."""
    for link in checkpoint.links:
        entry, of_link = link.manifest.table(table), links[link.directory]
        if entry is None:
            return None
        if of_link.damage:
            return of_link.damage
        if id_ in of_link.rows:
            return of_link.rows[id_]
        if id_ in of_link.deleted or entry.is_whole:
            return None
    return None


def _change(before: StoredRow | None, row: StoredRow | None, *, is_first: bool, was_there: bool) -> Change:
    if row is None:
        return "absent" if before is None else "gone"
    if before is None:
        return "there" if is_first else "back" if was_there else "new"
    return "same" if _is_same(before, row) else "changed"


def _is_same(one: StoredRow, other: StoredRow) -> bool:
    """Say whether two rows have the same slots with the same bits."""
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype
        and value.shape == other[name].shape
        and value.tobytes() == other[name].tobytes()
        for name, value in one.items()
    )


def _distance(before: StoredRow, row: StoredRow) -> float | None:
    one, other = before[EMBEDDING], row[EMBEDDING]
    if one.shape != other.shape:
        return None
    with np.errstate(all="ignore"):
        return _size(other.astype(np.float64) - one.astype(np.float64))


def _size(values: Any) -> float:
    """Return the Euclidean norm of an array, NaN where a value is not finite."""
    return float(np.sqrt(squares(np.reshape(values, (1, -1))), dtype=np.float64)[0]) if np.size(values) else 0.0


def _number(values: Any) -> float:
    """Return the number of a slot that is a single one, and the norm of any other."""
    number: float = values.item() if values.ndim == 0 else _size(values)
    return number
