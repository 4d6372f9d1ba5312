"""Reads files that their writer may remove meanwhile: opens them first, or locates their replacement."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from typing import BinaryIO, TypeVar, cast

from recckpt.errors import CheckpointNotFoundError, CheckpointRemovedError, CorruptCheckpointError, RecckptError
from recckpt.format import layout
from recckpt.parallel.threads import run_all
from recckpt.storage import ABSENT, NOT_READABLE, NotPlainError, Storage, missing
from recckpt.storage.local_files import map_copy
from recckpt.storage.transfers import WorkDir

_MOST_MAPS = 16_384  # a process has at most 65,530; only checkpoints of over 10 TB have more files
_CHAIN_MAPS = 3  # limit for all links of a chain together, as a multiple of this
_T = TypeVar("_T")
log = logging.getLogger("recckpt")
_LOOKS_AGAIN = 3
_Located = TypeVar("_Located")
_Result = TypeVar("_Result")


class OpenFiles:
    """Files of one checkpoint. If the storage supports memory maps, they are mapped, and stay readable after removal.

    On other storage a file may be gone when it is read. In that case every method raises CheckpointRemovedError if the
    manifest is gone too, otherwise CorruptCheckpointError. Thread-safe.

    ``sizes``: file -> bytes according to the manifest. The ``first`` files are opened immediately; None for all files.
    ``n_links`` checkpoints, the links of a chain, are open together.
    """

    def __init__(
        self,
        storage: Storage,
        directory: str,
        sizes: Mapping[str, int],
        first: Iterable[str] | None = None,
        n_links: int = 1,
    ) -> None:
        self.url = storage.url
        self._storage, self._directory = storage, directory
        self._sizes = {layout.join(directory, name): n_bytes for name, n_bytes in sizes.items()}
        self._maps: dict[str, memoryview] = {}
        self._most_maps = min(_MOST_MAPS, _CHAIN_MAPS * _MOST_MAPS // n_links)
        self.keep_open(sizes if first is None else first)

    def keep_open(self, names: Iterable[str]) -> None:
        """Open files of the checkpoint, by their names in it, unless they are open."""
        paths = dict.fromkeys(layout.join(self._directory, name) for name in names)
        for path in islice((path for path in paths if path not in self._maps), self._most_maps - len(self._maps)):
            mapped = self._reached(path, self._storage.map)
            if mapped is None:
                break
            self._maps[path] = mapped

    def twin(self) -> OpenFiles:
        """Return a second object on the same open files; closing one object leaves the other open."""
        twin = copy.copy(self)
        twin._maps = dict(self._maps)
        return twin

    def close(self) -> None:
        """Release all files; a memory map lives until its last view is released."""
        self._maps = {}

    def open(self, name: str) -> BinaryIO:
        mapped = self._maps.get(name)
        if mapped is not None:
            return cast(BinaryIO, MappedFile(mapped))
        return cast(BinaryIO, _RemovableFile(self._reached(name, self._storage.open), partial(self._missing, name)))

    def map(self, name: str) -> memoryview | None:
        mapped = self._maps.get(name)
        return self._reached(name, self._storage.map) if mapped is None else mapped

    def size(self, name: str) -> int:
        mapped = self._maps.get(name)
        return self._reached(name, self._storage.size) if mapped is None else len(mapped)

    def read(self, name: str, max_bytes: int, begin: int = 0) -> bytes:
        mapped = self._maps.get(name)
        if mapped is None:
            return self._reached(name, lambda path: self._storage.read(path, max_bytes, begin))
        return bytes(mapped[begin : begin + max_bytes])

    def drop_cached(self, name: str) -> bool:
        """Drop the local copy of a file, if any; return whether the file is remote, as :class:`Storage` does."""
        is_remote = self._storage.drop_cached(name)
        if is_remote:
            self._maps.pop(name, None)
        return is_remote

    def threads(self, requested: int) -> int:
        return self._storage.threads(requested)

    def fetch(self, names: Iterable[str], download_dir: WorkDir, concurrency: int) -> None:
        """Copy files that are not memory-mapped to a directory of this host, and read the copies from now on.

        Raises OSError if a file cannot be read, or the download dir has too little space for all.
        """
        absent = [name for name in names if name not in self._maps]
        download_dir.check_room(sum(self._sizes[name] for name in absent))

        def fetch_one(name: str) -> memoryview:
            with self.open(name) as source, download_dir.new_file() as copy:
                found = map_copy(source, copy)
            if len(found) != self._sizes[name]:
                expected = f"{self._sizes[name]} bytes"
                raise CorruptCheckpointError(name, "its size", found=f"{len(found)} bytes", expected=expected)
            return found

        copies = run_all(fetch_one, absent, self.threads(concurrency))
        self._maps.update(zip(absent, copies, strict=True))

    def _reached(self, path: str, reach: Callable[[str], _T]) -> _T:
        try:
            return reach(path)
        except NOT_READABLE as error:
            raise self._missing(path, error) from error

    def _missing(self, path: str, error: OSError) -> RecckptError:
        """Return the error for a missing file: removed by rotation if the manifest, which goes first, is gone too."""
        try:
            if not isinstance(error, NotPlainError):
                self._storage.size(layout.join(self._directory, layout.MANIFEST))
        except ABSENT:
            return CheckpointRemovedError(self._storage.url_of(self._directory))
        n_bytes = self._sizes.get(path)
        return missing(path, error, "a file" if n_bytes is None else f"{n_bytes} bytes")


class MappedFile(io.RawIOBase):
    def __init__(self, memory: memoryview) -> None:
        self._memory, self._at = memory, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = (0, self._at, len(self._memory))[whence]
        if start + offset < 0:
            raise ValueError(f"a position must not be negative, found {start + offset}")
        self._at = start + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        end = None if size is None or size < 0 else self._at + size
        data = bytes(self._memory[self._at : end])
        self._at += len(data)
        return data


class _RemovableFile(io.RawIOBase):
    def __init__(self, file: BinaryIO, missing: Callable[[OSError], RecckptError]) -> None:
        self._file, self._missing = file, missing

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def read(self, size: int | None = -1) -> bytes:
        try:
            return self._file.read(-1 if size is None else size)
        except FileNotFoundError as error:
            raise self._missing(error) from error

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def first_whole(
    locate: Callable[[], _Located],
    use: Callable[[_Located], _Result],
    *,
    instead: Callable[[_Located, CorruptCheckpointError], _Located | None] = lambda located, error: None,
    first: _Located | None = None,
) -> _Result:
    """Locate a checkpoint and use it. If its writer removes it meanwhile, or if it is damaged, locate again.

    If ranks act together, all must call this: ``locate`` and ``instead`` must return the same on all ranks, and
    ``use`` must raise an error of one rank on all ranks, so that all ranks repeat the same steps.

    Args:
        locate: returns the checkpoint that exists now.
        use: may be called several times; each call must undo or repeat the work of the previous call.
        instead: returns a replacement for the damaged checkpoint that an error names, such as another one of its name;
            or None.
        first: the result of an earlier ``locate``, used for the first attempt.

    Raises:
        CheckpointNotFoundError: the first ``locate`` found nothing.
        CheckpointRemovedError: in each of four attempts, the located checkpoint was removed before it was read.
        CorruptCheckpointError: there is no replacement for the damaged checkpoint.
    """
    located, removed, n_left = first, None, _LOOKS_AGAIN
    while True:
        try:
            located = locate() if located is None else located
            return use(located)
        except CorruptCheckpointError as error:
            located = None if located is None else instead(located, error)
            if located is None:
                raise
        except (CheckpointRemovedError, CheckpointNotFoundError) as error:
            # After a removal there may be no checkpoint for a moment, or the requested one never comes back.
            removed = error if isinstance(error, CheckpointRemovedError) else removed
            if removed is None:
                raise
            if n_left == 0:
                raise removed from removed.__cause__
            log.info("%s; looking again", removed)
            located, n_left = None, n_left - 1
