"""Which rows and columns of a table each rank has (its box), and whether all ranks together have the whole table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from recckpt.dense.sharded import is_sharded
from recckpt.format.tables import LiveLayout
from recckpt.parallel.ranks import rank_and_size
from recckpt.types import EMBEDDING, Box, Door, SlotSpec


def reshard(model: nn.Module) -> None:
    """Make FSDP2 reshard the parameters that a forward pass has left gathered."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules() if hasattr(fsdp, "FSDPModule") else ():
        if isinstance(module, fsdp.FSDPModule):  # type: ignore[union-attr]  # hasattr above found the class
            module.reshard()


def why_not_by_rows(weight: Any) -> str | None:
    """Return why a sharded weight cannot be saved by rows; None if it can."""
    placements = getattr(weight, "placements", None)
    if placements is None:
        return f"its weight is a {type(weight).__name__}, which is saved in pieces: use DTensor"
    text = ", ".join(map(repr, placements))
    for kind in placements:
        if kind.is_shard() and kind.dim != 0:
            return f"its columns are sharded ({text}), which is not yet saved by rows: shard it by rows, Shard(0)"
        if not (kind.is_shard() or kind.is_replicate()):
            what = "are partial sums" if kind.is_partial() else "are not one range per rank, as with FSDP2 over TP"
            return f"its rows {what} ({text}): use Shard(0) and Replicate(), in any order"
    n_ranks = rank_and_size()[1]
    if weight.device_mesh.size() != n_ranks:
        return f"its mesh has {weight.device_mesh.size()} of {n_ranks} ranks: make a mesh of all ranks"
    local = local_of(weight)
    if type(local) not in (Tensor, nn.Parameter):
        return f"its part on a rank is a {type(local).__name__}: make it a plain tensor"
    return None


def box_of(weight: Any) -> Box:
    """Return the rows of a weight on this rank; each mesh dimension divides the rows that the previous ones leave."""
    mesh = weight.device_mesh
    first, end, replica, n_replicas = 0, int(weight.shape[0]), 0, 1
    for at, size, placement in zip(mesh.get_coordinate(), mesh.shape, weight.placements, strict=True):
        if placement.is_replicate():
            replica, n_replicas = replica * size + at, n_replicas * size
        else:
            n_rows = -(-(end - first) // size)  # rows of a chunk; the last chunks may have fewer
            first, end = min(first + n_rows * at, end), min(first + n_rows * (at + 1), end)
    return Box((first, end) if first < end else (0, 0), replica, n_replicas)


def spread_of(tensor: Any) -> tuple[Any, ...]:
    """Return a key that is equal for tensors with equal layouts over ranks."""
    return tuple(tensor.shape), getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)


