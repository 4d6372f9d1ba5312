"""Files that their writer may remove while they are read: they are opened first, or looked for again."""

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

_MOST_MAPS = 16_384  # a process has 65,530; a checkpoint of more files is one of more than 10 TB
_CHAIN_MAPS = 3  # times as many for all links of a chain
_T = TypeVar("_T")
log = logging.getLogger("recckpt")
_LOOKS_AGAIN = 3
_Located = TypeVar("_Located")
_Result = TypeVar("_Result")


class OpenFiles:
    """Files of one checkpoint, mapped if the storage has maps: then they stay readable after removal.

    On other storage a file may be gone when it is read. Then every method raises CheckpointRemovedError if the manifest
    is gone too, otherwise CorruptCheckpointError. Thread-safe.

    ``sizes`` has the bytes of each file by the manifest. The ``first`` files are opened at once; None for all.
    ``n_links`` checkpoints are open at a time, as links of a chain.
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
        """Return a second object on the same open files; closing one leaves the other open."""
        twin = copy.copy(self)
        twin._maps = dict(self._maps)
        return twin

    def close(self) -> None:
        """Release all files; a map lives until the last view of it is released."""
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
        """Drop the copy of a file, if it is one; say whether the file is remote, as :class:`Storage` does."""
        is_remote = self._storage.drop_cached(name)
        if is_remote:
            self._maps.pop(name, None)
        return is_remote

    def threads(self, requested: int) -> int:
        return self._storage.threads(requested)

    def fetch(self, names: Iterable[str], download_dir: WorkDir, concurrency: int) -> None:
        """Copy files without a map to a directory of this host, and read the copies from now on.

        Raises OSError if one cannot be read or the download dir has no room for them all.
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
        """Return why a file is not there; rotation removes the manifest first."""
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
            raise ValueError(f"a position is not negative, found {start + offset}")
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
    """Locate a checkpoint and use it; look again if its writer removes it meanwhile, or if it is damaged.

    Ranks that act together all call this: ``locate`` and ``instead`` return the same on all of them, and an error of
    ``use`` on one of them is raised on all, so that all look again alike.

    Args:
        locate: returns what is there now.
        use: may be called again; it has to undo or repeat what it has done so far.
        instead: returns what to use in place of what an error names as damaged, such as another of its name; or None.
        first: what was located already.

    Raises:
        CheckpointNotFoundError: there was nothing at the first look.
        CheckpointRemovedError: what was located was removed before it was read, each of four times.
        CorruptCheckpointError: there is nothing to use in place of what is damaged.
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
            # After a removal there may be no checkpoint for a moment, or the one that was asked for never comes back.
            removed = error if isinstance(error, CheckpointRemovedError) else removed
            if removed is None:
                raise
            if n_left == 0:
                raise removed from removed.__cause__
            log.info("%s; looking again", removed)
            located, n_left = None, n_left - 1
