"""All that can be wrong with one checkpoint, checked in steps of jobs that may run at once (no torch here)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial

from recckpt.checkpoint.link import OpenLink, files_of
from recckpt.dense.file_check import check_file, check_loadable
from recckpt.dense.tensors import read_index, tensors_of
from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.format import catalog as catalogs
from recckpt.format import layout
from recckpt.format.catalog import Catalog
from recckpt.format.json_fields import parse
from recckpt.format.manifest import FileEntry, Manifest
from recckpt.format.tables import TableEntry
from recckpt.format.tensor_index import TensorIndex
from recckpt.output_dir.checkpoint_dir import file_problems, first_file, read_checked, read_manifest
from recckpt.output_dir.listing import Checkpoint
from recckpt.sparse.files.catalogs import count_errors, shard_errors
from recckpt.sparse.files.id_check import repeated_between_shards
from recckpt.sparse.files.verifier import PartCheck, VerifyTask, between_parts, check_part
from recckpt.storage import ABSENT, NOT_READABLE, NotPlainError, Storage, missing
from recckpt.storage.read_again import check_twice

log = logging.getLogger("recckpt")

_FIRST_BYTES = 1 << 16  # more than the first file has
_UNLISTED = {layout.MANIFEST, layout.INTENT, layout.OFFER, layout.OFFER_JSON}

Errors = Iterator[CorruptCheckpointError]
Job = Callable[[], Iterable[CorruptCheckpointError]]
Advance = Callable[[int], object]


class Checkup:
    """Checks manifest and sizes when it is made, and the rest in steps.

    The steps are taken in order, each after all jobs of the one before. A job returns what it finds, and who runs it
    passes that to :meth:`add`. ``manifest`` is None where it cannot be read. Of a delta, this is of its own files.
    """

    def __init__(self, storage: Storage, directory: str) -> None:
        self._storage, self.directory = storage, directory
        self.manifest: Manifest | None = None
        self.errors: list[CorruptCheckpointError] = []
        self.absent_deletes = 0  # ids that it deletes and that are not there, once its chain has been counted
        self._shards: dict[int, Catalog] = {}
        self._indexes: dict[int, TensorIndex] = {}
        path = self._path(layout.MANIFEST)
        try:
            self.manifest = read_manifest(storage, directory)
        except CorruptCheckpointError as error:
            self.errors.append(error)
        except FormatVersionError as error:
            self.errors.append(newer(error))
        except OSError as error:  # one that cannot be read does not keep the others from being looked at
            self.errors.append(unreadable(path, error, "a manifest"))
        if self.manifest:
            self.errors += self._check_first_file()
            self.errors += file_problems(storage, directory, self.manifest)
        elif not self.errors:
            self.errors.append(CorruptCheckpointError(path, "", found="no such file", expected="a manifest"))
        self._broken = {error.path for error in self.errors}

    @property
    def _record(self) -> Manifest:
        """The manifest, which can be read where a step is taken."""
        assert self.manifest is not None
        return self.manifest

    def add(self, errors: Iterable[CorruptCheckpointError]) -> None:
        """Add what is wrong with it."""
        self.errors += errors

    def add_absent_deletes(self, n_ids: int) -> None:
        """Count ids that it deletes and that are not there."""
        self.absent_deletes += n_ids

    def check_files(self, advance: Advance) -> Iterator[Job]:
        """Check whole files: all but the parts."""
        self._log_unlisted()
        numbers = {shard.catalog: number for number, shard in enumerate(self._record.shards)}
        indexed = {name for number in self._with_index for name in self._files_of_index(number)}
        for file in self._record.files:
            path = self._path(file.name)
            elsewhere = file.name in numbers or layout.is_part(file.name) or file.name in indexed
            if path not in self._broken and not elsewhere:
                yield partial(_read, path, partial(self._check_file, file, advance))
        for name, number in numbers.items():
            if self._path(name) not in self._broken:
                yield partial(_read, self._path(name), partial(self._read_catalog, number, advance))
        for number in self._with_index:
            path = self._path(self._files_of_index(number)[0])
            if path not in self._broken:
                yield partial(_read, path, partial(self._check_indexed, number, advance))

    def part_tasks(self) -> Iterator[VerifyTask]:
        """Check what the catalogs add up to; yield a task for each part that they name, and take what it finds."""
        if len(self._shards) == len(self._record.shards):
            self.errors += self._sum_errors()
        self._parts: dict[str, PartCheck] = {}
        for part in (part for shard in self._catalogs() for part in shard.parts):
            if self._path(part.file) not in self._broken:
                tables = tuple(table for name in part.tables if (table := self._record.table(name)))
                yield VerifyTask(self._storage.url, self.directory, tables, part)

    def check_part(self, task: VerifyTask, advance: Advance) -> PartCheck:
        """Do a task of this checkpoint."""
        return check_part(
            self._storage, self.directory, task.tables, task.part, lambda batch, values: advance(values.nbytes)
        )

    def take_part(self, task: VerifyTask, checked: PartCheck) -> None:
        """Take what came of a task."""
        self._parts[task.part.file] = checked
        self.errors += checked.errors

    def check_ids(self, _: Advance) -> Iterator[Job]:
        """Check what only several files together can show: that no id occurs twice."""
        for shard in self._catalogs():
            self.errors += between_parts(self._parts[p.file] for p in shard.parts if p.file in self._parts)
        if len(self._indexes) == len(self._with_index):
            yield partial(_read, self._path(layout.DENSE_DIR), self._check_tensors)
        for table in self._record.tables:
            yield partial(self._check_table, table)

    @property
    def tables(self) -> tuple[TableEntry, ...]:
        """The tables, by the manifest."""
        return self._record.tables

    @property
    def place(self) -> tuple[int, int]:
        """Its place in the order of commits."""
        return self._record.place

    def link(self) -> OpenLink:
        """Return it as a link of chains; its catalogs are whole."""
        checkpoint = Checkpoint(self.directory, self._record)
        return OpenLink(checkpoint, files_of(self._storage, checkpoint), self._catalogs())

    def _path(self, name: str) -> str:
        return layout.join(self.directory, name)

    def _catalogs(self) -> list[Catalog]:
        return [self._shards[number] for number in sorted(self._shards)]

    def _check_first_file(self) -> Errors:
        """Check ``INTENT``, of a form ``OFFER``, which no list of files has: it must say what the manifest says."""
        name, own = first_file(self._record)
        path, expected = self._path(name), f"that of save {self._record.files_id}, as in {layout.MANIFEST}"
        try:
            data = self._storage.read(path, _FIRST_BYTES)
        except ABSENT:  # a copy of the listed files is a checkpoint, too
            return
        except NotPlainError as error:
            yield missing(path, error, expected)
        except OSError as error:
            yield unreadable(path, error, expected)
        else:
            if data != own:
                found = f"{data[:60]!r}"
                with suppress(CorruptCheckpointError):
                    found = f"that of save {parse(data, path).text('save_id')}"
                yield CorruptCheckpointError(path, "", found=found, expected=expected)

    def _log_unlisted(self) -> None:
        if log.isEnabledFor(logging.DEBUG):
            for name in self._storage.list_files(self.directory):
                if name not in _UNLISTED and self._record.file(name) is None:
                    log.debug("%s is not listed in the manifest, and ignored", self._path(name))

    def _check_file(self, file: FileEntry, advance: Advance, index: TensorIndex | None = None) -> Errors:
        counted: list[int] = []  # of a file that is read twice, what is counted is its first time

        def count(n_bytes: int) -> None:
            if sum(counted) < file.n_bytes:
                counted.append(n_bytes)
                advance(n_bytes)

        def check() -> list[CorruptCheckpointError]:
            errors = list(check_file(self._storage, self.directory, file, index=index, advance=count))
            return errors or list(self._check_loadable(file))

        yield from check_twice(self._storage, self._path(file.name), check, list)

    def _check_loadable(self, file: FileEntry) -> Errors:
        if layout.is_torch_file(file.name):
            path = self._path(file.name)
            try:
                with self._storage.open(path) as content:
                    check_loadable(content, path)
            except CorruptCheckpointError as error:
                yield error

    @property
    def _with_index(self) -> list[int]:
        """The shards that wrote dense tensors."""
        shards = len(self._record.shards)
        return [n for n in range(shards) if self._record.file(layout.dense_index(n, shards))]

    def _files_of_index(self, number: int) -> list[str]:
        """Return the index of a shard and the files in which it lists tensors."""
        shards = len(self._record.shards)
        names = [layout.dense_index(number, shards), layout.dense_data(number, shards)]
        return [name for name in (*names, *([] if number else [layout.MODEL])) if self._record.file(name)]

    def _check_indexed(self, number: int, advance: Advance) -> Errors:
        """Check an index and the files whose tensors it lists; with a damaged index, only their whole checksums."""
        index = None
        try:
            index = read_index(self._storage, self.directory, self._record, number)
            assert index is not None  # the manifest lists it
            self._indexes[number] = index
        except FormatVersionError as error:
            yield newer(error)
        except CorruptCheckpointError as error:
            yield error
        for name in self._files_of_index(number)[1:]:
            file = self._record.file(name)
            if file is not None and self._path(name) not in self._broken:
                yield from _read(self._path(name), partial(self._check_file, file, advance, index))

    def _read_catalog(self, number: int, advance: Advance) -> Errors:
        shard = self._record.shards[number]
        path, entry = self._path(shard.catalog), self._record.file(shard.catalog)
        assert entry is not None  # the manifest was checked for that
        data = read_checked(self._storage, self.directory, entry, catalogs.MAX_BYTES)
        advance(len(data))
        try:
            catalog = self._shards[number] = catalogs.decode(data, path, self._record, number)
        except FormatVersionError as error:
            yield newer(error)
            return
        yield from shard_errors(self.directory, catalog, shard)

    def _sum_errors(self) -> Errors:
        """Check that the catalogs together make up the manifest."""
        path = self._path(layout.MANIFEST)
        yield from count_errors(self.directory, self._record, self._catalogs())
        parts = Counter(part.file for shard in self._catalogs() for part in shard.parts)
        for file in self._record.files:
            if layout.is_part(file.name) and parts[file.name] != 1:
                where, found = f"file {file.name!r}", f"in {parts[file.name]} catalogs"
                yield CorruptCheckpointError(path, where, found=found, expected="in one catalog")

    def _check_tensors(self) -> Errors:
        tensors_of(self.directory, [self._indexes[number] for number in sorted(self._indexes)])
        yield from ()

    def _check_table(self, table: TableEntry) -> Errors:
        with suppress(CorruptCheckpointError, OSError):  # what cannot be read has been reported already
            yield from repeated_between_shards(self._storage, self.directory, table, self._catalogs())


def _read(path: str, check: Job) -> Errors:
    """Run a check; a file that cannot be read is an error like any other."""
    try:
        yield from check()
    except CorruptCheckpointError as error:
        yield error
    except NOT_READABLE as error:
        yield missing(path, error, "a file that can be read")
    except OSError as error:
        yield unreadable(path, error, "a file that can be read")


def unreadable(path: str, error: Exception, expected: str) -> CorruptCheckpointError:
    """Return the error for a file that the storage refuses to read."""
    return CorruptCheckpointError(path, "", found=f"an error: {error}", expected=expected)


def newer(error: FormatVersionError) -> CorruptCheckpointError:
    """Return the error of a newer format as one of a damaged file."""
    return CorruptCheckpointError(error.path, "version", found=error.found, expected=f"at most {error.supported}")