def local_of(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor, in place; the whole tensor if it is not sharded."""
    if not is_sharded(tensor):
        return tensor  # type: ignore[no-any-return]  # it is one
    with torch.no_grad():  # otherwise torch would make a view for a backward pass
        return tensor.to_local()  # type: ignore[no-any-return]


def version_of(tensor: Tensor) -> tuple[int, int]:
    """Return a tensor's address and its number of in-place writes; for a DTensor, including writes to its part."""
    local = local_of(tensor)
    return local.data_ptr(), local._version + (0 if local is tensor else tensor._version)


@dataclass(frozen=True)
class RankPart:
    n_rows: int  # rows of the whole table
    rows: tuple[int, int] = (0, 0)  # (first, end) of this rank's rows; (0, 0) for none
    # (begin, end) of this rank's columns in these rows, out of ``width``; None for all
    columns: tuple[int, int] | None = None
    width: int = 0  # columns of the whole table; 0 if ``columns`` is None
    is_copy: bool = False  # whether other ranks have copies of the rows
    slots: tuple[SlotSpec, ...] = ()  # including ``embedding``; () if the rank has no rows
    scalars: Mapping[str, Any] = field(default_factory=dict)  # of the optimizer
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the optimizer
    why: str | None = None  # why rows may change without a look-up; None if they do not
    refusal: str | None = None  # why the table cannot be live; None if it can

    @property
    def has_rows(self) -> bool:
        return self.rows[0] < self.rows[1]

    def kind_of(self, slot: SlotSpec) -> str:
        """Return a description of a slot that is equal for all parts of a table."""
        if self.columns is None or slot.shape != (self.columns[1] - self.columns[0],):
            return f"{slot.name} {slot.kind}"
        return f"{slot.name} {slot.dtype}[its columns of {self.width}]"


def column_ranges(parts: Sequence[RankPart]) -> tuple[tuple[int, int], ...]:
    """Return the column ranges into which ranks have divided a table, in order; () if it is not divided."""
    ranges = sorted({part.columns for part in parts if part.columns is not None and part.has_rows})
    return tuple(ranges) if len(ranges) > 1 else ()


def problem_of(parts: Sequence[RankPart]) -> str | None:
    """Return why the ranks' parts do not form a complete table; None if they do."""
    sizes = sorted({part.n_rows for part in parts})
    if len(sizes) > 1:
        return f"found {' and '.join(map(str, sizes))} rows, expected the same number on all ranks"
    slots = {tuple(sorted(map(part.kind_of, part.slots))): n for n, part in enumerate(parts) if part.has_rows}
    if len(slots) > 1:
        forms = ", ".join(f"{' '.join(form) or 'none'} on rank {number}" for form, number in slots.items())
        return f"found the slots {forms}, expected the same on all ranks"
    if any(part.is_copy for part in parts):
        others = [number for number, part in enumerate(parts) if part.has_rows and not part.is_copy]
        partial = [number for number, part in enumerate(parts) if part.is_copy and part.rows != (0, part.n_rows)]
        if others or partial:
            return f"rank {min(others + partial)} has a part, and other ranks have copies of all rows"
        return None
    return _problem_of_columns(parts) or _problem_of_rows(parts)


def _problem_of_rows(parts: Sequence[RankPart]) -> str | None:
    n_rows = parts[0].n_rows
    having = [(n, part) for n, part in enumerate(parts) if part.has_rows]
    of_rows = {part.rows: n for n, part in having if part.columns is None or part.columns[0] == 0}
    spans = sorted((*rows, n) for rows, n in of_rows.items())
    for (_, end, one), (begin, _, other) in pairwise([(0, 0, -1), *spans, (n_rows, n_rows, -1)]):
        if begin > end:
            return f"no rank has the rows {end} to {begin - 1}"
        if begin < end:
            return (
                f"ranks {one} and {other} have the row {begin}" if other >= 0 else f"rank {one} has rows beyond {begin}"
            )
    return None


def _problem_of_columns(parts: Sequence[RankPart]) -> str | None:
    """Return a problem of the columns (missing, repeated, or split differently for some rows), or None."""
    by_rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for part in parts:
        if part.has_rows and part.columns is not None:
            by_rows.setdefault(part.rows, []).append(part.columns)
    expected, width = column_ranges(parts), max(part.width for part in parts)
    for (first, end), ranges in by_rows.items():
        borders = [(0, 0), *sorted(ranges), (width, width)]
        if any(before[1] != after[0] for before, after in pairwise(borders)):
            return f"ranks have the columns {sorted(ranges)} of the rows {first} to {end - 1}, expected 0 to {width}"
        if expected and tuple(sorted(ranges)) != expected:
            return f"the rows {first} to {end - 1} are divided into the columns {sorted(ranges)}, other rows are not"
    return None


class AbsentTable:
    """A live table without rows on this rank; ``there`` is the part of a rank that has rows."""

    def __init__(self, name: str, there: RankPart, box: Box) -> None:
        self.name, self.n_rows, self.reason, self._box = name, there.n_rows, there.why, box
        slots = there.slots
        self._tensors = {
            slot.name: torch.empty((0, *slot.shape), dtype=getattr(torch, slot.dtype), device="cpu") for slot in slots
        }
        self._scalars, self._settings = dict(there.scalars), dict(there.settings)

    def box(self) -> Box:
        return self._box

    def prepare(self) -> None: ...

    def tensors(self) -> Mapping[str, Tensor]:
        return self._tensors

    def attach(self, door: Door) -> Callable[[], object]:
        return lambda: None

    def scalars(self) -> Mapping[str, int | float]:
        return self._scalars

    def settings(self) -> Mapping[str, Any]:
        return self._settings

    def finish(self, scalars: Mapping[str, int | float], settings: Mapping[str, Any]) -> None:
        self._scalars, self._settings = {**self._scalars, **scalars}, {**self._settings, **settings}


def whole_spec(spec: SlotSpec, box: Box) -> SlotSpec:
    """Return the slot of a whole row: with the columns of all ranks, or with one value per column range."""
    if not box.columns:
        return spec
    return replace(spec, shape=(box.columns[-1][1],) if spec.shape else (len(box.columns),))


def place_in_row(spec: SlotSpec, box: Box, part: int) -> tuple[int, int]:
    """Return the byte range [begin, end) that one part fills in the value of a whole row."""
    begin, end = box.columns[part] if spec.shape else (part, part + 1)
    n_bytes = whole_spec(spec, box).row_bytes // whole_spec(spec, box).shape[0]
    return begin * n_bytes, end * n_bytes


def misfit_of(spec: SlotSpec, box: Box) -> str | None:
    """Return the shape that a part's slot should have, as text; None if the slot has this shape."""
    if not box.columns:
        return None
    begin, end = box.columns[box.part]
    fitting: tuple[tuple[int, ...], ...] = ((end - begin,),) if spec.name == EMBEDDING else ((end - begin,), ())
    if spec.shape in fitting:
        return None
    return f"{end - begin} columns{'' if spec.name == EMBEDDING else ', or one value'} in each row"


def layout_of(n_rows: int, specs: Iterable[SlotSpec], box: Box) -> LiveLayout:
    """Return the table's layout for a manifest, with the column ranges if a slot has one value per range."""
    has_values_of_ranges = any(not spec.shape for spec in specs)
    return LiveLayout(n_rows, box.columns if has_values_of_ranges else ())
