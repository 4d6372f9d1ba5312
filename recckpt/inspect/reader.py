"""Look into a checkpoint without the model and without torch."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recckpt.dense.tensors import DenseTensors
from recckpt.format.buckets import bucket_of
from recckpt.format.catalog import Batch, Part
from recckpt.format.manifest import Manifest, TableEntry
from recckpt.output_dir.listing import Checkpoint, locate_path
from recckpt.output_dir.open_files import HeldFiles
from recckpt.output_dir.read_again import until_whole
from recckpt.sparse.files.catalogs import read_parts
from recckpt.sparse.files.part_reader import ID, PartReader, slot_field
from recckpt.storage import Storage
from recckpt.text import nearest


class CheckpointReader:
    """Reads tables and tensors of one committed checkpoint; every byte given out is checked.

    Imports no torch and runs no code from the files. A context manager, which closes it. Not thread-safe.

    All files are opened at once: where they lie on a local file system they can be read to their end though the
    writer removes them meanwhile, as rotation does, and take their room until the reader is closed. On object stores
    a read then raises CheckpointRemovedError.

    Args:
        path: a checkpoint, or an output dir, whose newest is meant; any fsspec URL.

    Raises:
        TypeError: ``path`` is none.
        CheckpointNotFoundError: there is no committed checkpoint.
        CheckpointRemovedError: time and again it was removed before its files were open.
        CorruptCheckpointError: its manifest is damaged, or a file is missing or of another size.
        FormatVersionError: written by a newer format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"path must be a path or URL of a checkpoint or output dir, found {path!r}")
        self._held: HeldFiles | None
        self._storage, self._checkpoint, self._held = until_whole(lambda: locate_path(str(path)), _opened)
        self._parts: list[Part] | None = None
        self._tensors: DenseTensors | None = None

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; they are opened again when something is asked for."""
        if self._tensors is not None:
            self._tensors.close()
        self._tensors = self._held = None

    @property
    def manifest(self) -> Manifest:
        """All that is known without opening other files."""
        return self._checkpoint.manifest

    def tables(self) -> list[str]:
        """Return the names of the tables."""
        return [table.name for table in self.manifest.tables]

    def schema(self, name: str, columns: Collection[str] | None = None) -> pa.Schema:
        """Return the Arrow schema of the batches of a table: ``id`` and one column a slot."""
        slots = self._entry(name).slots
        return pa.schema(
            [
                pa.field(ID, pa.int64(), nullable=False),
                *(slot_field(slot) for slot in slots if columns is None or slot.name in columns),
            ]
        )

    def table(
        self, name: str, columns: Collection[str] | None = None, ids: Iterable[int] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a table as Arrow batches, in bucket order within each shard.

        Args:
            name: the table.
            columns: slots to read beside ``id``; None for all.
            ids: only the rows of these ids; batches that cannot hold them are not read.

        Raises:
            KeyError: no such table or slot.
            TypeError: ``ids`` are no int64 numbers, or ``columns`` is one name.
            CorruptCheckpointError: a file is damaged.
            CheckpointRemovedError: its writer has removed it, and the storage is no local file system.
        """
        entry = self._entry(name)
        slots = [slot.name for slot in entry.slots]
        if isinstance(columns, str):
            raise TypeError(f"columns must be a list of slots, found {columns!r}; pass [{columns!r}]")
        for column in columns or ():
            if column not in (*slots, ID):
                raise KeyError(f"table {name!r} has no slot {column!r}; it has {slots}{nearest(column, slots)}")
        wanted = [slot for slot in slots if columns is None or slot in columns]
        return self._batches(entry, wanted, None if ids is None else _distinct(ids))

    def lookup(self, name: str, ids: Sequence[int], columns: Collection[str] | None = None) -> pa.Table:
        """Return the rows of ``ids`` that the table has, in no particular order.

        Raises:
            KeyError: no such table or slot.
            TypeError: as :meth:`table`.
            CorruptCheckpointError: a file is damaged.
        """
        batches = list(self.table(name, columns, ids))
        return pa.Table.from_batches(batches, self.schema(name, columns))

    def tensor_names(self) -> list[str]:
        """Return the names of the dense tensors."""
        return self._dense().names()

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a dense tensor."""
        return self._dense().shape(name)

    def tensor_dtype(self, name: str) -> str:
        """Return the dtype of a dense tensor, such as ``float32``."""
        return self._dense().dtype(name)

    def read_tensor(self, name: str) -> npt.NDArray[Any]:
        """Return a dense tensor, whole, as a numpy array; bfloat16 comes as uint16 bit patterns.

        Raises:
            KeyError: no such tensor.
            CorruptCheckpointError: the file is damaged.
        """
        return self._dense().read(name)

    def _entry(self, name: str) -> TableEntry:
        entry = self.manifest.table(name)
        if entry is None:
            raise KeyError(f"no table {name!r} in {self.manifest.ckpt_id!r}{nearest(name, self.tables())}")
        return entry

    def _batches(
        self, entry: TableEntry, slots: list[str], ids: npt.NDArray[np.int64] | None
    ) -> Iterator[pa.RecordBatch]:
        buckets = None if ids is None else np.unique(bucket_of(ids))
        schema = self.schema(entry.name, slots)
        if self._parts is None:
            self._parts = read_parts(self._checkpoint, self._files)
        for part in self._parts:
            numbers = [
                n for n, batch in enumerate(part.batches) if batch.table == entry.name and _meets(batch, buckets)
            ]
            if not numbers:
                continue
            reader = PartReader(self._files, self._checkpoint.directory, part, entry.slots, slots)
            for number in numbers:
                columns = reader.read(number)
                batch = pa.RecordBatch.from_arrays([columns[n] for n in (ID, *slots)], schema=schema)
                if ids is not None:
                    found = np.isin(batch.column(ID).to_numpy(), ids)
                    batch = batch.take(pa.array(np.flatnonzero(found)))
                if batch.num_rows:
                    yield batch

    @property
    def _files(self) -> HeldFiles:
        if self._held is None:
            _, _, self._held = _opened((self._storage, self._checkpoint))
        return self._held

    def _dense(self) -> DenseTensors:
        if self._tensors is None:
            self._tensors = DenseTensors(self._files, self._checkpoint.directory, self.manifest)
        return self._tensors


def _opened(found: tuple[Storage, Checkpoint]) -> tuple[Storage, Checkpoint, HeldFiles]:
    storage, checkpoint = found
    sizes = {file.name: file.n_bytes for file in checkpoint.manifest.files}
    return storage, checkpoint, HeldFiles(storage, checkpoint.directory, sizes)


def _distinct(ids: Iterable[int]) -> npt.NDArray[np.int64]:
    """Return the ids in order, each once; a float or a string is none, though numpy would make one of it."""
    try:
        return np.unique(np.fromiter((index(id_) for id_ in ids), np.int64))
    except (TypeError, OverflowError) as error:
        raise TypeError(f"ids must be a sequence of int64 numbers, found {reprlib.repr(ids)}: {error}") from error


def _meets(batch: Batch, buckets: npt.NDArray[np.int64] | None) -> bool:
    """Say whether a batch may hold rows of any of the sorted buckets."""
    if buckets is None:
        return True
    at = np.searchsorted(buckets, batch.buckets[0])
    return bool(at < len(buckets) and buckets[at] < batch.buckets[1])
