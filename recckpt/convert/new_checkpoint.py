"""A full checkpoint made of rows in bucket order and of dense state: its files, and what its manifest says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from recckpt.convert.row_runs import RowRuns, buckets_of
from recckpt.convert.source import SourceContents
from recckpt.format import layout
from recckpt.format.buckets import gen_slice
from recckpt.format.catalog import Catalog
from recckpt.format.catalog import encode as encode_catalog
from recckpt.format.manifest import Content, FileEntry, Names, Scalar, ShardEntry
from recckpt.format.tables import TableEntry
from recckpt.output_dir.new_checkpoint import Target
from recckpt.output_dir.writer import WRITER
from recckpt.sparse.files.arrow_format import ID_SPEC
from recckpt.sparse.files.part_writer import ColumnBytes, PartWriter
from recckpt.types import SlotSpec

PART_BYTES, BATCH_BYTES = 1 << 30, 8 << 20
_MAX_TABLES = 32_767  # part of the format: the table column counts in int16
Advance = Callable[[int], object]


@dataclass(frozen=True)
class _Piece:
    """Rows of one table in buckets [begin, end)."""

    runs: RowRuns
    begin: int
    end: int
    n_bytes: int


@dataclass(frozen=True)
class NewCheckpoint:
    """What is to be written: rows that are in order, and all else of a source."""

    tables: Sequence[RowRuns]
    contents: SourceContents
    state: Mapping[str, Scalar]

    @property
    def shards(self) -> int:
        """As many as there are positions: each rank that goes on takes its own."""
        return max(1, len(self.contents.io_state))


def write_new(to: Target, new: NewCheckpoint, advance: Advance) -> Content:
    """Write all files of a checkpoint, and return what it holds."""
    catalogs = [_write_shard(to, new, shard, advance) for shard in range(new.shards)]
    files = [FileEntry(part.file, part.n_bytes) for catalog in catalogs for part in catalog.parts]
    entries = [to.write(layout.catalog(c.shard, c.shards), encode_catalog(c)) for c in catalogs]
    files += [*entries, *_write_dense(to, new)]
    return Content(
        shards=tuple(ShardEntry(e.name, c.buckets) for e, c in zip(entries, catalogs, strict=True)),
        tables=tuple(TableEntry(runs.table.name, runs.n_rows, runs.table.slots) for runs in new.tables),
        files=tuple(sorted(files, key=lambda file: file.name)),
        names=_names(new.contents),
        state=new.state,
        writer=WRITER,
    )


def _write_shard(to: Target, new: NewCheckpoint, shard: int, advance: Advance) -> Catalog:
    own = gen_slice(shard, new.shards)
    groups: dict[tuple[SlotSpec, ...], list[RowRuns]] = {}
    for runs in new.tables:
        groups.setdefault(runs.table.slots, []).append(runs)
    parts = []
    for group, slots in enumerate(sorted(groups)):
        for number, pieces in enumerate(_roll(groups[slots], own.begin, own.end)):
            file = layout.part(shard, new.shards, group, number)
            with to.storage.create(layout.join(to.directory, file)) as sink:
                tables = list(dict.fromkeys(piece.runs.table.name for piece in pieces))
                writer = PartWriter(sink, file, tables, slots)
                for piece in pieces:
                    _write_piece(writer, piece, advance)
                parts.append(writer.finish())
    return Catalog(to.save_id, shard, new.shards, tuple(parts))


def _roll(tables: Sequence[RowRuns], begin: int, end: int) -> Iterator[list[_Piece]]:
    """Yield what goes into each part, in file order."""
    pieces: list[_Piece] = []
    for runs in tables:
        for first, last in runs.ranges(begin, end):
            n_bytes = runs.rows_in(first, last) * runs.table.row_bytes
            if n_bytes:
                pieces.append(_Piece(runs, first, last, n_bytes))
            if len(pieces) == _MAX_TABLES or sum(piece.n_bytes for piece in pieces) >= PART_BYTES:
                yield pieces
                pieces = []
    if pieces:
        yield pieces


def _write_piece(writer: PartWriter, piece: _Piece, advance: Advance) -> None:
    table = piece.runs.table
    ids, columns = piece.runs.between(piece.begin, piece.end)
    batch_rows = max(1, BATCH_BYTES // (2 + table.row_bytes))
    for first in range(0, len(ids), batch_rows):
        rows = slice(first, first + batch_rows)
        n_rows = len(ids[rows])
        values = [ColumnBytes(ID_SPEC, n_rows, [ids[rows].view(np.uint8)])]
        values += [ColumnBytes(s, n_rows, [c[rows].view(np.uint8)]) for s, c in zip(table.slots, columns, strict=True)]
        writer.write(table.name, buckets_of(ids[rows]), values)
        advance(sum(column.n_bytes for column in values))


def _write_dense(to: Target, new: NewCheckpoint) -> list[FileEntry]:
    """Write what is not rows; a tensor at a time is in memory."""
    held = new.contents
    if not (held.dense or held.values or held.extra or held.io_state):
        return []
    from recckpt.dense.saver import Later, save_state, save_tensors  # torch, which rows do without
    from recckpt.dense.state_copy import portable

    state = {t.name: Later(t.dtype, t.shape, t.same, t.whole) for t in held.dense}
    state |= portable("the state", dict(held.values))
    files = []
    if state:
        files += save_tensors(state, (), to.storage, to.directory, save_id=to.save_id, shard=0, shards=new.shards)
    if held.extra:
        files.append(save_state(portable("extra", dict(held.extra)), to.storage, to.directory, layout.EXTRA))
    for rank, positions in enumerate(held.io_state):
        kept = portable("io_state", dict(positions))
        files.append(save_state(kept, to.storage, to.directory, layout.io_state(rank)))
    return files


def _names(held: SourceContents) -> Names:
    positions = dict.fromkeys(name for each in held.io_state for name in each)
    dense = (*(tensor.name for tensor in held.dense), *held.values)
    return Names(dense=dense, extra=tuple(held.extra), io_state=tuple(positions))
