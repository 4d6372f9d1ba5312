"""The rows of one table: every byte checked, in the order of their buckets, and no id twice (no torch here)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.catalog import Catalog, Part, PartKind
from recckpt.format.distinct import is_among
from recckpt.format.tables import TableEntry
from recckpt.sparse.files.arrow_format import ID, ID_SPEC, ids_in, int64_array, slot_field
from recckpt.sparse.files.id_check import IdCheck, may_repeat, repeated_between_shards
from recckpt.sparse.files.id_set import IdSet
from recckpt.sparse.files.once import Int64s, named_twice
from recckpt.sparse.files.part_reader import PartReader
from recckpt.storage.base import Files
from recckpt.types import SlotSpec


@dataclass(frozen=True)
class TableReader:
    """Reads slots of one table, beside its ids, from the checkpoint in ``directory``; of a delta, what lies there."""

    storage: Files
    directory: str
    catalogs: Sequence[Catalog]  # of all shards
    entry: TableEntry
    slots: Sequence[str]  # to read, in the order of the table

    @property
    def schema(self) -> pa.Schema:
        """The schema of the batches: ``id`` and one column a slot."""
        return table_schema(self.specs)

    @property
    def specs(self) -> tuple[SlotSpec, ...]:
        """The slots to read."""
        return tuple(slot for slot in self.entry.slots if slot.name in self.slots)

    @property
    def is_mapped(self) -> bool:
        """Whether its files lie in memory maps, so that rows of them may be kept at no cost."""
        parts = (part for catalog in self.catalogs for part in catalog.parts if self.entry.name in part.tables)
        return all(self.storage.map(layout.join(self.directory, part.file)) is not None for part in parts)

    @property
    def may_repeat(self) -> bool:
        """Whether an id may be in two shards, by what their catalogs say."""
        return may_repeat(self.catalogs, self.entry.name)

    def part(self, part: Part, names: Sequence[str] | None = None) -> PartReader:
        """Return the reader of a part that has rows or deletes of the table, and of these slots; None for all."""
        slots = self.entry.slots if part.holds == "rows" else ()
        return PartReader(self.storage, self.directory, part, slots, names)

    def of_shards(self, *catalogs: Catalog) -> TableReader:
        """Return the reader of some shards alone."""
        return replace(self, catalogs=catalogs)

    def all_rows(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows; where the ids of shards overlap, they are compared first.

        Raises:
            CorruptCheckpointError: a file is damaged, or an id is there twice.
        """
        self.check_shards()
        for catalog in self.catalogs:
            for _, _, batch in self.batches(catalog, "rows", None):
                yield batch

    def rows_of(self, ids: Int64s) -> Iterator[pa.RecordBatch]:
        """Yield the rows of ids, which are sorted, each once; batches that cannot hold them are not read.

        Raises:
            CorruptCheckpointError: a file is damaged, or one of the ids is there twice.
        """
        sought, is_found = IdSet(ids), np.zeros(len(ids), np.bool_)
        for catalog in self.catalogs:
            for _, _, batch in self.batches(catalog, "rows", sought):
                there = ids_in(batch)
                rows = np.flatnonzero(is_among(there, ids))
                places = np.searchsorted(ids, there[rows])
                if len(twice := ids[np.sort(places[is_found[places]])]):
                    raise table_damage(self, "between shards", *named_twice(twice))
                is_found[places] = True
                if len(rows):
                    yield batch.take(int64_array(rows))

    def deletes_of(self, ids: Int64s) -> Int64s:
        """Return those of the sorted ids that a delta deletes, in order, each once for each shard that does.

        Raises:
            CorruptCheckpointError: a file is damaged, or one of the ids is there twice in a shard.
        """
        sought, deletes = IdSet(ids), [np.empty(0, np.int64)]
        for catalog in self.catalogs:
            for _, _, batch in self.batches(catalog, "deletes", sought):
                deleted = ids_in(batch)
                deletes.append(deleted[is_among(deleted, ids)])
        return np.sort(np.concatenate(deletes))

    def check_shards(self) -> None:
        """Check that no id is in two shards; reads ids only where shards overlap in their buckets and in their ids.

        Raises:
            CorruptCheckpointError: an id is, or the ids cannot be read.
        """
        for problem in repeated_between_shards(self.storage, self.directory, self.entry, self.catalogs):
            raise problem

    def batches(
        self, catalog: Catalog, kind: PartKind, ids: IdSet | None
    ) -> Iterator[tuple[Part, int, pa.RecordBatch]]:
        """Yield (part, number, rows) of the batches of one shard that may have rows, or deletes, of ids; None for all.

        Raises:
            CorruptCheckpointError: a file is damaged, or one of the ids is there twice in a part.
        """
        order = IdCheck()
        schema, names = (self.schema, self.slots) if kind == "rows" else (table_schema(()), ())
        for part, numbers in catalog.parts_of(self.entry.name, kind):
            batches = ((number, part.batches[number]) for number in numbers)
            met = [number for number, batch in batches if ids is None or ids.meets(batch.buckets, batch.ids)]
            if not met:
                continue
            reader = self.part(part, names)
            for number in met:
                columns = order.read(reader, number)
                yield part, number, pa.RecordBatch.from_arrays([columns[name] for name in (ID, *names)], schema=schema)


def table_damage(table: TableReader, where: str, found: str, expected: str) -> CorruptCheckpointError:
    """Return the error for a table of which no single file is wrong."""
    path, name = layout.join(table.directory, layout.SPARSE_DIR), f"table {table.entry.name!r}"
    return CorruptCheckpointError(path, f"{name}, {where}" if where else name, found=found, expected=expected)


def table_schema(slots: Iterable[SlotSpec]) -> pa.Schema:
    """Return the schema of rows of one table: ``id`` and one column a slot."""
    return pa.schema([slot_field(slot) for slot in (ID_SPEC, *slots)])
