"""What the own files of one checkpoint say of some rows of a table (no torch here)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from recckpt.checkpoint.link import OpenLink
from recckpt.errors import CorruptCheckpointError
from recckpt.format.tables import TableEntry
from recckpt.output_dir.listing import Checkpoint
from recckpt.sparse.files.arrow_format import column_values, ids_in
from recckpt.sparse.files.chain_table import AskedTable
from recckpt.sparse.files.id_set import IdSet
from recckpt.sparse.files.once import DELETED, Int64s
from recckpt.storage import Storage

StoredRow = Mapping[str, npt.NDArray[Any]]  # slot -> its values, bfloat16 as float32


@dataclass(frozen=True)
class NamedRows:
    """What one link says of ids.

    Attributes:
        rows: id -> its row.
        deleted: the ids that the link deletes.
        damage: why its files cannot say so, "" where they can.
    """

    rows: Mapping[int, StoredRow] = field(default_factory=dict)
    deleted: Collection[int] = ()
    damage: str = ""


def named_rows(storage: Storage, checkpoint: Checkpoint, table: str, ids: Int64s) -> NamedRows:
    """Read what a checkpoint's own files have of ids, which are sorted, each once; no batch that cannot have them.

    Raises:
        CheckpointRemovedError: its writer removed it meanwhile.
    """
    entry = checkpoint.manifest.table(table)
    if entry is None:
        return NamedRows()
    try:
        reader = OpenLink.of(storage, checkpoint).reader(table, [slot.name for slot in entry.slots], IdSet(ids))
        asked = AskedTable(reader)
        places = asked.find(ids)
    except CorruptCheckpointError as error:
        return NamedRows(damage=str(error))
    rows = {id_: row for batch in asked.batches for id_, row in _rows_in(batch, entry)}
    return NamedRows(rows, frozenset(ids[places == DELETED].tolist()))


def _rows_in(batch: Any, entry: TableEntry) -> list[tuple[int, StoredRow]]:
    columns = {slot.name: column_values(batch.column(slot.name), slot) for slot in entry.slots}
    ids = ids_in(batch)
    return [(int(id_), {name: np.array(values[n]) for name, values in columns.items()}) for n, id_ in enumerate(ids)]
