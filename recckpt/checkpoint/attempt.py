"""An attempt to write a checkpoint, from an empty directory to a commit or an offer. All commits go through here."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from recckpt.checkpoint.chain import files_of
from recckpt.dense.tensors import check_file, read_index
from recckpt.errors import CommitNotDurableError, CorruptCheckpointError, WriterFencedError
from recckpt.format import catalog as catalogs
from recckpt.format import layout, tensor_index
from recckpt.format import manifest as manifests
from recckpt.format.buckets import N_BUCKETS
from recckpt.format.catalog import Catalog, Part, PartKind
from recckpt.format.codec import time_now
from recckpt.format.manifest import Content, FileEntry, Manifest, ShardEntry, Supersedes, in_manifest
from recckpt.output_dir import rotation
from recckpt.output_dir.checkpoint_dir import Intent, read_checked, refuse_checkpoint, write_intent
from recckpt.output_dir.commit import begin, commit
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.forget_requests import FORGET_FIRST, check_none_pending
from recckpt.output_dir.listing import Checkpoint
from recckpt.output_dir.notes import refuse_mirror
from recckpt.output_dir.open_files import OpenFiles
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.part_writer import PartPlan, RowStream, plan_parts, planned_batches, write_part
from recckpt.storage import HashingSink, NewFiles, Sink, Storage
from recckpt.storage.retry import RetryPolicy
from recckpt.storage.transfers import VISIBLE

if TYPE_CHECKING:
    from recckpt.dense.sharded import OwnChunk

BATCH_BYTES = 8 << 20
Advance = Callable[[int], object]
_ContentT = TypeVar("_ContentT", bound=Content)
_STEP_BYTES = 8 << 20


@dataclass(frozen=True)
class ShardRecord:
    save_id: str  # save id of the attempt
    shard: ShardEntry
    files: tuple[FileEntry, ...]


class ShardWriter:
    """Writes the files of one shard. They become part of the checkpoint once :meth:`record` writes the catalog.

    ``files`` creates files that are transferred to the storage later. With None, files are created in the storage
    itself, and the catalog is read back.
    """

    def __init__(self, storage: Storage, intent: Intent, number: int, count: int, files: NewFiles | None) -> None:
        self.number, self.count, self.directory = number, count, intent.directory
        self._storage, self._save_id, self._is_read_back = storage, intent.save_id, files is None
        self._to: NewFiles = storage if files is None else files
        self._parts: list[Part] = []
        self._files: list[FileEntry] = []

    @property
    def catalog(self) -> Catalog:
        return Catalog(self._save_id, self.number, self.count, tuple(self._parts))

    def rows(
        self,
        sources: Iterable[RowStream],
        threads: int,
        advance: Advance,
        *,
        holds: PartKind = "rows",
        least_bytes: int = BATCH_BYTES,
        buckets: tuple[int, int] = (0, N_BUCKETS),
    ) -> None:
        """Write the rows of tables in buckets [begin, end), several parts in parallel; deleted ids come after the rows.

        ``advance`` is called with the bytes of each written batch, from several threads.
        """
        by_name = {source.size.name: source for source in sources}
        threads = self._to.threads(threads)
        sizes = [source.size for source in by_name.values()]
        plans = plan_parts(sizes, threads, least_bytes=least_bytes, buckets=buckets)

        def create(plan: PartPlan) -> tuple[str, Sink]:
            if holds == "rows":
                file = layout.part(self.number, self.count, plan.group, plan.number)
            else:
                file = layout.part(self.number, self.count, None, plan.number)
            return file, self._to.create(layout.join(self.directory, file))

        def write(plan: PartPlan) -> Part | None:
            batches = planned_batches(plan, by_name, advance)
            return write_part(lambda: create(plan), plan.tables, plan.slots, batches, holds=holds)

        self.add(run_all(write, plans, threads))

    def add(self, parts: Iterable[Part | None]) -> None:
        """Add parts that are in the directory already, in the order of the catalog; None is a part without rows."""
        self._parts += [part for part in parts if part is not None]

    def tensors(self, state: Mapping[str, Any] | None, chunks: Sequence[OwnChunk] = ()) -> None:
        """Write the state of the model (None if another shard writes it), and this shard's own chunks."""
        from recckpt.dense.saver import save_tensors  # imports torch, which rows do not need

        to, directory, save_id = self._to, self.directory, self._save_id
        self._files += save_tensors(state, chunks, to, directory, save_id=save_id, shard=self.number, shards=self.count)

    def states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        from recckpt.dense.saver import save_state

        self._files += [save_state(state, self._to, self.directory, name) for name, state in states.items()]

    def record(self) -> ShardRecord:
        catalog, name = self.catalog, layout.catalog(self.number, self.count)
        entry = write_small(self._to, self.directory, name, catalogs.encode(catalog))
        if self._is_read_back:
            read_checked(self._storage, self.directory, entry)
        files = (*self._files, *(FileEntry(part.file, part.n_bytes) for part in self._parts), entry)
        return ShardRecord(self._save_id, ShardEntry(entry.name, catalog.buckets, catalog.ids), files)


