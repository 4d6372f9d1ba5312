"""A slot of all rows of a table, by the name that it has in a load_conf: ``table@slot``."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from recckpt.checkpoint.chain import OpenChain
from recckpt.format.dtypes import NUMPY_DTYPES
from recckpt.format.manifest import Manifest
from recckpt.format.tables import TableEntry
from recckpt.sparse.files.arrow_format import ID, ID_SPEC, column_buffer
from recckpt.sparse.files.merged_rows import check_count
from recckpt.text import nearest
from recckpt.types import SlotSpec


def slot_named(name: str, manifest: Manifest) -> tuple[TableEntry, SlotSpec] | None:
    """Return the table and slot that ``table@slot`` names, ``table@id`` its ids; None where no table is named.

    Raises:
        KeyError: the table does not have the slot.
    """
    table, _, slot = name.rpartition("@")
    entry = manifest.table(table) if table else None
    if entry is None:
        return None
    slots = {ID: ID_SPEC, **{spec.name: spec for spec in entry.slots}}
    if slot not in slots:
        raise KeyError(f"table {table!r} has no slot {slot!r}; it has {[*slots]}{nearest(slot, slots)}")
    return entry, slots[slot]


def whole_slot(now: OpenChain, entry: TableEntry, slot: SlotSpec) -> npt.NDArray[Any]:
    """Return the values of all rows, bfloat16 as bit patterns; all slots of a table come in one order of the rows."""
    table = now.table(entry.name, [] if slot.name == ID else [slot.name])
    check_count(
        table.links[0], min(entry.rows, sum(link.entry.own_rows for link in table.links))
    )  # before it takes memory
    values = np.empty((entry.rows, *slot.shape), NUMPY_DTYPES[slot.dtype])
    begin = 0
    for batch in table.all_rows():
        end = begin + batch.num_rows
        if end <= entry.rows:  # or the table says in the end that there are too many
            column = np.frombuffer(column_buffer(batch.column(slot.name)), values.dtype)
            values[begin:end] = column.reshape(-1, *slot.shape)
        begin = end
    return values
