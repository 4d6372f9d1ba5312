"""Looking into a checkpoint without the model and without torch."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recckpt.dense.tensors import DenseTensors
from recckpt.format import layout
from recckpt.format.manifest import Manifest
from recckpt.output_dir.at_path import locate_path
from recckpt.output_dir.listing import Checkpoint
from recckpt.output_dir.open_files import HeldFiles, until_whole
from recckpt.sparse.files.arrow_format import ID
from recckpt.sparse.files.chain_table import ChainTable, OpenLink, open_table
from recckpt.sparse.files.table_reader import table_schema
from recckpt.storage import Storage
from recckpt.text import nearest

if TYPE_CHECKING:
    from pyarrow.dataset import Dataset


def dataset(path: str | os.PathLike[str], table: str) -> Dataset:
    """Return the rows of a table as a ``pyarrow.dataset.Dataset``, which pyarrow, polars and duckdb query lazily.

    Its columns are ``table``, ``id`` and the slots; its rows are those of this table and no others. Nothing is read
    but the catalogs and the ends of the files, and values are **not checked** when they are read: ``recckpt verify``
    does that, and :meth:`CheckpointReader.table` gives out checked rows. Imports no torch.

    The files are open from now on: on a local file system all rows stay readable though the writer removes the
    checkpoint. On object stores a query then fails. May be queried from several threads.

    Args:
        path: a checkpoint, or an output dir, whose newest is meant; any fsspec URL.
        table: name of the table.

    Raises:
        KeyError: no such table.
        TypeError, CheckpointNotFoundError, CheckpointRemovedError, CorruptCheckpointError, FormatVersionError: as
            :class:`CheckpointReader`.
    """
    return CheckpointReader(path).dataset(table)


class CheckpointReader:
    """Reads tables and tensors of one committed checkpoint; every byte that it returns has been checked.

    Imports no torch and runs no code from the files. A context manager, which closes it. Not thread-safe.

    All files are opened at once, of a delta those of the links it stands on too. On a local file system they can be
    read to their end even if the writer removes them meanwhile, as rotation does, and keep their disk space until the
    reader is closed. On object stores a read then raises CheckpointRemovedError.

    Args:
        path: a checkpoint, or an output dir, whose newest is meant; any fsspec URL.

    Raises:
        TypeError: ``path`` is not a path.
        CheckpointNotFoundError: there is no committed checkpoint.
        CheckpointRemovedError: its writer removed it before its files were open, four times in a row.
        CorruptCheckpointError: its manifest is damaged, or a file is missing or of another size.
        FormatVersionError: written by a newer format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"path must be a path or URL of a checkpoint or output dir, found {path!r}")
        self._path = str(path)
        self._open: _Open | None
        self._storage, self._checkpoint, self._open = until_whole(self._located, partial(_opened, known=()))
        self._tensors: DenseTensors | None = None

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; the next read opens them again."""
        if self._tensors is not None:
            self._tensors.close()
        self._tensors = self._open = None

    def refresh(self) -> bool:
        """Move on to what the path means now, such as a newer checkpoint of an output dir, and say whether it moved.

        Only links that are new to this reader are opened and read: beside a run with deltas, what has changed. What is
        being read from the checkpoint before can be read to its end. After an error the reader stays where it is.

        Raises:
            CheckpointNotFoundError, CheckpointRemovedError, CorruptCheckpointError, FormatVersionError: as when it was
                made.
        """
        known = self._open.links if self._open else ()
        found = until_whole(self._located, partial(_opened, known=known))
        moved = found[1].manifest.origin != self.manifest.origin
        self.close()
        self._storage, self._checkpoint, self._open = found
        return moved

    @property
    def manifest(self) -> Manifest:
        """What is known without opening other files."""
        return self._checkpoint.manifest

    def tables(self) -> list[str]:
        """Return the names of the tables."""
        return [table.name for table in self.manifest.tables]

    def schema(self, name: str, columns: Collection[str] | None = None) -> pa.Schema:
        """Return the Arrow schema of the batches of a table: ``id`` and one column a slot."""
        entry = self.manifest.named_table(name)
        return table_schema(slot for slot in entry.slots if columns is None or slot.name in columns)

    def table(
        self, name: str, columns: Collection[str] | None = None, ids: Iterable[int] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a table as Arrow batches, in bucket order within each shard, of a delta over all shards.

        Args:
            name: the table.
            columns: slots to read beside ``id``; None for all.
            ids: only the rows of these ids; batches that cannot hold them are not read.

        Raises:
            KeyError: no such table or slot.
            TypeError: ``ids`` are not int64 numbers, or ``columns`` is a single name.
            CorruptCheckpointError: a file is damaged, or an id occurs twice.
            CheckpointRemovedError: its writer removed it, and the storage is not a local file system.
        """
        table = self._table(name, columns)
        return table.all_rows() if ids is None else table.rows_of(_distinct(ids))

    def lookup(self, name: str, ids: Sequence[int], columns: Collection[str] | None = None) -> pa.Table:
        """Return the rows of ``ids`` that the table has, in no particular order.

        Raises:
            KeyError: no such table or slot.
            TypeError, CorruptCheckpointError: as :meth:`table`.
        """
        batches = list(self.table(name, columns, ids))
        return pa.Table.from_batches(batches, self.schema(name, columns))

    def dataset(self, name: str) -> Dataset:
        """Return the rows of a table for others to query; see :func:`recckpt.dataset`.

        Raises:
            KeyError: no such table.
            CorruptCheckpointError: a file is missing, cut or of another schema, or an id is in two shards.
        """
        from recckpt.sparse.files.dataset import dataset_of  # the import of Arrow's datasets takes its time

        return dataset_of(self._table(name, None))

    def tensor_names(self) -> list[str]:
        """Return the names of the dense tensors."""
        return list(self._dense().model)

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a dense tensor."""
        return self._dense().named(name).shape

    def tensor_dtype(self, name: str) -> str:
        """Return the dtype of a dense tensor, such as ``float32``."""
        return self._dense().named(name).dtype

    def read_tensor(self, name: str) -> npt.NDArray[Any]:
        """Return a dense tensor, whole, as a numpy array; bfloat16 comes as uint16 bit patterns.

        Raises:
            KeyError: no such tensor.
            CorruptCheckpointError: its bytes are not those that were saved.
        """
        dense = self._dense()
        return dense.read(dense.named(name))

    def _table(self, name: str, columns: Collection[str] | None) -> ChainTable:
        slots = [slot.name for slot in self.manifest.named_table(name).slots]
        if isinstance(columns, str):
            raise TypeError(f"columns must be a list of slots, found {columns!r}; pass [{columns!r}]")
        for column in columns or ():
            if column not in (*slots, ID):
                raise KeyError(f"table {name!r} has no slot {column!r}; it has {slots}{nearest(column, slots)}")
        return open_table(self._files.links, name, [slot for slot in slots if columns is None or slot in columns])

    def _located(self) -> tuple[Storage, Checkpoint]:
        return locate_path(self._path)

    @property
    def _files(self) -> _Open:
        if self._open is None:
            _, _, self._open = _opened((self._storage, self._checkpoint), ())
        return self._open

    def _dense(self) -> DenseTensors:
        if self._tensors is None:
            self._tensors = DenseTensors(self._files.others, self._checkpoint.directory, self.manifest)
        return self._tensors


@dataclass(frozen=True)
class _Open:
    """The open files of a checkpoint."""

    links: Sequence[OpenLink]  # with the files of rows of each, newest first
    others: HeldFiles  # all but those with rows


def _opened(found: tuple[Storage, Checkpoint], known: Iterable[OpenLink]) -> tuple[Storage, Checkpoint, _Open]:
    """Open what is not known."""
    storage, checkpoint = found
    before = {_key(link.checkpoint): link for link in known}
    links = [before.get(_key(link)) or OpenLink(link, _held(storage, link, rows=True)) for link in checkpoint.links]
    return storage, checkpoint, _Open(links, _held(storage, checkpoint, rows=False))


def _key(link: Checkpoint) -> tuple[str, str]:
    return link.directory, link.manifest.save_id


def _held(storage: Storage, checkpoint: Checkpoint, *, rows: bool) -> HeldFiles:
    files = (file for file in checkpoint.manifest.files if layout.has_rows(file.name) == rows)
    return HeldFiles(storage, checkpoint.directory, {file.name: file.n_bytes for file in files})


def _distinct(ids: Iterable[int]) -> npt.NDArray[np.int64]:
    """Return the ids in order, each once; refuses floats and strings, which numpy would convert."""
    try:
        return np.unique(np.fromiter((index(id_) for id_ in ids), np.int64))
    except (TypeError, OverflowError) as error:
        raise TypeError(f"ids must be a sequence of int64 numbers, found {reprlib.repr(ids)}: {error}") from error
