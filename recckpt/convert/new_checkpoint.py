"""A full checkpoint made of rows in bucket order and of dense state: its files, and what its manifest says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from recckpt.convert.row_runs import BATCH_BYTES, RowRuns
from recckpt.convert.source import SourceContents
from recckpt.format import layout
from recckpt.format.buckets import gen_slice
from recckpt.format.catalog import Catalog
from recckpt.format.catalog import encode as encode_catalog
from recckpt.format.manifest import Content, FileEntry, Names, Scalar, ShardEntry
from recckpt.format.tables import TableEntry
from recckpt.output_dir.new_checkpoint import Target
from recckpt.output_dir.writer import WRITER
from recckpt.sparse.files.part_plan import plan_parts
from recckpt.sparse.files.part_writer import planned_batches, write_part
from recckpt.storage import Sink

Advance = Callable[[int], object]


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
    sizes, sources = [runs.size for runs in new.tables], {runs.table.name: runs for runs in new.tables}
    parts = []
    for plan in plan_parts(sizes, 1, least_bytes=BATCH_BYTES, buckets=(own.begin, own.end)):
        file = layout.part(shard, new.shards, plan.group, plan.number)

        def create(file: str = file) -> tuple[str, Sink]:
            return file, to.storage.create(layout.join(to.directory, file))

        parts.append(write_part(create, plan.tables, plan.slots, planned_batches(plan, sources, advance)))
    return Catalog(to.save_id, shard, new.shards, tuple(part for part in parts if part is not None))


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