def write_small(files: NewFiles, directory: str, name: str, data: bytes) -> FileEntry:
    with files.create(layout.join(directory, name)) as sink:
        hashing = HashingSink(sink)
        hashing.write(data)
    return FileEntry(name, sink.n_bytes, hashing.xxh3)


def with_shards(head: _ContentT, records: Sequence[ShardRecord]) -> _ContentT:
    files = (*head.files, *(file for record in records for file in record.files))
    return replace(
        head,
        shards=in_manifest([record.shard for record in records]),
        files=tuple(sorted(files, key=attrgetter("name"))),
    )


@dataclass(frozen=True)
class Attempt:
    """An attempt with its own directory; ``seq`` is the sequence number of the commit, 0 for an offer."""

    storage: Storage
    intent: Intent
    seq: int = 0

    @classmethod
    def begin(
        cls,
        storage: Storage,
        fence: Fence,
        ckpt_id: str,
        *,
        step: int | None,
        overwrite: bool = False,
        base: str | None = None,
    ) -> Attempt:
        """Begin an attempt that will be committed; same errors as :func:`recckpt.output_dir.commit.begin`."""
        intent, seq = begin(storage, fence, ckpt_id, step=step, overwrite=overwrite, base=base)
        return cls(storage, intent, seq)

    @classmethod
    def begin_offer(cls, storage: Storage, of: Manifest, epoch: int) -> Attempt:
        intent = _intent_of_offer(of, epoch)
        storage.make_dir(intent.directory)
        write_intent(storage, intent)
        return cls(storage, intent)

    @property
    def directory(self) -> str:
        return self.intent.directory

    @property
    def save_id(self) -> str:
        return self.intent.save_id

    def shard(self, number: int, count: int) -> ShardWriter:
        return ShardWriter(self.storage, self.intent, number, count, None)

    def write(self, name: str, data: bytes) -> FileEntry:
        """Write a small file, and read it back; CorruptCheckpointError if it differs."""
        entry = write_small(self.storage, self.directory, name, data)
        read_checked(self.storage, self.directory, entry)
        return entry

    def commit(self, fence: Fence, record: Manifest, visible: RetryPolicy = VISIBLE) -> Manifest:
        """Commit the written files; same errors as :func:`recckpt.output_dir.commit.commit`."""
        return commit(self.storage, fence, self.directory, record, visible)

    def offer(self, of: Checkpoint, content: Content) -> None:
        """Offer the written, durable files to replace a delta. The offer is a manifest without its sequence number."""
        path, delta = layout.join(self.directory, layout.OFFER_JSON), of.manifest
        record = Manifest(
            ckpt_id=delta.ckpt_id,
            save_id=self.save_id,
            epoch=self.intent.epoch,
            seq=self.seq,
            cut=delta.cut,
            step=delta.step,
            time=delta.time,  # policies derive the age of the checkpoint from it
            supersedes=Supersedes(delta.save_id, delta.xxh3, of.directory, *delta.place, "same", "compacted"),
            **content.content,
        )
        data = manifests.encode(record)
        manifests.decode(data, path)  # never offer a manifest that an owner could not read
        self.storage.put_if_absent(path, data)

    @contextmanager
    def abandoned_on_error(self, is_idle: Callable[[BaseException], bool] = lambda error: True) -> Iterator[None]:
        """Remove the written files if the ``with`` block fails, unless a new owner or readers may need them.

        ``is_idle`` returns whether, after an error, no other rank is still writing to the directory.
        """
        try:
            yield
        except (WriterFencedError, CommitNotDurableError):
            raise  # the new owner decides about the directory, or already has a checkpoint in it
        except BaseException as error:
            if is_idle(error):
                rotation.abandon(self.storage, self.directory)
            raise


