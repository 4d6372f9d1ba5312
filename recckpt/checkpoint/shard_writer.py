"""The files of one shard of an attempt, and what is said of them (no torch, but for dense state)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from recckpt.format import catalog as catalogs
from recckpt.format import layout
from recckpt.format.buckets import N_BUCKETS
from recckpt.format.catalog import Catalog, Part, PartKind
from recckpt.format.manifest import Content, FileEntry
from recckpt.format.shards import ShardEntry, in_manifest
from recckpt.output_dir.checkpoint_dir import Intent, read_checked
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.part_plan import PartPlan, TableBytes, plan_parts
from recckpt.sparse.files.part_writer import RowSource, planned_batches, write_part
from recckpt.storage import HashingSink, NewFiles, Sink, Storage

if TYPE_CHECKING:
    from recckpt.dense.sharded import OwnChunk

BATCH_BYTES = 8 << 20
Advance = Callable[[int], object]
_ContentT = TypeVar("_ContentT", bound=Content)


class SizedRows(RowSource, Protocol):
    """The rows of one table, whose size says how they are cut into parts."""

    @property
    def size(self) -> TableBytes:
        """How large they are."""


@dataclass(frozen=True)
class ShardRecord:
    """What was written of one shard."""

    save_id: str  # the attempt that it belongs to
    shard: ShardEntry  # its catalog
    files: tuple[FileEntry, ...]  # all its files


class ShardWriter:
    """Writes the files of one shard; nothing of it counts before :meth:`record` has written its catalog.

    Args:
        storage: the output dir.
        intent: whose attempt it is.
        number: of the shard.
        count: of all shards.
        files: where new files are made, which go to the storage later; None for the storage itself, where the catalog
            is read once more.
    """

    def __init__(self, storage: Storage, intent: Intent, number: int, count: int, files: NewFiles | None) -> None:
        self.number, self.count, self.directory = number, count, intent.directory
        self._storage, self._save_id, self._is_read_back = storage, intent.save_id, files is None
        self._to: NewFiles = storage if files is None else files
        self._parts: list[Part] = []
        self._files: list[FileEntry] = []

    @property
    def catalog(self) -> Catalog:
        """What was written of its tables so far."""
        return Catalog(self._save_id, self.number, self.count, tuple(self._parts))

    def rows(
        self,
        sources: Iterable[SizedRows],
        threads: int,
        advance: Advance,
        *,
        holds: PartKind = "rows",
        least_bytes: int = BATCH_BYTES,
        buckets: tuple[int, int] = (0, N_BUCKETS),
    ) -> None:
        """Write the rows of tables in buckets [begin, end), several parts at once; deleted ids come behind rows.

        ``advance`` is called with the bytes of each batch once it is written, from several threads.
        """
        by_name = {source.size.name: source for source in sources}
        threads = self._to.threads(threads)
        sizes = [source.size for source in by_name.values()]
        plans = plan_parts(sizes, threads, least_bytes=least_bytes, buckets=buckets)

        def write(plan: PartPlan) -> Part | None:
            batches = planned_batches(plan, by_name, advance)
            return write_part(lambda: self._create_part(plan, holds), plan.tables, plan.slots, batches, holds=holds)

        self.add(run_all(write, plans, threads))

    def add(self, parts: Iterable[Part | None]) -> None:
        """Add parts that lie in the directory, in the order of the catalog; None stands for one that has no rows."""
        self._parts += [part for part in parts if part is not None]

    def tensors(self, state: Mapping[str, Any] | None, chunks: Sequence[OwnChunk] = ()) -> None:
        """Write the state of the model, None where another shard has it, and the chunks that are this shard's own."""
        from recckpt.dense.saver import save_tensors  # torch, which rows do without

        to, directory, save_id = self._to, self.directory, self._save_id
        self._files += save_tensors(state, chunks, to, directory, save_id=save_id, shard=self.number, shards=self.count)

    def states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Write other states, by the name of the file."""
        from recckpt.dense.saver import save_state

        self._files += [save_state(state, self._to, self.directory, name) for name, state in states.items()]

    def record(self) -> ShardRecord:
        """Write the catalog, and return what the manifest says of the shard."""
        catalog, name = self.catalog, layout.catalog(self.number, self.count)
        entry = write_small(self._to, self.directory, name, catalogs.encode(catalog))
        if self._is_read_back:
            read_checked(self._storage, self.directory, entry)
        files = (*self._files, *(FileEntry(part.file, part.n_bytes) for part in self._parts), entry)
        return ShardRecord(self._save_id, ShardEntry(entry.name, catalog.buckets, catalog.ids), files)

    def _create_part(self, plan: PartPlan, holds: PartKind) -> tuple[str, Sink]:
        if holds == "rows":
            file = layout.part(self.number, self.count, plan.group, plan.number)
        else:
            file = layout.deletes_part(self.number, self.count, plan.number)
        return file, self._to.create(layout.join(self.directory, file))


def write_small(files: NewFiles, directory: str, name: str, data: bytes) -> FileEntry:
    """Write a small file and return its entry."""
    with files.create(layout.join(directory, name)) as sink:
        hashing = HashingSink(sink)
        hashing.write(data)
    return FileEntry(name, sink.n_bytes, hashing.xxh3)


def with_shards(head: _ContentT, records: Sequence[ShardRecord]) -> _ContentT:
    """Return a manifest, or what is to become one, with its shards and their files beside those that it has."""
    files = (*head.files, *(file for record in records for file in record.files))
    return replace(
        head,
        shards=in_manifest([record.shard for record in records]),
        files=tuple(sorted(files, key=attrgetter("name"))),
    )
