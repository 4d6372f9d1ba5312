"""Copies checkpoints into a mirror, byte for byte, checking each file on the way; and copies some other files."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import xxhash

from recckpt.checkpoint.chain import OpenLink, files_of
from recckpt.errors import CheckpointRemovedError, CorruptCheckpointError, RecckptError
from recckpt.format import layout, manifest
from recckpt.format.catalog import Part
from recckpt.format.manifest import FileEntry, Manifest
from recckpt.output_dir.checkpoint_dir import has_manifest, intent_of, listed_files, unlisted
from recckpt.output_dir.listing import Checkpoint, list_checkpoints
from recckpt.output_dir.notes import make_own_dir
from recckpt.output_dir.open_files import OpenFiles
from recckpt.output_dir.rotation import pinned_ids
from recckpt.parallel.threads import run_all
from recckpt.rewrite.mirror_hold import MirrorHold
from recckpt.storage import ABSENT, NOT_READABLE, Storage
from recckpt.storage.local_files import mapped
from recckpt.storage.retry import read_twice

_STEP_BYTES = 8 << 20
_FIRST_BYTES = 1 << 16  # more than the first file of a checkpoint can have
Advance = Callable[[int], object]
_MOST_BYTES = 1 << 30
_PINNED = b'{"by": "recckpt mirror"}\n'  # marks a pin copied from the run; users of the mirror make other pins


@dataclass(frozen=True)
class CheckpointCopier:
    """Copies checkpoints of a run into a mirror.

    A file with the right size is not copied again, because an earlier copy wrote all of it: drafts appear whole or not
    at all. So an interrupted copy can be continued, and two concurrent copies write the same bytes.
    """

    run: Storage  # the output dir that is read
    to: Storage  # the mirror
    hold: MirrorHold
    threads: int  # number of files to copy at once

    def missing(self, checkpoint: Checkpoint) -> list[FileEntry]:
        return unlisted(checkpoint.manifest.files, listed_files(self.to, checkpoint.directory))

    def copy(self, checkpoint: Checkpoint, advance: Advance) -> int:
        """Copy the missing files of a checkpoint, and commit it; return how many bytes were copied.

        Its parents must be there already. After any error the checkpoint is not committed: CheckpointRemovedError;
        CorruptCheckpointError; or RecckptError if the mirror has another checkpoint in this place, or if another pass
        over the mirror has begun.
        """
        data = self._manifest_bytes(checkpoint)
        try:
            return self._copy(checkpoint, data, advance)
        except OSError:
            with suppress(OSError):
                self.hold.check()  # if another pass has removed the files, raise that error instead
            raise

    def _copy(self, checkpoint: Checkpoint, data: bytes, advance: Advance) -> int:
        directory = checkpoint.directory
        self._begin(directory, checkpoint.manifest, data)
        for name in self.to.list_files(directory):
            if layout.is_draft(name):  # left by an interrupted copy
                self.to.remove(layout.join(directory, name))
        entries, files = self.missing(checkpoint), files_of(self.run, checkpoint)
        files.keep_open(entry.name for entry in entries)
        catalogs = OpenLink(checkpoint, files).catalogs if any(layout.is_part(entry.name) for entry in entries) else ()
        parts = {part.file: part for catalog in catalogs for part in catalog.parts}
        copy = partial(self._copy_file, checkpoint, files, parts, advance)
        run_all(copy, entries, self.to.threads(self.threads))
        files.close()
        self._commit(checkpoint, data)
        return sum(entry.n_bytes for entry in entries)

    def _manifest_bytes(self, checkpoint: Checkpoint) -> bytes:
        """Return the manifest's bytes in the run, including fields that this version does not know."""
        path = layout.join(checkpoint.directory, layout.MANIFEST)

        def read() -> bytes:
            try:
                data = self.run.read(path, manifest.MAX_BYTES + 1)
            except NOT_READABLE as error:
                raise CheckpointRemovedError(self.run.url_of(checkpoint.directory)) from error
            record = manifest.decode(data, path)
            if record.xxh3 != checkpoint.manifest.xxh3:
                found, expected = f"{record.xxh3:016x}", f"{checkpoint.manifest.xxh3:016x}, as when it was listed"
                raise CorruptCheckpointError(path, "its checksum", found=found, expected=expected)
            return data

        return read_twice(self.run, path, read)

    def _begin(self, directory: str, record: Manifest, data: bytes) -> None:
        first = intent_of(record)
        path, manifest_path = (layout.join(directory, each) for each in (layout.INTENT, layout.MANIFEST))
        with suppress(FileExistsError):
            self.to.make_dir(directory)
        try:
            self.to.put_if_absent(path, first)
        except FileExistsError:
            if self.to.read(path, _FIRST_BYTES) != first:
                raise self._in_its_place(directory) from None
        self.hold.check()  # either a later pass sees this directory, or this pass stops here
        if has_manifest(self.to, directory) and self.to.read(manifest_path, manifest.MAX_BYTES + 1) != data:
            try:
                manifest.decode(self.to.read(manifest_path, manifest.MAX_BYTES + 1), manifest_path)
            except CorruptCheckpointError:
                self.to.remove(manifest_path)  # readers skip this manifest as damaged
                self.to.sync_dir(directory)
            else:
                raise self._in_its_place(directory)

    def _in_its_place(self, directory: str) -> RecckptError:
        return RecckptError(
            f"{self.to.url_of(directory)}: found a different save than in {self.run.url_of(directory)}, expected the "
            "same one: this is a mirror of another run; mirror to another output dir"
        )

    def _copy_file(
        self, checkpoint: Checkpoint, files: OpenFiles, parts: Mapping[str, Part], advance: Advance, entry: FileEntry
    ) -> None:
        path = layout.join(checkpoint.directory, entry.name)

        def read() -> memoryview:
            data = mapped(files, path)
            _check(data, files, checkpoint, entry, parts)
            return data

        data = read_twice(files, path, read)
        with self.to.draft(path) as sink:
            for begin in range(0, len(data), _STEP_BYTES):
                piece = data[begin : begin + _STEP_BYTES]
                sink.write(piece)
                advance(len(piece))

    def _commit(self, checkpoint: Checkpoint, data: bytes) -> None:
        """Put the manifest, after all files are there, durable and with their sizes."""
        directory, record = checkpoint.directory, checkpoint.manifest
        if not has_manifest(self.run, directory):  # removed, for example to forget ids: then nobody may get a copy
            raise CheckpointRemovedError(self.run.url_of(directory))
        for entry in self.missing(checkpoint):
            size = self.to.size(layout.join(directory, entry.name))
            if size != entry.n_bytes:
                problem = f"found {size} bytes, {entry.n_bytes} were written; check the storage"
                raise OSError(errno.EIO, problem, self.to.url_of(layout.join(directory, entry.name)))
        for subdirectory in layout.subdirectories(entry.name for entry in record.files):
            self.to.sync_dir(layout.join(directory, subdirectory))
        self.hold.check()
        path = layout.join(directory, layout.MANIFEST)
        with suppress(FileExistsError):  # if only other files were missing, the same manifest is there already
            self.to.put_if_absent(path, data)
        self.to.sync_dir("")
        try:
            self.hold.check()
        except RecckptError:
            if directory in list_checkpoints(self.to).damaged:  # the other pass has removed files as a leftover
                self.to.remove(path)
            raise


