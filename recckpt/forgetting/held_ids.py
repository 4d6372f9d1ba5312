"""Which of some ids each checkpoint of an output dir holds in a table, as rows and as deletes (no torch here)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from recckpt.checkpoint.link import OpenLink
from recckpt.format.buckets import bucket_of
from recckpt.format.distinct import distinct, is_among
from recckpt.format.tables import TableEntry
from recckpt.output_dir.forget_requests import meant_in, tables_of
from recckpt.output_dir.listing import Checkpoint
from recckpt.sparse.files.arrow_format import ids_in
from recckpt.sparse.files.once import ABSENT, DELETED, newest
from recckpt.storage import Storage

Ids = npt.NDArray[np.int64]  # ascending, all different
_Flags = npt.NDArray[np.bool_]  # one an id


@dataclass(frozen=True, eq=False)
class HeldOfTable:
    """What the files of one checkpoint hold of the ids in a table, what it stands on apart."""

    rows: _Flags  # of which ids there are rows
    n_deletes: int  # deletes of them, each counted as often as it is there
    deletes: _Flags  # of which ids there are deletes
    parts: frozenset[str]  # the files in which they are

    def find(self, places: Ids) -> Ids:
        """Say of ids, by their places among all, which have a row, as 0, and which are deleted."""
        return np.where(self.rows[places], 0, np.where(self.deletes[places], DELETED, ABSENT))


@dataclass(frozen=True)
class Held:
    """What they hold in several tables."""

    tables: dict[str, HeldOfTable]

    @property
    def parts(self) -> frozenset[str]:
        """The files in which any of the ids are."""
        return frozenset[str]().union(*(held.parts for held in self.tables.values()))

    @property
    def is_any(self) -> bool:
        """Whether any of the ids is there, be it as a delete."""
        return bool(self.parts)


def held_in(storage: Storage, checkpoint: Checkpoint, table: str, ids: Ids) -> Held:
    """Look for ids of a table, and of its counts, in the files of one checkpoint; only batches that can hold them.

    Raises:
        CorruptCheckpointError: a file is damaged.
    """
    link = OpenLink.of(storage, checkpoint)
    meant = meant_in(checkpoint.manifest, table)
    entries = {name: checkpoint.manifest.table(name) if name in meant else None for name in tables_of(table)}
    return Held({name: _of_table(link, entry, ids) for name, entry in entries.items()})


def _of_table(link: OpenLink, entry: TableEntry | None, ids: Ids) -> HeldOfTable:
    rows, deletes = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.bool_)
    n_deletes, parts = 0, set[str]()
    if entry is not None:
        buckets = distinct(bucket_of(ids))
        reader = link.reader(entry.name, ())
        for catalog in link.catalogs:
            for part, _, batch in reader.batches(catalog, "rows", buckets):
                parts.update([part.file] if _mark(rows, ids, ids_in(batch)) else ())
            for part, _, batch in reader.batches(catalog, "deletes", buckets):
                n_found = _mark(deletes, ids, ids_in(batch))
                n_deletes += n_found
                parts.update([part.file] if n_found else ())
    return HeldOfTable(rows, n_deletes, deletes, frozenset(parts))


def _mark(flags: _Flags, ids: Ids, there: npt.NDArray[np.int64]) -> int:
    """Mark the ids that are there, and return how many."""
    found = there[is_among(there, ids)]
    flags[np.searchsorted(ids, found)] = True
    return len(found)


def rows_in_chain(links: Sequence[tuple[Checkpoint, Held]], table: str) -> int:
    """Return how many of the ids have a row in the checkpoint whose links these are, newest first; pure."""
    of_table: list[HeldOfTable] = []
    for checkpoint, of_link in links:
        entry = checkpoint.manifest.table(table)
        of_table += [] if entry is None else [of_link.tables[table]]
        if entry is None or entry.is_whole:
            break
    places = np.arange(len(links[0][1].tables[table].rows))
    return sum(len(here) for _, here, _ in newest(of_table, places))
