"""Checks one checkpoint in steps; the jobs of a step may run in parallel."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from recckpt.checkpoint.chain import OpenLink, files_of
from recckpt.dense.tensors import check_file, read_index, tensors_of
from recckpt.dense.torch_archive import check_loadable
from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.format import catalog as catalogs
from recckpt.format import layout
from recckpt.format.catalog import Catalog
from recckpt.format.codec import parse
from recckpt.format.manifest import FileEntry, Manifest
from recckpt.format.tables import TableEntry
from recckpt.format.tensor_index import TensorIndex
from recckpt.output_dir.checkpoint_dir import file_problems, intent_of, read_checked, read_manifest
from recckpt.output_dir.listing import Checkpoint
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.catalogs import count_errors, shard_errors
from recckpt.sparse.files.table_reader import TableReader
from recckpt.sparse.files.verifier import PartCheck, VerifyTask, between_parts
from recckpt.storage import ABSENT, NOT_READABLE, NotPlainError, Storage, missing
from recckpt.storage.retry import check_twice

log = logging.getLogger("recckpt")

_FIRST_BYTES = 1 << 16  # more than the first file can have
_UNLISTED = {layout.MANIFEST, layout.INTENT, layout.OFFER_JSON}

Errors = Iterator[CorruptCheckpointError]
Job = Callable[[], Iterable[CorruptCheckpointError]]
Advance = Callable[[int], object]


class Checkup:
    """Checks manifest and sizes when created, and the rest in steps; each step needs all results of the step before.

    The steps: :meth:`check_files`, :meth:`part_tasks` with :meth:`take_parts`, :meth:`check_ids`; :func:`run_step` runs
    their jobs. ``manifest`` is None if it cannot be read. Checks a delta's own files, not its bases.
    """

    def __init__(self, storage: Storage, directory: str) -> None:
        self._storage, self.directory = storage, directory
        self.manifest: Manifest | None = None
        self.errors: list[CorruptCheckpointError] = []
        self._shards: dict[int, Catalog] = {}
        self._indexes: dict[int, TensorIndex] = {}
        self._indexed: dict[int, list[str]] = {}  # shard -> its index, and its files with dense tensors
        path = self._path(layout.MANIFEST)
        try:
            self.manifest = read_manifest(storage, directory)
        except (CorruptCheckpointError, FormatVersionError, OSError) as error:  # other checkpoints are still checked
            self.errors.append(as_damage(error, path, "a manifest"))
        if self.manifest:
            self.errors += self._check_first_file()
            self.errors += file_problems(storage, directory, self.manifest.files)
            shards = len(self.manifest.shards)
            for number in range(shards):
                names = (layout.dense_index(number, shards), layout.dense_data(number, shards), layout.MODEL)
                own = [name for name in names[: 2 if number else 3] if self.manifest.file(name)]
                if names[0] in own:
                    self._indexed[number] = own
        elif not self.errors:
            self.errors.append(CorruptCheckpointError(path, "", found="no such file", expected="a manifest"))
        self._broken = {error.path for error in self.errors}

    @property
    def record(self) -> Manifest:
        """The manifest, known in all steps."""
        assert self.manifest is not None
        return self.manifest

    @property
    def catalogs(self) -> list[Catalog]:
        return [self._shards[number] for number in sorted(self._shards)]

    def check_files(self, advance: Advance) -> Iterator[Job]:
        """Check all files except the parts, each as a whole."""
        if log.isEnabledFor(logging.DEBUG):
            for name in self._storage.list_files(self.directory):
                if name not in _UNLISTED and self.record.file(name) is None:
                    log.debug("%s is not listed in the manifest, and ignored", self._path(name))
        catalogs_of = {shard.catalog: number for number, shard in enumerate(self.record.shards)}
        elsewhere = {*catalogs_of, *(name for names in self._indexed.values() for name in names)}
        jobs: list[tuple[str, Job]] = [
            (file.name, partial(self._check_file, file, advance))
            for file in self.record.files
            if file.name not in elsewhere and not layout.is_part(file.name)
        ]
        jobs += [(name, partial(self._read_catalog, number, advance)) for name, number in catalogs_of.items()]
        jobs += [(names[0], partial(self._check_indexed, number, advance)) for number, names in self._indexed.items()]
        for name, job in jobs:
            if self._path(name) not in self._broken:
                yield partial(_read, self._path(name), job)

    def part_tasks(self) -> Iterator[VerifyTask]:
        """Check that the catalogs agree with the manifest; yield a task for each part they name."""
        if len(self._shards) == len(self.record.shards):
            self.errors += count_errors(self.directory, self.record, self.catalogs)
            n_catalogs = Counter(part.file for shard in self.catalogs for part in shard.parts)
            for file in self.record.files:
                if layout.is_part(file.name) and n_catalogs[file.name] != 1:
                    where, found = f"file {file.name!r}", f"in {n_catalogs[file.name]} catalogs"
                    path, expected = self._path(layout.MANIFEST), "in one catalog"
                    self.errors.append(CorruptCheckpointError(path, where, found=found, expected=expected))
        for part in (part for shard in self.catalogs for part in shard.parts):
            if self._path(part.file) not in self._broken:
                tables = tuple(table for name in part.tables if (table := self.record.table(name)))
                yield VerifyTask(self._storage.url, self.directory, tables, part)

    def take_parts(self, checks: Iterable[PartCheck]) -> None:
        """Add the results of the tasks; check that each table continues across parts as they declare."""
        parts = {check.path: check for check in checks}
        for check in parts.values():
            self.errors += check.errors
        for shard in self.catalogs:
            paths = [self._path(part.file) for part in shard.parts]
            self.errors += between_parts(parts[path] for path in paths if path in parts)

    def check_ids(self, _: Advance) -> Iterator[Job]:
        """Check across files that no id and no chunk of a tensor occurs twice."""
        if len(self._indexes) == len(self._indexed):
            yield partial(_read, self._path(layout.DENSE_DIR), self._check_tensors)
        for table in self.record.tables:
            yield partial(self._check_table, table)

    def link(self) -> OpenLink:
        checkpoint = Checkpoint(self.directory, self.record)
        return OpenLink(checkpoint, files_of(self._storage, checkpoint), self.catalogs)

    def _path(self, name: str) -> str:
        return layout.join(self.directory, name)

    def _check_first_file(self) -> Errors:
        """Check ``INTENT``, which the manifest does not list: it must agree with the manifest."""
        path, expected = self._path(layout.INTENT), f"that of save {self.record.save_id}, as in {layout.MANIFEST}"
        try:
            data = self._storage.read(path, _FIRST_BYTES)
        except ABSENT:  # a copy without it is still a checkpoint
            return
        except NotPlainError as error:
            yield missing(path, error, expected)
        except OSError as error:
            yield as_damage(error, path, expected)
        else:
            if data != intent_of(self.record):
                found = f"{data[:60]!r}"
                with suppress(CorruptCheckpointError):
                    found = f"that of save {parse(data, path).values.get('save_id')}"
                yield CorruptCheckpointError(path, "", found=found, expected=expected)

    def _check_file(self, file: FileEntry, advance: Advance, index: TensorIndex | None = None) -> Errors:
        counted: list[int] = []  # so that a file read twice advances the progress only once

        def count(n_bytes: int) -> None:
            if sum(counted) < file.n_bytes:
                counted.append(n_bytes)
                advance(n_bytes)

        def check() -> list[CorruptCheckpointError]:
            errors = list(check_file(self._storage, self.directory, file, index=index, advance=count))
            if not errors and layout.is_torch_file(file.name):
                try:
                    with self._storage.open(path) as content:
                        check_loadable(content, path)
                except CorruptCheckpointError as error:
                    errors.append(error)
            return errors

        path = self._path(file.name)
        yield from check_twice(self._storage, path, check, list)

    def _check_indexed(self, number: int, advance: Advance) -> Errors:
        """Check an index and the tensors it lists; for a damaged index, check only the checksums of whole files."""
        index = None
        try:
            index = read_index(self._storage, self.directory, self.record, number)
            assert index is not None  # the manifest lists it
            self._indexes[number] = index
        except (FormatVersionError, CorruptCheckpointError) as error:
            yield as_damage(error, self._path(self._indexed[number][0]), "an index")
        for name in self._indexed[number][1:]:
            file = self.record.file(name)
            if file is not None and self._path(name) not in self._broken:
                yield from _read(self._path(name), partial(self._check_file, file, advance, index))

    def _read_catalog(self, number: int, advance: Advance) -> Errors:
        shard = self.record.shards[number]
        path, entry = self._path(shard.catalog), self.record.file(shard.catalog)
        assert entry is not None  # the check of the manifest guarantees this
        data = read_checked(self._storage, self.directory, entry, catalogs.MAX_BYTES)
        advance(len(data))
        try:
            catalog = self._shards[number] = catalogs.decode(data, path, self.record, number)
        except FormatVersionError as error:
            yield as_damage(error, path, "")
            return
        yield from shard_errors(self.directory, catalog, shard)

    def _check_tensors(self) -> Errors:
        tensors_of(self.directory, [self._indexes[number] for number in sorted(self._indexes)])
        yield from ()

    def _check_table(self, table: TableEntry) -> Errors:
        with suppress(CorruptCheckpointError, OSError):  # unreadable files have been reported already
            yield from TableReader(self._storage, self.directory, self.catalogs, table, ()).repeats()


def run_step(
    step: Callable[[Checkup, Advance], Iterable[Job]], looks: Sequence[Checkup], threads: int, advance: Advance
) -> None:
    jobs = [(look, job) for look in looks for job in step(look, advance)]
    for (look, _), errors in zip(jobs, run_all(lambda pair: list(pair[1]()), jobs, threads), strict=True):
        look.errors.extend(errors)


def _read(path: str, check: Job) -> Errors:
    """Run a check; a file that cannot be read is reported as damage."""
    try:
        yield from check()
    except CorruptCheckpointError as error:
        yield error
    except NOT_READABLE as error:
        yield missing(path, error, "a file that can be read")
    except OSError as error:
        yield as_damage(error, path, "a file that can be read")


def as_damage(error: Exception, path: str, expected: str) -> CorruptCheckpointError:
    """Turn a newer format or a read error of the storage into a CorruptCheckpointError."""
    if isinstance(error, CorruptCheckpointError):
        return error
    if isinstance(error, FormatVersionError):
        found = (
            f"{error.found}, which needs {error.needed}"
            if error.state == "newer"
            else "one of an older, unreleased form"
        )
        return CorruptCheckpointError(error.path, "version", found=found, expected=f"at most {error.supported}")
    return CorruptCheckpointError(path, "", found=f"an error: {error}", expected=expected)
