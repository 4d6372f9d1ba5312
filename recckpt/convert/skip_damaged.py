"""Reads undamaged rows and tensors of a damaged checkpoint, and lists what is skipped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recckpt.checkpoint.chain import files_of
from recckpt.dense.tensors import DenseTensors
from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.format.buckets import N_BUCKETS, bucket_of
from recckpt.format.catalog import Catalog, Part, PartKind
from recckpt.output_dir.at_path import links_there
from recckpt.output_dir.listing import Checkpoint
from recckpt.output_dir.open_files import OpenFiles
from recckpt.sparse.files.catalogs import read_catalog
from recckpt.sparse.files.part_reader import DamagedPart
from recckpt.sparse.files.pieces import IdCheck, Int64s, RowPiece
from recckpt.sparse.files.table_reader import NamedIds, may_repeat, record_batch
from recckpt.storage import Storage, lost_is_damage

_EVERYWHERE = (0, N_BUCKETS)


@dataclass(frozen=True)
class Skipped:
    """Rows or a tensor that an export omits, because their file or a newer link of the chain is damaged.

    Attributes:
        file: path of the damaged file in the output dir.
        reason: what is wrong with the file.
        table: the table whose rows are missing; "" if no rows are missing.
        batch: index of the batch in the part; None for all batches of the table in the part.
        buckets: the range of buckets [begin, end) in which rows are missing; None if no rows are missing.
        rows: number of missing rows according to the catalog; None if the catalog is damaged, 0 for deletes.
        tensor: name of a missing dense tensor; "" if no tensor is missing.
    """

    file: str
    reason: str
    table: str = ""
    batch: int | None = None
    buckets: tuple[int, int] | None = None
    rows: int | None = None
    tensor: str = ""


def problem_of(error: CorruptCheckpointError | FormatVersionError) -> str:
    if isinstance(error, FormatVersionError):
        return error.what
    where = f"{error.where}: " if error.where else ""
    return f"{where}found {error.found}, expected {error.expected}"


@dataclass(frozen=True)
class _Whole:
    link: Checkpoint
    part: Part
    number: int
    kept: npt.NDArray[np.bool_] | None  # mask of the rows to return; None for all
    n_rows: int


class WholeRows:
    """The undamaged rows of a table that no newer link may have changed. The constructor reads the whole table.

    A row of an older link is omitted if a newer link lost rows or deletes in its bucket, because the row may be out of
    date or deleted. So every returned row has its value in the checkpoint. Uses 8 bytes of memory per row of newer
    links and 1 byte per row of older links.
    """

    def __init__(self, storage: Storage, checkpoint: Checkpoint, table: str) -> None:
        self._storage, self._entry = storage, checkpoint.manifest.named_table(table)
        self.skipped: list[Skipped] = []
        self._doubtful: list[Skipped] = []  # undamaged rows that may be out of date
        self._whole: list[_Whole] = []
        self._newer, self._is_doubtful = NamedIds(), np.zeros(N_BUCKETS, np.bool_)
        for link in links_there(storage, checkpoint):
            n_before = len(self.skipped)
            if self._is_last(link):
                break
            for skipped in self.skipped[n_before:]:
                self._is_doubtful[slice(*skipped.buckets or _EVERYWHERE)] = True
        if not self.skipped and self.n_rows != self._entry.rows:
            path, n_rows = layout.join(checkpoint.directory, layout.MANIFEST), self._entry.rows
            reason = f"{n_rows} rows, but its catalogs list {self.n_rows}"
            self._skip(path, reason, _EVERYWHERE, max(0, n_rows - self.n_rows))
        self.skipped += self._doubtful

    @property
    def n_rows(self) -> int:
        return sum(whole.n_rows for whole in self._whole)

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows with these slots; CorruptCheckpointError if a file was damaged after the constructor ran."""
        for (directory, _), group in groupby(self._whole, lambda whole: (whole.link.directory, whole.part.file)):
            first, *others = group
            reader = DamagedPart(files_of(self._storage, first.link), directory, first.part, self._entry.slots, names)
            for whole in (first, *others):
                columns = RowPiece.of(reader, whole.number, reader.read(whole.number), is_checked=True).columns
                yield record_batch(reader.specs, columns if whole.kept is None else [c[whole.kept] for c in columns])

    def _is_last(self, link: Checkpoint | CorruptCheckpointError) -> bool:
        """Find the undamaged rows of a link; return whether no row of any older link is valid."""
        if isinstance(link, CorruptCheckpointError):
            self._skip(link.path, f"{link.found}: the rows of this and of older links are unknown", _EVERYWHERE, None)
            return True
        entry = link.manifest.table(self._entry.name)
        if entry is None or entry.slots != self._entry.slots:
            path = layout.join(link.directory, layout.MANIFEST)
            self._skip(path, "no such table with these slots: older rows are unknown", _EVERYWHERE, None)
            return True
        self._look_at(link)
        return entry.is_whole

    def _look_at(self, link: Checkpoint) -> None:
        catalogs = list(self._catalogs(link))
        is_compared, own, n_doubtful = may_repeat(catalogs, self._entry.name), NamedIds(), 0
        named: list[Int64s] = []
        for part, number, ids in self._batches(link, catalogs):
            if link.manifest.parent is not None:
                named.append(ids.copy())  # copied, because a view would keep the bytes of the whole part in memory
            if part.holds == "deletes":
                continue
            if is_compared:
                repeated = ids[~own.is_new(ids)]
                own.add(ids)
                if len(repeated):
                    self._skip_batches(link, part, [number], f"id {repeated[0]}, which is also in another batch")
                    continue
            is_new = self._newer.is_new(ids)
            kept = is_new & ~self._is_doubtful[bucket_of(ids)]
            n_doubtful += int(is_new.sum() - kept.sum())
            if n_rows := int(kept.sum()):
                self._whole.append(_Whole(link, part, number, None if n_rows == len(ids) else kept, n_rows))
        if n_doubtful:
            marked = np.flatnonzero(self._is_doubtful)
            buckets = int(marked[0]), int(marked[-1]) + 1
            reason = "may have changed or been deleted in newer links, which lost rows of some of these buckets"
            self._doubtful.append(Skipped(link.directory, reason, self._entry.name, buckets=buckets, rows=n_doubtful))
        self._newer.add(*named)
        if len(catalogs) == len(link.manifest.shards):  # else the unknown rows are already in ``skipped``
            self._compare_counts(link, catalogs)

    def _compare_counts(self, link: Checkpoint, catalogs: Sequence[Catalog]) -> None:
        """Add to ``skipped`` the rows and deletes that the manifest counts but no catalog lists."""
        entry = link.manifest.named_table(self._entry.name)
        path = layout.join(link.directory, layout.MANIFEST)
        deletes = entry.delta.deletes if entry.delta else 0
        expected: dict[PartKind, int] = {"rows": entry.own_rows, "deletes": deletes}
        for kind, recorded in expected.items():
            counted = sum(catalog.counts(kind).get(entry.name, 0) for catalog in catalogs)
            if counted != recorded:
                n_rows = max(0, recorded - counted) if kind == "rows" else 0
                self._skip(path, f"{recorded} {kind}, but its catalogs list {counted}", _EVERYWHERE, n_rows)

    def _catalogs(self, link: Checkpoint) -> Iterator[Catalog]:
        files = files_of(self._storage, link)
        for number, shard in enumerate(link.manifest.shards):
            path = layout.join(link.directory, shard.catalog)
            try:
                with lost_is_damage(path):
                    catalog = read_catalog(link, files, number)
            except (CorruptCheckpointError, FormatVersionError) as error:
                if shard.buckets != (0, 0):  # without buckets, a shard has no rows
                    self._skip(path, f"{problem_of(error)}: its rows cannot be checked", shard.buckets, None)
            else:
                yield catalog

    def _batches(self, link: Checkpoint, catalogs: Sequence[Catalog]) -> Iterator[tuple[Part, int, Int64s]]:
        """Yield the ids of undamaged batches; skip damaged batches, and batches with an id that their shard deletes."""
        for catalog in catalogs:
            deleted = NamedIds()
            for part, number, ids in self._whole_batches(link, catalog):
                both = ids[~deleted.is_new(ids)]
                if part.holds == "deletes":
                    deleted.add(ids)
                elif len(both):
                    self._skip_batches(link, part, [number], f"id {both[0]}, which its shard also deletes")
                    continue
                yield part, number, ids

    def _whole_batches(self, link: Checkpoint, catalog: Catalog) -> Iterator[tuple[Part, int, Int64s]]:
        """Yield the ids of batches with undamaged columns, deletes first; skip damaged batches."""
        files = files_of(self._storage, link)
        for part, numbers, order in (
            (*each, order)
            for kind in ("deletes", "rows")
            for order in (IdCheck(),)  # shared by all batches of the shard: a catalog could list one twice
            for each in catalog.parts_of(self._entry.name, kind)
        ):
            path, slots = layout.join(link.directory, part.file), self._entry.slots if part.holds == "rows" else ()
            try:
                with lost_is_damage(path):
                    reader = DamagedPart(files, link.directory, part, slots)
            except CorruptCheckpointError as error:
                self._skip_batches(link, part, numbers, error.found)
                continue
            for number in numbers:
                try:
                    with lost_is_damage(path):
                        ids = order.piece(reader, number).ids
                except CorruptCheckpointError as error:
                    self._skip_batches(link, part, [number], ": ".join(filter(None, (error.where, error.found))))
                else:
                    yield part, number, ids

    def _skip_batches(self, link: Checkpoint, part: Part, numbers: Sequence[int], reason: str) -> None:
        batches = [part.batches[number] for number in numbers]
        buckets = min(batch.buckets[0] for batch in batches), max(batch.buckets[1] for batch in batches)
        rows = sum(batch.rows for batch in batches) if part.holds == "rows" else 0
        reason = reason if part.holds == "rows" else f"deletes: {reason}"
        self._skip(layout.join(link.directory, part.file), reason, buckets, rows, *numbers if len(numbers) == 1 else ())

    def _skip(
        self, file: str, reason: str, buckets: tuple[int, int], rows: int | None, batch: int | None = None
    ) -> None:
        self.skipped.append(Skipped(file, reason, self._entry.name, batch, buckets, rows))


def whole_tensors(files: OpenFiles, checkpoint: Checkpoint, skipped: list[Skipped], *, read: bool) -> DenseTensors:
    """Return the dense tensors that have no damaged block; no tensors if an index is damaged.

    Adds the others to ``skipped``. Checks values only if ``read`` is set, because a caller that does not export them
    does not need the check.
    """
    directory, manifest = checkpoint.directory, checkpoint.manifest
    try:
        with lost_is_damage(layout.join(directory, layout.DENSE_DIR)):
            tensors = DenseTensors(files, directory, manifest)
    except (CorruptCheckpointError, FormatVersionError) as error:
        skipped.append(Skipped(error.path, f"{error.found}: all dense tensors are left out"))
        return DenseTensors(files, directory, replace(manifest, shards=()))
    for name, tensor in list(tensors.model.items()) if read else ():
        try:
            with lost_is_damage(layout.join(directory, tensor.chunks[0][1].file)):
                tensors.read(tensor)
        except CorruptCheckpointError as error:
            skipped.append(Skipped(error.path, error.found, tensor=name))
            del tensors.model[name]
    return tensors
