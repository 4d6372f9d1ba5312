"""Saves the rows of a damaged table that are still whole, batch by batch (no torch here)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import xxhash

from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.format import catalog as catalogs
from recckpt.format import layout
from recckpt.format.buckets import N_BUCKETS, bucket_of
from recckpt.format.catalog import Batch, Catalog, Part
from recckpt.format.manifest import Manifest
from recckpt.format.tables import TableEntry
from recckpt.output_dir.checkpoint_dir import read_manifest
from recckpt.sparse.files.arrow_format import ID, column_buffer
from recckpt.sparse.files.damaged_part import Remains, unverified_batches
from recckpt.sparse.files.id_check import FormerShards, Int64s
from recckpt.sparse.files.table_reader import table_schema
from recckpt.storage import NOT_READABLE, SinkFile, Storage, missing, new_file, open_parent, open_storage
from recckpt.storage.local_files import mapped
from recckpt.text import Progress, escaped


@dataclass(frozen=True)
class Lost:
    """A range of buckets in which rows of the table are lost."""

    file: str  # what is damaged, as named under the output dir
    buckets: tuple[int, int]  # [begin, end); of the buckets at both ends other rows may be there
    rows: int | None  # how many are lost; None where no file says so any more
    reason: str  # what is wrong with the file, with the first of the batches where there are several


@dataclass(frozen=True)
class Salvaged:
    """What :func:`salvage` did."""

    rows: int  # rows in the file that was written
    expected: int  # rows of the table by the manifest
    unverified: int  # those of ``rows`` that no checksum vouches for
    lost: tuple[Lost, ...]  # what is not there, in the order of the files


def salvage(path: str, table: str, out: str, *, unverified: bool = False) -> Salvaged:
    """Write the rows of a table that are still whole to one Arrow IPC file: ``id`` and a column a slot.

    A batch is whole if each of its columns has the checksum in the catalog. From a damaged catalog, those batches are
    taken whose checksums can still be read there and hold. Where several shards have the same id, the row of the first
    is taken. Needs memory for one batch, and where shards overlap in their buckets, 8 bytes a row.

    Args:
        path: the checkpoint; any fsspec URL.
        table: name of the table.
        out: the file to write, which must not exist; any fsspec URL.
        unverified: whether to also take rows of parts whose catalog cannot be read, which no checksum covers.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CorruptCheckpointError: its manifest is damaged, so that nothing says what should be there.
        FormatVersionError: written by a newer format.
        KeyError: no such table.
        FileExistsError: ``out`` exists.
        OSError: ``out`` cannot be written; nothing of it is left.
    """
    storage, directory = open_parent(path)
    manifest = read_manifest(storage, directory)
    if manifest is None:
        what = open_storage(path).why_empty() or f"found no {layout.MANIFEST}"
        raise CheckpointNotFoundError(f"{path}: {what}; name the checkpoint's own directory")
    entry = manifest.named_table(table)
    remains = _Table(storage, directory, manifest, entry)
    with new_file(out) as sink, Progress(f"salvaging {escaped(table)}", entry.rows * entry.row_bytes) as progress:
        # Not a context manager: it would complete the file on an error too.
        writer = pa.ipc.new_file(pa.PythonFile(SinkFile(sink), "w"), remains.schema)
        for batch in remains.batches(unverified=unverified):
            writer.write_batch(batch)
            progress.n_rows = remains.rows
            progress.advance(batch.num_rows * entry.row_bytes)
        writer.close()
    return Salvaged(remains.rows, entry.rows, remains.unverified_rows, remains.lost())


class _Table:
    """One table of a damaged checkpoint."""

    def __init__(self, storage: Storage, directory: str, manifest: Manifest, entry: TableEntry) -> None:
        self._storage, self._directory, self._manifest, self._entry = storage, directory, manifest, entry
        self.schema = table_schema(entry.slots)
        self.rows = self.unverified_rows = 0
        self._lost: list[Lost] = []
        self._former = FormerShards(manifest.shards)

    def batches(self, *, unverified: bool) -> Iterator[pa.RecordBatch]:
        """Yield the whole batches, and keep account of the others."""
        for number, shard in enumerate(self._manifest.shards):
            self._former.next_shard()
            catalog, problem = self._catalog(number)
            if catalog is not None:
                for part in catalog.parts:
                    yield from self._counted(self._part(part, trusted=not problem))
            elif shard.buckets != (0, 0):  # or it has no rows
                self._lost.append(Lost(self._path(shard.catalog), shard.buckets, None, problem))
                if unverified:
                    before = self.rows
                    yield from self._counted(self._unlisted(number))
                    self.unverified_rows += self.rows - before

    def lost(self) -> tuple[Lost, ...]:
        """Return what was lost, once all batches have been asked for."""
        rest = self._entry.rows - self.rows - sum(lost.rows or 0 for lost in self._lost)
        unknown = [lost for lost in self._lost if lost.rows is None]
        if rest <= 0:
            return tuple(lost for lost in self._lost if lost.rows is not None)
        if not unknown:
            path, reason = self._path(layout.MANIFEST), "counts rows that no catalog lists"
            return (*self._lost, Lost(path, (0, N_BUCKETS), rest, reason))
        return tuple(replace(lost, rows=rest) if [lost] == unknown else lost for lost in self._lost)

    def _counted(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            self.rows += batch.num_rows
            yield batch

    def _path(self, name: str) -> str:
        return layout.join(self._directory, name)

    def _catalog(self, number: int) -> tuple[Catalog | None, str]:
        """Return the catalog of a shard, and what is wrong with it; a flipped bit may leave most of it readable."""
        file = self._manifest.file(self._manifest.shards[number].catalog)
        assert file is not None  # the manifest was checked for that
        path = self._path(file.name)
        try:
            data = self._storage.read(path, min(file.n_bytes, catalogs.MAX_BYTES) + 1)
            catalog = catalogs.decode(data, path, self._manifest, number)
        except NOT_READABLE as error:
            return None, missing(path, error, "").found
        except (CorruptCheckpointError, FormatVersionError, OSError) as error:
            return None, f"unreadable ({getattr(error, 'found', error)})"
        digest = xxhash.xxh3_64_intdigest(data)
        return catalog, "" if digest == file.xxh3 else f"checksum {digest:016x}, expected {file.xxh3:016x}"

    def _part(self, part: Part, *, trusted: bool) -> Iterator[pa.RecordBatch]:
        """Yield the whole batches of the table in a part; with a damaged catalog, the file must name the table too."""
        numbers = [number for number, batch in enumerate(part.batches) if batch.table == self._entry.name]
        remains = self._remains(part) if numbers else "no rows of the table"
        lost: dict[int, str] = {}
        for number in numbers:
            found: pa.RecordBatch | str = remains if isinstance(remains, str) else remains.batch(number)
            if not isinstance(found, str) and not trusted:
                named = remains.table(number) if isinstance(remains, Remains) else None
                if named != self._entry.name:
                    found = f"rows of {named!r} by the file, of {self._entry.name!r} by a damaged catalog"
            if not isinstance(found, str) and not _lies_in(found, part.batches[number]):
                found = "ids of other buckets than its catalog says"
            if isinstance(found, str):
                lost[number] = found
            else:
                yield self._without_repeats(found, part.file, part.batches[number].buckets)
        ranges = _ranges(self._path(part.file), part, numbers, lost)
        self._lost += ranges if trusted else (replace(lost, rows=None) for lost in ranges)

    def _remains(self, part: Part) -> Remains | str:
        data = self._data(part.file)
        return data if isinstance(data, str) else Remains(data, part, self._entry.slots)

    def _data(self, name: str) -> memoryview | str:
        """Return the bytes of a file, or why there are none."""
        try:
            return mapped(self._storage, self._path(name))
        except NOT_READABLE as error:
            return missing(name, error, "").found
        except OSError as error:
            return f"an error: {error}"

    def _unlisted(self, number: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a shard that no catalog describes."""
        shard = self._manifest.shards[number]
        prefix = shard.catalog.removesuffix(".json") + "."
        for file in self._manifest.files:
            if layout.is_part(file.name) and file.name.startswith(prefix):
                data = self._data(file.name)
                if not isinstance(data, str):
                    for batch in unverified_batches(data, self._entry.name, self._entry.slots, shard.buckets):
                        yield self._without_repeats(batch, file.name, shard.buckets)

    def _without_repeats(self, batch: pa.RecordBatch, file: str, buckets: tuple[int, int]) -> pa.RecordBatch:
        """Drop rows whose ids an earlier shard has: it cannot be known which of the two is right."""
        repeated = self._former.had(_ids(batch))
        if not repeated.any():
            return batch
        first = _ids(batch)[repeated][0]
        self._lost.append(
            Lost(self._path(file), buckets, int(repeated.sum()), f"ids that another shard has, such as {first}")
        )
        return batch.take(pa.array(np.flatnonzero(~repeated)))


def _ids(batch: pa.RecordBatch) -> Int64s:
    return np.frombuffer(column_buffer(batch.column(ID)), np.int64)


def _lies_in(batch: pa.RecordBatch, entry: Batch) -> bool:
    """Say whether the ids of a batch lie in the buckets that its catalog says."""
    buckets = bucket_of(_ids(batch))
    return bool(entry.buckets[0] <= buckets.min() and buckets.max() < entry.buckets[1])


def _ranges(path: str, part: Part, numbers: Sequence[int], lost: dict[int, str]) -> Iterator[Lost]:
    """Join the losses of neighbouring batches."""
    run: Lost | None = None
    for number in numbers:
        if number not in lost:
            if run:
                yield run
            run = None
            continue
        batch = part.batches[number]
        if run is None:
            run = Lost(path, batch.buckets, batch.rows, lost[number])
        else:
            run = replace(run, buckets=(run.buckets[0], batch.buckets[1]), rows=(run.rows or 0) + batch.rows)
    if run:
        yield run
