"""The batches of one link as they lie in its files, for a load: any thread may read any of them (no torch here)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from recckpt.format import layout
from recckpt.format.catalog import Part
from recckpt.sparse.files.part_reader import PartReader
from recckpt.storage.base import Files
from recckpt.storage.local_files import mapped
from recckpt.storage.read_again import read_twice
from recckpt.types import SlotSpec


@dataclass(frozen=True)
class LinkBatches:
    """The parts of one link, of the shards that may have rows or deletes for a rank.

    Attributes:
        files: of the link.
        directory: where it lies.
        tables: of which rows are read from it: newer links hold all rows of the others.
        parts: by number of the shard; the deletes of a link are read before its rows.
    """

    files: Files
    directory: str
    tables: Collection[str]
    parts: Mapping[int, Sequence[Part]]

    def read(
        self, part: Part, numbers: Iterable[int], slots: Sequence[SlotSpec], columns: Collection[str]
    ) -> Iterator[tuple[int, Mapping[str, pa.Array], PartReader]]:
        """Yield (number, checked columns, reader) of some batches of a part, whose tables have these slots.

        Raises:
            CorruptCheckpointError: a file is damaged.
        """
        reader = PartReader(self.files, self.directory, part, slots, columns)
        for number in numbers:
            yield number, reader.read(number), reader

    def check_frame(self, part: Part, slots: Sequence[SlotSpec]) -> None:
        """Check what lies between the values of a part, if it is mapped: else it would all have to be read again."""
        path = layout.join(self.directory, part.file)

        def check() -> None:
            PartReader(self.files, self.directory, part, slots, mapped=mapped(self.files, path)).check_frame()

        if self.files.map(path) is not None:
            read_twice(self.files, path, check)
