"""What is left of one table in the files of one checkpoint, batch by batch, and what is lost (no torch here)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.format import catalog as catalogs
from recckpt.format import layout
from recckpt.format.buckets import N_BUCKETS, bucket_of
from recckpt.format.catalog import Batch, Catalog, Part
from recckpt.format.distinct import distinct
from recckpt.format.shards import ShardEntry, overlap
from recckpt.output_dir.listing import Checkpoint
from recckpt.sparse.files.arrow_format import ids_in, int64_array
from recckpt.sparse.files.damaged_part import Remains, unverified_batches
from recckpt.sparse.files.once import Int64s, NamedIds
from recckpt.storage import NOT_READABLE, Storage, missing
from recckpt.storage.local_files import mapped


@dataclass(frozen=True)
class Lost:
    """A range of buckets in which rows of the table are lost."""

    file: str  # what is damaged, as named under the output dir
    buckets: tuple[int, int]  # [begin, end); of the buckets at both ends other rows may be there
    rows: int | None  # how many are lost; None where no file says so any more, 0 of deletes
    reason: str  # what is wrong with the file, with the first of the batches where there are several
    unverified: int = 0  # rows that are there, though nothing vouches for them


class LinkRemains:
    """One table in a damaged checkpoint; of a delta, what its own files hold."""

    def __init__(self, storage: Storage, checkpoint: Checkpoint, table: str) -> None:
        self._storage, self._directory, self._manifest = storage, checkpoint.directory, checkpoint.manifest
        self._entry = self._manifest.named_table(table)
        self._n_rows = 0
        self._deleted: list[Int64s] = []
        self._lost: list[Lost] = []
        self._former = _FormerShards(self._manifest.shards)

    def batches(self, *, unverified: bool) -> Iterator[tuple[pa.RecordBatch, bool]]:
        """Yield the whole batches of rows and whether checksums vouch for them; keep account of the others."""
        for number, shard in enumerate(self._manifest.shards):
            self._former.next_shard()
            catalog, problem = self._catalog(number)
            if catalog is not None:
                for part in catalog.parts:
                    batches = self._part(part, trusted=not problem)
                    if part.holds == "rows":
                        yield from self._counted((self._without_repeats(*each) for each in batches), vouched=True)
                    else:
                        self._deleted += [ids_in(batch) for batch, *_ in batches]
            elif shard.buckets != (0, 0):  # or it has no rows
                n_there = 0 if unverified else sum(batch.num_rows for _, batch in self._unlisted(number))
                self._lost.append(Lost(self._path(shard.catalog), shard.buckets, None, problem, n_there))
                if unverified:
                    unlisted = self._unlisted(number)
                    whole = (self._without_repeats(rows, file, shard.buckets) for file, rows in unlisted)
                    yield from self._counted(whole, vouched=False)

    @property
    def deleted(self) -> Int64s:
        """The ids that the checkpoint deletes, once all batches have been asked for."""
        return distinct(np.empty(0, np.int64), *self._deleted)

    def lost(self) -> tuple[Lost, ...]:
        """Return what was lost, once all batches have been asked for."""
        rest = self._entry.own_rows - self._n_rows - sum(lost.rows or 0 for lost in self._lost)
        unknown = [lost for lost in self._lost if lost.rows is None]
        if rest <= 0:
            return tuple(lost for lost in self._lost if lost.rows is not None)
        if not unknown:
            path, reason = self._path(layout.MANIFEST), "counts rows that no catalog lists"
            return (*self._lost, Lost(path, (0, N_BUCKETS), rest, reason))
        return tuple(replace(lost, rows=rest) if [lost] == unknown else lost for lost in self._lost)

    def _counted(self, batches: Iterator[pa.RecordBatch], *, vouched: bool) -> Iterator[tuple[pa.RecordBatch, bool]]:
        for batch in batches:
            self._n_rows += batch.num_rows
            yield batch, vouched

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

    def _part(self, part: Part, *, trusted: bool) -> Iterator[tuple[pa.RecordBatch, str, tuple[int, int]]]:
        """Yield (batch, file, buckets) of the whole batches of the table in a part, of rows or of deletes.

        With a damaged catalog, the file must name the table too.
        """
        numbers = [number for number, batch in enumerate(part.batches) if batch.table == self._entry.name]
        remains = self._remains(part) if numbers else "no rows of the table"
        lost: dict[int, str] = {}
        for number in numbers:
            rows: pa.RecordBatch | str = remains if isinstance(remains, str) else remains.batch(number)
            if not isinstance(rows, str) and not trusted:
                named = remains.table(number) if isinstance(remains, Remains) else None
                if named != self._entry.name:
                    rows = f"rows of {named!r} by the file, of {self._entry.name!r} by a damaged catalog"
            if not isinstance(rows, str) and not _lies_in(rows, part.batches[number]):
                rows = "ids of other buckets than its catalog says"
            if isinstance(rows, str):
                lost[number] = rows
            else:
                yield rows, part.file, part.batches[number].buckets
        ranges = _ranges(self._path(part.file), part, numbers, lost)
        if part.holds == "deletes":
            self._lost += (replace(lost, rows=0, reason=f"deletes: {lost.reason}") for lost in ranges)
        else:
            self._lost += ranges if trusted else (replace(lost, rows=None) for lost in ranges)

    def _remains(self, part: Part) -> Remains | str:
        data = self._data(part.file)
        slots = self._entry.slots if part.holds == "rows" else ()
        return data if isinstance(data, str) else Remains(data, part, slots)

    def _data(self, name: str) -> memoryview | str:
        """Return the bytes of a file, or why there are none."""
        try:
            return mapped(self._storage, self._path(name))
        except NOT_READABLE as error:
            return missing(name, error, "").found
        except OSError as error:
            return f"an error: {error}"

    def _unlisted(self, number: int) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Yield the rows of a shard that no catalog describes, each batch with its file."""
        shard = self._manifest.shards[number]
        for file in self._manifest.files:
            if layout.is_part_of(file.name, shard.catalog):
                data = self._data(file.name)
                if not isinstance(data, str):
                    for batch in unverified_batches(data, self._entry.name, self._entry.slots, shard.buckets):
                        yield file.name, batch

    def _without_repeats(self, batch: pa.RecordBatch, file: str, buckets: tuple[int, int]) -> pa.RecordBatch:
        """Drop rows whose ids an earlier shard has: it cannot be known which of the two is right."""
        repeated = self._former.had(ids_in(batch))
        if not repeated.any():
            return batch
        first = ids_in(batch)[repeated][0]
        self._lost.append(
            Lost(self._path(file), buckets, int(repeated.sum()), f"ids that another shard has, such as {first}")
        )
        return batch.take(int64_array(np.flatnonzero(~repeated)))


class _FormerShards:
    """Tells which ids a shard before this one had. Keeps 8 bytes an id, and nothing where shards do not overlap."""

    def __init__(self, shards: Sequence[ShardEntry]) -> None:
        self._may_repeat = overlap([shard.buckets for shard in shards])
        self._before, self._own = NamedIds(), list[Int64s]()

    def next_shard(self) -> None:
        """Count the ids so far as those of former shards."""
        self._before.add(*self._own)
        self._own = []

    def had(self, ids: Int64s) -> npt.NDArray[np.bool_]:
        """Return a mask of the ids that former shards had, and remember all as those of this one."""
        if self._may_repeat:
            self._own.append(ids.copy())
        return ~self._before.is_new(ids)


def _lies_in(batch: pa.RecordBatch, entry: Batch) -> bool:
    """Say whether the ids of a batch lie in the buckets that its catalog says."""
    buckets = bucket_of(ids_in(batch))
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
