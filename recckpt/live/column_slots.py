"""The slots of a table that is divided by columns: as a rank has them, and as a checkpoint has them; pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from recckpt.format.tables import LiveLayout
from recckpt.types import EMBEDDING, Box, SlotSpec


def whole_spec(spec: SlotSpec, box: Box) -> SlotSpec:
    """Return a slot of whole rows: with the columns of all ranks, or one value for each range of columns."""
    if not box.columns:
        return spec
    return replace(spec, shape=(box.columns[-1][1],) if spec.shape else (len(box.columns),))


def place_in_row(spec: SlotSpec, box: Box, part: int) -> tuple[int, int]:
    """Return the first byte, and the one after the last, that a part has in the value of a whole row."""
    begin, end = box.columns[part] if spec.shape else (part, part + 1)
    n_bytes = whole_spec(spec, box).row_bytes // whole_spec(spec, box).shape[0]
    return begin * n_bytes, end * n_bytes


def misfit_of(spec: SlotSpec, box: Box) -> str | None:
    """Return what a slot of a part should be, None where it is that."""
    if not box.columns:
        return None
    begin, end = box.columns[box.part]
    fitting: tuple[tuple[int, ...], ...] = ((end - begin,),) if spec.name == EMBEDDING else ((end - begin,), ())
    if spec.shape in fitting:
        return None
    return f"{end - begin} columns{'' if spec.name == EMBEDDING else ', or one value'} in each row"


def layout_of(n_rows: int, specs: Iterable[SlotSpec], box: Box) -> LiveLayout:
    """Return how a table lay, as a manifest says it: with its ranges of columns where a slot has a value for each."""
    has_values_of_ranges = any(not spec.shape for spec in specs)
    return LiveLayout(n_rows, box.columns if has_values_of_ranges else ())
