"""Which of some ids the files of each checkpoint contain, as rows and as deletes of a table (no torch here)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from recckpt.checkpoint.link import OpenLink
from recckpt.format.distinct import is_among
from recckpt.format.tables import TableEntry
from recckpt.output_dir.forget_requests import meant_in, tables_of
from recckpt.output_dir.listing import Checkpoint
from recckpt.sparse.files.arrow_format import ids_in
from recckpt.sparse.files.id_set import IdSet
from recckpt.sparse.files.once import ABSENT, DELETED, newest
from recckpt.storage import Storage

Ids = npt.NDArray[np.int64]  # ascending, all different
_Flags = npt.NDArray[np.bool_]  # one an id


@dataclass(frozen=True, eq=False)
class IdsInTable:
    """Which of the ids a table has in the checkpoint's own files, not counting its parents."""

    rows: _Flags  # the ids that have a row
    n_deletes: int  # deletes of the ids, each counted as often as the files have it
    deletes: _Flags  # the ids that have a delete
    parts: frozenset[str]  # the files that contain any of the ids

    def find(self, places: Ids) -> Ids:
        """Return, for ids given by their places among all: 0 for a row, ``DELETED`` for a delete, else ``ABSENT``."""
        return np.where(self.rows[places], 0, np.where(self.deletes[places], DELETED, ABSENT))


@dataclass(frozen=True)
class IdsInFiles:
    """The same for several tables."""

    tables: dict[str, IdsInTable]

    @property
    def parts(self) -> frozenset[str]:
        """The files that contain any of the ids."""
        return frozenset[str]().union(*(table.parts for table in self.tables.values()))

    @property
    def is_any(self) -> bool:
        """Whether the files contain any of the ids, as a row or as a delete."""
        return bool(self.parts)


def ids_in_files(storage: Storage, checkpoint: Checkpoint, table: str, ids: Ids) -> IdsInFiles:
    """Look for ids of a table, and of its counts, in the files of one checkpoint; only batches that can hold them.

    Raises:
        CorruptCheckpointError: a file is damaged.
    """
    link = OpenLink.of(storage, checkpoint)
    meant = meant_in(checkpoint.manifest, table)
    entries = {name: checkpoint.manifest.table(name) if name in meant else None for name in tables_of(table)}
    return IdsInFiles({name: _of_table(link, entry, ids) for name, entry in entries.items()})


def _of_table(link: OpenLink, entry: TableEntry | None, ids: Ids) -> IdsInTable:
    rows, deletes = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.bool_)
    n_deletes, parts = 0, set[str]()
    if entry is not None:
        sought = IdSet(ids)
        reader = link.reader(entry.name, ())
        for catalog in reader.catalogs:
            for part, _, batch in reader.batches(catalog, "rows", sought):
                parts.update([part.file] if _mark(rows, ids, ids_in(batch)) else ())
            for part, _, batch in reader.batches(catalog, "deletes", sought):
                n_common = _mark(deletes, ids, ids_in(batch))
                n_deletes += n_common
                parts.update([part.file] if n_common else ())
    return IdsInTable(rows, n_deletes, deletes, frozenset(parts))


def _mark(flags: _Flags, ids: Ids, there: npt.NDArray[np.int64]) -> int:
    """Mark the ids that are there, and return how many."""
    common = there[is_among(there, ids)]
    flags[np.searchsorted(ids, common)] = True
    return len(common)


def rows_in_chain(links: Sequence[tuple[Checkpoint, IdsInFiles]], table: str) -> int:
    """Return how many of the ids have a row in the checkpoint whose links these are, newest first; pure."""
    of_table: list[IdsInTable] = []
    for checkpoint, of_link in links:
        entry = checkpoint.manifest.table(table)
        of_table += [] if entry is None else [of_link.tables[table]]
        if entry is None or entry.is_whole:
            break
    places = np.arange(len(links[0][1].tables[table].rows))
    return sum(len(here) for _, here, _ in newest(of_table, places))