def _intent_of_offer(of: Manifest, epoch: int) -> Intent:
    save_id = secrets.token_hex(16)
    return Intent(layout.offer_dir(of.ckpt_id, save_id), epoch, save_id, of.step, is_offer=True)


def commit_new(
    storage: Storage, ckpt_id: str, step: int | None, write: Callable[[Attempt], Content]
) -> tuple[str, Manifest]:
    """Call ``write`` to write the files of a checkpoint, and commit it; return its directory and its manifest.

    Raises:
        ValueError: ``storage`` is the directory of a checkpoint, not an output dir.
        CheckpointExistsError: the id is committed there already.
        RecckptError: the output dir is a mirror, or a request to forget ids is pending there.
        WriterFencedError: another writer took the output dir over.
        OSError: the storage failed; nothing is committed.
        CommitNotDurableError: the manifest exists or may still appear, so all files stay.
        Exception: raised by ``write``; its files are removed.
    """
    refuse_mirror(storage)
    storage.prepare()
    refuse_checkpoint(storage)
    check_none_pending(storage, FORGET_FIRST)
    fence = Fence(storage)
    attempt = Attempt.begin(storage, fence, ckpt_id, step=step)
    with attempt.abandoned_on_error():
        content, intent = write(attempt).content, attempt.intent
        record = Manifest(
            ckpt_id=ckpt_id,
            save_id=intent.save_id,
            epoch=intent.epoch,
            seq=attempt.seq,
            step=step,
            time=time_now(),
            **content,
        )
        record = attempt.commit(fence, record)
    fence.write_index()
    return attempt.directory, record


def copied_bytes(checkpoint: Checkpoint) -> int:
    return sum(entry.n_bytes for entry in _copied(checkpoint))


def copy_others(
    storage: Storage, checkpoint: Checkpoint, to: Attempt, advance: Advance, threads: int
) -> list[FileEntry]:
    """Copy dense state, registered objects and positions; return the entries of the new files.

    Raises CheckpointRemovedError, or CorruptCheckpointError if a file or its copy is damaged.
    """
    manifest, directory = checkpoint.manifest, checkpoint.directory
    files = files_of(storage, checkpoint)
    run_all(lambda entry: _copy(files, directory, entry, to, advance), _copied(checkpoint), storage.threads(threads))
    entries = list(_copied(checkpoint))
    for shard in range(len(manifest.shards)):
        index = read_index(files, directory, manifest, shard)
        if index is not None:
            data = tensor_index.encode(index.but(save_id=to.save_id))
            entries.append(to.write(layout.dense_index(shard, len(manifest.shards)), data))
    return entries


def _copied(checkpoint: Checkpoint) -> list[FileEntry]:
    manifest, shards = checkpoint.manifest, len(checkpoint.manifest.shards)
    written = {shard.catalog for shard in manifest.shards} | {layout.dense_index(n, shards) for n in range(shards)}
    return [file for file in manifest.files if not layout.is_part(file.name) and file.name not in written]


def _copy(files: OpenFiles, directory: str, entry: FileEntry, to: Attempt, advance: Advance) -> None:
    source, copy = layout.join(directory, entry.name), layout.join(to.directory, entry.name)
    with files.open(source) as content, to.storage.create(copy) as sink:
        hashing = HashingSink(sink)
        while data := content.read(_STEP_BYTES):
            hashing.write(data)
            advance(len(data))
        if hashing.xxh3 != entry.xxh3:
            found, expected = f"{hashing.xxh3:016x}", f"{entry.xxh3 or 0:016x}"
            raise CorruptCheckpointError(source, "its checksum", found=found, expected=expected)
    for error in check_file(to.storage, to.directory, entry, index=None, advance=lambda n_bytes: None):
        raise error
