"""Changes since an older checkpoint: changed rows and deletes per table, and changed dense tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recckpt.checkpoint.chain import OpenChain
from recckpt.sparse.files.arrow_format import column_values, ids_in
from recckpt.types import EMBEDDING


@dataclass(frozen=True)
class RowChanges:
    """The changes of one table.

    Attributes:
        name: name of the table.
        replaced: whether ``upserts`` yields all rows of the table, to replace the rows of the older checkpoint.
        rows: upper bound of new or changed rows: a row that changed in two deltas counts twice.
        deleted: upper bound of deleted ids.
    """

    name: str
    replaced: bool
    rows: int
    deleted: int
    _chain: OpenChain = field(repr=False)

    def upserts(self, columns: Collection[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the new or changed rows with their present values, as :meth:`recckpt.CheckpointReader.table` does.

        Raises:
            KeyError: the table has no such slot.
            TypeError: ``columns`` is a single name.
            CorruptCheckpointError, CheckpointRemovedError: a file is damaged, or was removed.
        """
        table = self._chain.table_with(self.name, columns)
        return table.all_rows() if self.replaced else table.upserts()

    def values(self, slot: str = EMBEDDING) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[Any]]]:
        """Yield the ids of new or changed rows, and their values of one slot, of shape (ids, *slot_shape).

        bfloat16 is returned as float32. Raises the errors of :meth:`upserts`.
        """
        slots = {one.name: one for one in self._chain.manifest.named_table(self.name).slots}
        for batch in self.upserts([slot]):
            yield ids_in(batch), column_values(batch.column(slot), slots[slot])

    def deletes(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the deleted ids; nothing if the table was replaced.

        Raises:
            CorruptCheckpointError, CheckpointRemovedError: a file is damaged, or was removed.
        """
        return self._chain.table(self.name, []).deletes()


@dataclass(frozen=True)
class CheckpointChanges:
    """The changes from one checkpoint to another.

    Attributes:
        is_whole: whether the checkpoint is not based on the older one, so that the changes contain all of its rows.
        tables: name -> changes, of the tables with changed rows.
        dropped_tables: tables that no longer exist; unknown if the older checkpoint is a name that is not in the chain.
        dense: dense tensors that are new, have other bytes, or are split into other chunks.
        dropped_dense: dense tensors that no longer exist.
    """

    is_whole: bool
    tables: Mapping[str, RowChanges]
    dropped_tables: tuple[str, ...]
    dense: tuple[str, ...]
    dropped_dense: tuple[str, ...]


def changes_between(before: OpenChain | str | None, now: OpenChain) -> CheckpointChanges:
    """Return the changes since a checkpoint. ``before`` may be the name of a save, such as a link of ``now``."""
    names = [link.manifest.name for link in now.links]
    name = before.manifest.name if isinstance(before, OpenChain) else before
    newest = now.newest(names.index(name)) if name in names else now
    tables = {}
    for entry in now.manifest.tables:
        entries = []  # the table in the links newer than ``before``, newest first
        for link in newest.links:
            if (of_link := link.manifest.table(entry.name)) is not None:
                entries.append(of_link)
            if of_link is None or of_link.is_whole:
                break
        is_replaced = bool(entries) and entries[-1].is_whole
        deleted = sum(one.delta.deletes for one in entries if one.delta is not None)
        rows = sum(one.own_rows for one in entries)
        if is_replaced or rows or deleted:
            tables[entry.name] = RowChanges(entry.name, is_replaced, rows, 0 if is_replaced else deleted, newest)
    old, old_tables = dict[str, object](), list[str]()
    if isinstance(before, OpenChain):
        old = {name: tensor.content for name, tensor in before.tensors.model.items()}
        old_tables = [table.name for table in before.manifest.tables]
    elif name in names:
        old_tables = [table.name for table in now.links[names.index(name)].manifest.tables]
    new = {name: tensor.content for name, tensor in now.tensors.model.items()}
    return CheckpointChanges(
        name not in names,
        tables,
        tuple(name for name in old_tables if now.manifest.table(name) is None),
        tuple(name for name, content in new.items() if old.get(name) != content),
        tuple(name for name in old if name not in new),
    )
