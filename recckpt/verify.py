"""Is a checkpoint whole? Looks at everything and reports all that is wrong (no torch here)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import xxhash

from recckpt import layout
from recckpt.checked import read_checked
from recckpt.dense.torch_file import TorchFile
from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.listing import file_problems, locate_path, read_manifest
from recckpt.manifest import FileEntry, Manifest
from recckpt.progress import Progress
from recckpt.sparse import catalog as catalogs
from recckpt.sparse.catalog import Catalog
from recckpt.sparse.verifier import ShardVerifier, repeated_between_shards
from recckpt.storage import Storage, open_parent, open_storage

_CHUNK_BYTES = 8 << 20

Errors = Iterator[CorruptCheckpointError]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a checkpoint.

    Attributes:
        directory: of the checkpoint, in its output dir.
        file: the file, as named under the output dir.
        where: the place in it, or "".
        found: what is there.
        expected: what should be there.
    """

    directory: str
    file: str
    where: str
    found: str
    expected: str

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        return f"{self.file}{place}: found {self.found}, expected {self.expected}"


@dataclass(frozen=True)
class Report:
    """What came of looking at one checkpoint.

    Attributes:
        directory: of the checkpoint, in its output dir.
        manifest: None where it cannot be read.
        problems: all that is wrong, in the order of the files.
    """

    directory: str
    manifest: Manifest | None
    problems: tuple[Problem, ...]


def verify(path: str, *, deep: bool = True) -> list[Problem]:
    """Look for damage in a checkpoint, or in all checkpoints of an output dir.

    Deep reads every byte: the checksums of all files, columns and Arrow frames, and for each table that its
    ids are where the catalogs say, that none is there twice, and that its rows add up.

    Args:
        path: a checkpoint or an output dir; any fsspec URL.
        deep: False looks at the manifests and the sizes of the files only.

    Returns:
        All problems, not only the first; empty where everything is well.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, damaged or not.
    """
    storage, directories = find_checkpoints(path)
    return [problem for name in directories for problem in verify_checkpoint(storage, name, deep=deep).problems]


def find_checkpoints(path: str) -> tuple[Storage, list[str]]:
    """Return the directories with a manifest: the one that ``path`` is, or those that lie in it.

    Raises:
        CheckpointNotFoundError: there is none.
    """
    storage, directory = open_parent(path)
    if _has_manifest(storage, directory):
        return storage, [directory]
    inside = open_storage(path)
    directories = sorted(name for name in inside.list_dirs() if _has_manifest(inside, name))
    if directories:
        return inside, directories
    storage, checkpoint = locate_path(path)  # an id that lives in a later attempt's directory
    return storage, [checkpoint.directory]


def verify_checkpoint(storage: Storage, directory: str, *, deep: bool = True) -> Report:
    """Look for damage in one checkpoint; arguments as of :func:`verify`.

    Raises:
        CheckpointNotFoundError: the directory has no manifest.
    """
    path = layout.join(directory, layout.MANIFEST)
    try:
        manifest = read_manifest(storage, directory)
    except CorruptCheckpointError as error:
        return Report(directory, None, (_problem(directory, error),))
    except FormatVersionError as error:
        newer = Problem(directory, path, "version", str(error.found), f"at most {error.supported}")
        return Report(directory, None, (newer,))
    if manifest is None:
        raise CheckpointNotFoundError(f"{storage.url}/{directory}: found no {layout.MANIFEST}")
    errors = list(file_problems(storage, directory, manifest))
    if deep:
        errors += _Deep(storage, directory, manifest, {error.path for error in errors}).errors()
    return Report(directory, manifest, tuple(_problem(directory, error) for error in errors))


