"""Is a checkpoint whole? Looks at everything and reports all that is wrong (no torch here)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import xxhash

from recckpt import layout
from recckpt.background import run_all
from recckpt.checked import read_checked
from recckpt.dense.torch_file import TorchFile
from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.listing import file_problems, locate_path, read_manifest
from recckpt.manifest import FileEntry, Manifest, TableEntry
from recckpt.progress import Progress
from recckpt.sparse import catalog as catalogs
from recckpt.sparse.catalog import Catalog, Part
from recckpt.sparse.verifier import PartCheck, between_parts, check_part, repeated_between_shards
from recckpt.storage import Storage, open_parent, open_storage

_CHUNK_BYTES = 8 << 20
_THREADS = 8

Errors = Iterator[CorruptCheckpointError]
Job = Callable[[], Iterable[CorruptCheckpointError]]
Advance = Callable[[int], object]


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


def verify(path: str, *, deep: bool = True, threads: int | None = None) -> list[Problem]:
    """Look for damage in a checkpoint, or in all checkpoints of an output dir.

    Deep reads every byte: the checksums of all files, columns and Arrow frames, and for each table that its
    ids are where the catalogs say, that none is there twice, and that its rows add up.

    Args:
        path: a checkpoint or an output dir; any fsspec URL.
        deep: False looks at the manifests and the sizes of the files only.
        threads: number of files that are read at once; None for 8. Locally it is one a core at most.

    Returns:
        All problems, not only the first, in the order of checkpoints and files; empty where everything is well.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, damaged or not.
        ValueError: ``threads`` is not an int of at least 1.
    """
    storage, directories = find_checkpoints(path)
    reports = verify_checkpoints(storage, directories, deep=deep, threads=threads)
    return [problem for report in reports for problem in report.problems]


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


def verify_checkpoints(
    storage: Storage, directories: Sequence[str], *, deep: bool = True, threads: int | None = None
) -> list[Report]:
    """Look for damage in some checkpoints of one output dir; arguments as of :func:`verify`.

    A checkpoint that is removed meanwhile, as rotation does, has no report.

    Raises:
        CheckpointNotFoundError: there is none left.
    """
    if threads is not None and (type(threads) is not int or threads < 1):
        raise ValueError(f"threads is an int of at least 1, found {threads!r}")
    n_threads = storage.threads(threads or _THREADS)
    looks = run_all(lambda name: _Look(storage, name), directories, n_threads)
    if deep:
        _look_deep([look for look in looks if look.manifest], n_threads)
    reports = [look.report() for look in looks if not look.errors or _has_manifest(storage, look.directory)]
    if not reports:
        raise CheckpointNotFoundError(f"{storage.url}: found no {layout.MANIFEST} in {', '.join(directories)}")
    return reports


def _look_deep(looks: Sequence[_Look], threads: int) -> None:
    """Read everything, a file a thread."""
    manifests = [look.manifest for look in looks if look.manifest]
    what = manifests[0].ckpt_id if len(manifests) == 1 else f"{len(manifests)} checkpoints"
    with Progress(f"verifying {what}", sum(manifest.n_bytes for manifest in manifests)) as progress:
        progress.n_rows = sum(table.rows for manifest in manifests for table in manifest.tables)
        for step in (_Look.check_files, _Look.check_parts, _Look.check_ids):
            jobs = [(look, job) for look in looks for job in step(look, progress.advance)]
            for (look, _), errors in zip(jobs, run_all(lambda pair: list(pair[1]()), jobs, threads), strict=True):
                look.errors += errors


class _Look:
    """One checkpoint, and what has been found in it so far; looks at manifest and sizes when it is made.

    The steps are to be taken in order, each once the one before is through. They return jobs that may run at once.
    """

    def __init__(self, storage: Storage, directory: str) -> None:
        self._storage, self.directory = storage, directory
        self.manifest: Manifest | None = None
        self.errors: list[CorruptCheckpointError] = []
        self._shards: dict[int, Catalog] = {}
        path = self._path(layout.MANIFEST)
        try:
            self.manifest = read_manifest(storage, directory)
        except CorruptCheckpointError as error:
            self.errors.append(error)
        except FormatVersionError as error:
            self.errors.append(_newer(path, error))
        if self.manifest:
            self.errors += file_problems(storage, directory, self.manifest)
        elif not self.errors:
            self.errors.append(CorruptCheckpointError(path, "", found="no such file", expected="a manifest"))
        self._broken = {error.path for error in self.errors}

    def report(self) -> Report:
        """Return what was found."""
        problems = (Problem(self.directory, e.path, e.where, e.found, e.expected) for e in self.errors)
        return Report(self.directory, self.manifest, tuple(problems))

    def check_files(self, advance: Advance) -> Iterator[Job]:
        """Check whole files: all but the parts."""
        assert self.manifest is not None
        numbers = {shard.catalog: number for number, shard in enumerate(self.manifest.shards)}
        for file in self.manifest.files:
            path = self._path(file.name)
            if path not in self._broken and file.name not in numbers and not layout.is_part(file.name):
                yield partial(_read, path, partial(self._check_file, file, advance))
        for name, number in numbers.items():
            if self._path(name) not in self._broken:
                yield partial(_read, self._path(name), partial(self._read_catalog, number, advance))

    def check_parts(self, advance: Advance) -> Iterator[Job]:
        """Check the parts that the catalogs name."""
        assert self.manifest is not None
        if len(self._shards) == len(self.manifest.shards):
            self.errors += self._sum_errors(self.manifest)
        self._parts: dict[str, PartCheck] = {}
        for shard in self._catalogs():
            for part in shard.parts:
                if self._path(part.file) not in self._broken:
                    yield partial(_read, self._path(part.file), partial(self._check_part, part, advance))

    def check_ids(self, _: Advance) -> Iterator[Job]:
        """Check what only several files together can tell: that no id is there twice."""
        assert self.manifest is not None
        for shard in self._catalogs():
            self.errors += between_parts(self._parts[p.file] for p in shard.parts if p.file in self._parts)
        for table in self.manifest.tables:
            yield partial(self._check_table, table)

    def _path(self, name: str) -> str:
        return layout.join(self.directory, name)

    def _catalogs(self) -> list[Catalog]:
        return [self._shards[number] for number in sorted(self._shards)]

    def _check_file(self, file: FileEntry, advance: Advance) -> Errors:
        path, digest = self._path(file.name), xxhash.xxh3_64()
        with self._storage.open(path) as content:
            while chunk := content.read(_CHUNK_BYTES):
                digest.update(chunk)
                advance(len(chunk))
            found = digest.intdigest()
            if found != file.xxh3:
                yield CorruptCheckpointError(path, "its checksum", found=f"{found:016x}", expected=f"{file.xxh3:016x}")
            elif file.name == layout.MODEL:
                TorchFile(content, path)

    def _read_catalog(self, number: int, advance: Advance) -> Errors:
        assert self.manifest is not None
        shard = self.manifest.shards[number]
        path, entry = self._path(shard.catalog), self.manifest.file(shard.catalog)
        assert entry is not None  # the manifest was checked for that
        data = read_checked(self._storage, self.directory, entry)
        advance(len(data))
        try:
            catalog = self._shards[number] = catalogs.decode(data, path, self.manifest, number)
        except FormatVersionError as error:
            yield _newer(path, error)
            return
        if catalog.buckets != shard.buckets:
            found, expected = f"batches of buckets {list(catalog.buckets)}", f"{list(shard.buckets)}, by the manifest"
            yield CorruptCheckpointError(path, "", found=found, expected=expected)

    def _sum_errors(self, manifest: Manifest) -> Errors:
        """Check that the catalogs together make up the manifest."""
        path = self._path(layout.MANIFEST)
        for table in manifest.tables:
            rows = sum(shard.rows.get(table.name, 0) for shard in self._catalogs())
            if rows != table.rows:
                where, expected = f"table {table.name!r}", f"{rows}, as in the catalogs"
                yield CorruptCheckpointError(path, where, found=f"{table.rows} rows", expected=expected)
        parts = Counter(part.file for shard in self._catalogs() for part in shard.parts)
        for file in manifest.files:
            if layout.is_part(file.name) and parts[file.name] != 1:
                where, found = f"file {file.name!r}", f"in {parts[file.name]} catalogs"
                yield CorruptCheckpointError(path, where, found=found, expected="in one catalog")

    def _check_part(self, part: Part, advance: Advance) -> Errors:
        assert self.manifest is not None
        checked = check_part(self._storage, self.directory, self.manifest, part, advance)
        self._parts[part.file] = checked
        yield from checked.errors

    def _check_table(self, table: TableEntry) -> Errors:
        with suppress(CorruptCheckpointError, OSError):  # what cannot be read has been reported already
            yield from repeated_between_shards(self._storage, self.directory, table, self._catalogs())


def _read(path: str, check: Job) -> Errors:
    """Run a check; a file that cannot be read is as bad as one that is wrong."""
    try:
        yield from check()
    except CorruptCheckpointError as error:
        yield error
    except FileNotFoundError:
        yield CorruptCheckpointError(path, "", found="no such file", expected="one that can be read")
    except OSError as error:
        yield CorruptCheckpointError(path, "", found=f"an error: {error}", expected="a file that can be read")


def _newer(path: str, error: FormatVersionError) -> CorruptCheckpointError:
    return CorruptCheckpointError(path, "version", found=error.found, expected=f"at most {error.supported}")


def _has_manifest(storage: Storage, directory: str) -> bool:
    try:
        storage.size(layout.join(directory, layout.MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
