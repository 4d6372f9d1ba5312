"""Batches of rows from Parquet and Arrow files, distributed among ranks by row group (no torch here)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
from pyarrow import fs, parquet

from recckpt.positions.epochs import Elastic, Places
from recckpt.types import positive_int


class ElasticFiles(Elastic):
    """Batches of rows from Parquet or Arrow files; each rank reads its share of the row groups.

    After a restore, a partly used row group continues after its last used row, on any rank. Each ``for`` runs one
    epoch; after a restore, the first ``for`` runs the rest of the saved epoch. Ranks get different numbers of batches
    per epoch. So if ranks save or step together, end the loop after the same number of steps on all ranks; ranks may
    then be in different epochs. Not thread-safe. Not collective.

    Args:
        paths: files, or URLs of filesystems that pyarrow knows; the same on all ranks.
        batch_rows: rows per batch.
        columns: names of the columns to read; None for all.
        shuffle: whether to shuffle the row groups, and the rows within a group, anew for each epoch.
        seed: seed of the shuffling.
        drop_last: whether to omit the last rows of a rank if they do not fill a batch.
        rank: rank of this process; None for its rank in the process group.
        ranks: number of ranks; None for the size of the process group.

    Raises:
        ValueError: an argument is invalid, or a file is neither a Parquet nor an Arrow file.
        OSError: a file cannot be read.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        batch_rows: int,
        *,
        columns: Sequence[str] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        if isinstance(paths, str | os.PathLike):
            raise ValueError(f"paths must be a list of files, found {os.fspath(paths)!r}")
        if isinstance(columns, str):
            raise ValueError(f"columns must be a list of names, found {columns!r}; pass [{columns!r}]")
        self._files = [_File(os.fspath(path), columns) for path in paths]
        self._groups = [(file, group) for file in self._files for group in range(len(file.rows))]
        if not any(rows for file in self._files for rows in file.rows):
            raise ValueError(f"paths: there are no rows in {len(self._files)} files")
        names = [f"{'/'.join(file.path.split('/')[-2:])}:{n}:{file.rows[n]}" for file, n in self._groups]
        super().__init__(
            len(names), "row groups", names, shuffle=shuffle, seed=seed, drop_last=drop_last, rank=rank, ranks=ranks
        )
        self._batch_rows = positive_int("batch_rows", batch_rows)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        iterator, size = self._begun(), self._batch_rows
        before = self._used
        places: list[int] = self._deal.share(self._rank, self._ranks)[before:].tolist()
        self._check_share(len(places))
        order, pieces, n_rows, passed = self._order(self.epoch), [], 0, set[int]()
        for used, place in enumerate(places, before):
            table = self._read(order, place)
            passed.add(place)
            begin = self._parts.get(place, 0)
            while begin < len(table):
                pieces.append(table.slice(begin, size - n_rows))
                begin, n_rows = begin + len(pieces[-1]), n_rows + len(pieces[-1])
                if n_rows == size:
                    self._give(iterator, used + (begin == len(table)))
                    others = {other: rows for other, rows in self._parts.items() if other not in passed}
                    self._parts = others if begin == len(table) else {**others, place: begin}
                    yield _joined(pieces)
                    pieces, n_rows = [], 0
        if pieces and not self._drop_last:
            self._give(iterator, before + len(places))
            yield _joined(pieces)
        self._end(iterator)

    def _read(self, order: Places | None, place: int) -> pa.Table:
        file, group = self._groups[place if order is None else order[place]]
        table = file.read(group)
        if self._shuffle:
            table = table.take(np.random.RandomState([self._seed, self.epoch, place]).permutation(len(table)))
        return table


def _joined(pieces: Sequence[pa.Table]) -> pa.RecordBatch:
    [batch] = pa.concat_tables(pieces).combine_chunks().to_batches()
    return batch


class _File:
    """A Parquet or Arrow file. Its footer is read once; the file is opened again to read each row group.

    Attributes:
        rows: number of rows per row group.
    """

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        self.path, self._columns = path, columns
        with self._errors_named(), self._opened() as file:
            magic = file.read_at(6, 0)
            self._metadata = parquet.read_metadata(file) if magic[:4] == b"PAR1" else None
            if self._metadata is not None:
                names = self._metadata.schema.to_arrow_schema().names
                self.rows = [self._metadata.row_group(n).num_rows for n in range(self._metadata.num_row_groups)]
            elif magic == b"ARROW1":
                reader = pa.ipc.open_file(file)
                names = reader.schema.names
                self.rows = [reader.get_batch(n).num_rows for n in range(reader.num_record_batches)]
            else:
                raise ValueError(f"paths: {path!r} is neither a Parquet nor an Arrow file: it begins with {magic!r}")
        if missing := [name for name in columns or () if name not in names]:
            raise ValueError(f"columns: {path!r} has no {missing[0]!r}; it has {names}")

    def read(self, group: int) -> pa.Table:
        with self._errors_named(f", row group {group}"), self._opened() as file:
            if self._metadata is None:
                table = pa.Table.from_batches([pa.ipc.open_file(file).get_batch(group)])
            else:
                opened = parquet.ParquetFile(file, metadata=self._metadata)
                table = opened.read_row_group(group, columns=self._columns)
        return table if self._columns is None else table.select(self._columns)

    def _opened(self) -> pa.NativeFile:
        is_url = "://" in self.path
        system, name = fs.FileSystem.from_uri(self.path) if is_url else (fs.LocalFileSystem(), self.path)
        return system.open_input_file(name)

    @contextmanager
    def _errors_named(self, where: str = "") -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            if getattr(error, "errno", None) is not None:  # an error of the file system, which names the file
                raise
            raise OSError(f"{self.path}{where} cannot be read: {error}") from error