class _Deep:
    """Reads all of one checkpoint, but the files that are known to be broken."""

    def __init__(self, storage: Storage, directory: str, manifest: Manifest, broken: set[str]) -> None:
        self._storage, self._directory, self._manifest = storage, directory, manifest
        self._broken = broken
        self._shards: list[Catalog] = []

    def errors(self) -> list[CorruptCheckpointError]:
        """Return all that is wrong."""
        with Progress(f"verifying {self._manifest.ckpt_id}", self._manifest.n_bytes) as progress:
            progress.n_rows = sum(table.rows for table in self._manifest.tables)
            errors = [error for file in self._manifest.files for error in self._check_file(file, progress.advance)]
            for number in range(len(self._manifest.shards)):
                errors += self._read_catalog(number, progress.advance)
            if len(self._shards) == len(self._manifest.shards):
                errors += self._check_sums()
            for shard in self._shards:
                errors += self._check_shard(shard, progress.advance)
            with suppress(CorruptCheckpointError):  # what cannot be read has been reported above
                errors.extend(repeated_between_shards(self._storage, self._directory, self._manifest, self._shards))
        return errors

    def _path(self, name: str) -> str:
        return layout.join(self._directory, name)

    def _check_file(self, file: FileEntry, advance: Callable[[int], object]) -> Errors:
        """Check a whole file; parts and catalogs are read elsewhere."""
        path = self._path(file.name)
        if path in self._broken or layout.is_part(file.name) or self._is_catalog(file.name):
            return
        digest = xxhash.xxh3_64()
        with self._storage.open(path) as content:
            while chunk := content.read(_CHUNK_BYTES):
                digest.update(chunk)
                advance(len(chunk))
            found = digest.intdigest()
            if found != file.xxh3:
                yield CorruptCheckpointError(path, "its checksum", found=f"{found:016x}", expected=f"{file.xxh3:016x}")
            elif file.name == layout.MODEL:
                try:
                    TorchFile(content, path)
                except CorruptCheckpointError as error:
                    yield error

    def _is_catalog(self, name: str) -> bool:
        return any(name == shard.catalog for shard in self._manifest.shards)

    def _read_catalog(self, number: int, advance: Callable[[int], object]) -> Errors:
        shard = self._manifest.shards[number]
        path, entry = self._path(shard.catalog), self._manifest.file(shard.catalog)
        if path in self._broken or entry is None:
            return
        try:
            data = read_checked(self._storage, self._directory, entry)
            advance(len(data))
            catalog = catalogs.decode(data, path, self._manifest, number)
        except CorruptCheckpointError as error:
            yield error
            return
        except FormatVersionError as error:
            yield CorruptCheckpointError(path, "version", found=error.found, expected=f"at most {error.supported}")
            return
        self._shards.append(catalog)
        if catalog.buckets != shard.buckets:
            found, expected = f"batches of buckets {list(catalog.buckets)}", f"{list(shard.buckets)}, by the manifest"
            yield CorruptCheckpointError(path, "", found=found, expected=expected)

    def _check_sums(self) -> Errors:
        """Check that the catalogs together make up the manifest."""
        manifest = self._path(layout.MANIFEST)
        for table in self._manifest.tables:
            rows = sum(shard.rows.get(table.name, 0) for shard in self._shards)
            if rows != table.rows:
                where, expected = f"table {table.name!r}", f"{rows}, as in the catalogs"
                yield CorruptCheckpointError(manifest, where, found=f"{table.rows} rows", expected=expected)
        parts = [part.file for shard in self._shards for part in shard.parts]
        for file in self._manifest.files:
            times = parts.count(file.name)
            if layout.is_part(file.name) and times != 1:
                where = f"file {file.name!r}"
                yield CorruptCheckpointError(manifest, where, found=f"in {times} catalogs", expected="in one catalog")

    def _check_shard(self, shard: Catalog, advance: Callable[[int], object]) -> Errors:
        verifier = ShardVerifier(self._storage, self._directory, self._manifest)
        for part in shard.parts:
            if self._path(part.file) not in self._broken:
                yield from verifier.check(part, advance)


def _has_manifest(storage: Storage, directory: str) -> bool:
    try:
        storage.size(layout.join(directory, layout.MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _problem(directory: str, error: CorruptCheckpointError) -> Problem:
    return Problem(directory, error.path, error.where, error.found, error.expected)