def _check(
    data: memoryview, files: OpenFiles, checkpoint: Checkpoint, entry: FileEntry, parts: Mapping[str, Part]
) -> None:
    path = layout.join(checkpoint.directory, entry.name)
    if len(data) != entry.n_bytes:
        raise CorruptCheckpointError(path, "its size", found=f"{len(data)} bytes", expected=f"{entry.n_bytes} bytes")
    if not layout.is_part(entry.name):
        digest = xxhash.xxh3_64_intdigest(data)
        if digest != entry.xxh3:
            expected = f"{entry.xxh3 or 0:016x}"
            raise CorruptCheckpointError(path, "its checksum", found=f"{digest:016x}", expected=expected)
        return
    from recckpt.sparse.files.verifier import check_bytes  # late, because it imports pyarrow, which takes long

    part = parts.get(entry.name)
    if part is None:
        raise CorruptCheckpointError(path, "", found="a part that no catalog has", expected="one of a catalog")
    for error in check_bytes(data, files, checkpoint.directory, checkpoint.manifest.tables, part).errors:
        raise error


def copy_informative(run: Storage, to: Storage) -> None:
    """Update the timeline, the audit of forgotten ids, and the audit's key from the run."""
    for name in (layout.TIMELINE, layout.FORGOTTEN, layout.FORGET_KEY):
        data = _content(run, name)
        if data is not None:
            replace_other(to, name, data)
        elif name == layout.FORGET_KEY and _content(to, name) is not None:
            to.remove(name)  # without the key, nobody can test ids against the audit


def copy_pins(run: Storage, to: Storage, ckpt_ids: Collection[str]) -> None:
    pinned, there = pinned_ids(run).intersection(ckpt_ids), pinned_ids(to)
    if pinned - there:
        make_own_dir(to, layout.PINS_DIR)
    for ckpt_id in pinned - there:
        with suppress(FileExistsError):
            to.put_if_absent(layout.pin(ckpt_id), _PINNED)
    for ckpt_id in there - pinned:
        if _content(to, layout.pin(ckpt_id)) == _PINNED:
            to.remove(layout.pin(ckpt_id))


def mark_forgotten(to: Storage, requests: Iterable[str]) -> None:
    """Note in the mirror that requests of the run were carried out, for processes that restored from the mirror."""
    requests = list(requests)
    if requests:
        make_own_dir(to, layout.FORGET_DIR)
    for request in requests:
        with suppress(FileExistsError):
            to.put_if_absent(layout.forget_request(request, is_done=True), b"{}\n")


def replace_other(to: Storage, name: str, data: bytes) -> None:
    if _content(to, name) != data:
        directory = name.rpartition("/")[0]
        if directory:
            make_own_dir(to, directory)
        to.replace(name, data)


def _content(storage: Storage, name: str) -> bytes | None:
    try:
        return storage.read(name, _MOST_BYTES)
    except ABSENT:
        return None
