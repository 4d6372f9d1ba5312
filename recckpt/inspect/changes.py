"""What a checkpoint has that an older one had not: rows and deletes by table, and dense tensors (no torch here)."""

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
    """What has changed in one table.

    Attributes:
        name: of the table.
        replaced: whether these are all rows of it, and those of the older checkpoint count no more.
        rows: how many rows are new or changed, at most: one that has changed in two deltas counts twice.
        deleted: how many ids are gone, at most.
    """

    name: str
    replaced: bool
    rows: int
    deleted: int
    _chain: OpenChain = field(repr=False)

    def upserts(self, columns: Collection[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows that are new or changed, as they are now, as :meth:`recckpt.CheckpointReader.table` does.

        Raises:
            KeyError: no such slot.
            TypeError: ``columns`` is a single name.
            CorruptCheckpointError, CheckpointRemovedError: a file is damaged, or gone.
        """
        table = self._chain.table_with(self.name, columns)
        return table.all_rows() if self.replaced else table.upserts()

    def values(self, slot: str = EMBEDDING) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[Any]]]:
        """Yield the ids of rows that are new or changed, and their values of one slot, of shape (ids, *slot_shape).

        bfloat16 comes as float32. Raises as :meth:`upserts`.
        """
        slots = {one.name: one for one in self._chain.manifest.named_table(self.name).slots}
        for batch in self.upserts([slot]):
            yield ids_in(batch), column_values(batch.column(slot), slots[slot])

    def deletes(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the ids that are gone; none where the table was replaced.

        Raises:
            CorruptCheckpointError, CheckpointRemovedError: a file is damaged, or gone.
        """
        return self._chain.table(self.name, []).deletes()


@dataclass(frozen=True)
class CheckpointChanges:
    """What has changed from one checkpoint to another.

    Attributes:
        is_whole: whether the checkpoint does not stand on the older one, so that this is all that it has.
        tables: those of which rows have changed, by name.
        dropped_tables: those that are gone; not known of an older one by its name alone that this does not stand on.
        dense: the dense tensors that are new, or have other bytes, or lie in other pieces.
        dropped_dense: those that are gone.
    """

    is_whole: bool
    tables: Mapping[str, RowChanges]
    dropped_tables: tuple[str, ...]
    dense: tuple[str, ...]
    dropped_dense: tuple[str, ...]


def changes_between(before: OpenChain | str | None, now: OpenChain) -> CheckpointChanges:
    """Return what has changed since a checkpoint, or the save that is called so, which ``now`` may stand on."""
    names = [link.manifest.name for link in now.links]
    name = before.manifest.name if isinstance(before, OpenChain) else before
    newest = now.newest(names.index(name)) if name in names else now
    tables = {}
    for entry in now.manifest.tables:
        entries = []  # of the links that count, newest first
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
