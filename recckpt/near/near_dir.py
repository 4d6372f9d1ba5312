"""The near saves of one output dir on this host (docs/format.md, section 16)."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.format import layout, near_seal
from recckpt.format.near_seal import NearSeal
from recckpt.output_dir.checkpoint_dir import Intent, unlisted, write_intent
from recckpt.output_dir.listing import Checkpoint
from recckpt.output_dir.notes import NearHost, note_near_host
from recckpt.policies.options import Near
from recckpt.storage import ABSENT, NotPlainError, Storage
from recckpt.storage.local import LocalStorage
from recckpt.storage.local_files import check_owner, doing
from recckpt.text import size

log = logging.getLogger("recckpt")
HostSeen = tuple[str, int, int]
_HOST_BYTES = 64
_OWN = "give Near(...) a directory of your own"
_URL_BYTES = 1 << 16


class NearStorage(LocalStorage):
    """Files of near saves, which together may use ``most_bytes``; None for all free space."""

    def __init__(self, path: str, most_bytes: int | None) -> None:
        super().__init__(path)
        self._most_bytes = most_bytes

    @property
    def used_bytes(self) -> int:
        return sum(file.n_bytes for directory in self.list_dirs() for file in self.listed(directory).values())

    def free_bytes(self) -> int | None:
        free = super().free_bytes()
        if free is None or self._most_bytes is None:
            return free
        return min(free, self._most_bytes - self.used_bytes)

    def free_on_disk(self) -> int | None:
        return super().free_bytes()

    def check_room(self) -> None:
        """Raise OSError if near saves use more than ``most_bytes``; the estimates before a save ignore small files."""
        if self._most_bytes is not None and (used := self.used_bytes) > self._most_bytes:
            problem = f"found {size(used)} of near saves, expected {size(self._most_bytes)} at most (max_bytes)"
            raise OSError(errno.ENOSPC, f"{problem}; three times the largest is enough", self.url)


@dataclass(frozen=True)
class Sealed:
    directory: str  # inside the near dir
    seal: bytes  # contents of its ``near.json``
    files: frozenset[str]  # files that are present with the right size


class NearDir:
    """The directory of one output dir's near saves on this host. Creates nothing before the first call of :meth:`host`.

    Attributes:
        path: the near dir, which all output dirs share.
        place: 16 hex digits that identify the output dir. Rule *run_identity*: near saves of other output dirs are
            ignored.
        storage: the directory of ``place``.
    """

    def __init__(self, near: Near, place: str, url: str | None = None) -> None:
        self.path, self.place, self._url = _path(near), place, url
        self.storage = NearStorage(layout.join(self.path, near_seal.NEAR_ROOT, place), near.most_bytes)

    @classmethod
    def of(cls, near: Near, url: str) -> NearDir:
        """Return the near dir of an output dir. Raises PermissionError if it is a link or another user's."""
        path = Path(os.path.expanduser(near.path))  # noqa: PTH111  # as below
        with suppress(*ABSENT):
            check_owner(path, _OWN, may_be_of_root=True)
        near_dir = cls(near, _place(url), _canonical(url))
        with suppress(*ABSENT):
            check_owner(near_dir.root, _OWN)
        return near_dir

    @property
    def root(self) -> Path:
        return Path(self.path, near_seal.NEAR_ROOT)

    def host(self) -> str:
        """Return the id of this host, which is stored in the near dir. Create the near dir and the id if missing.

        Raises OSError if the near dir is not writable, or the file with the id is damaged.
        """
        with suppress(*ABSENT):
            return self._host()
        with doing("making a directory", self.path):
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(self.root, _OWN)
        self.storage.prepare()
        if self._url is not None:  # written before the id, so that a reader that finds the id also finds the URL
            self.storage.replace(near_seal.NEAR_URL, self._url.encode())
        with suppress(FileExistsError):
            self.storage.put_if_absent(near_seal.NEAR_HOST, secrets.token_hex(16).encode())
        return self._host()

    def known_host(self) -> str | None:
        """Return the id of this host; None if no readable id exists. Creates nothing."""
        with suppress(OSError):
            return self._host()
        return None

    def _host(self) -> str:
        host = self.storage.read(near_seal.NEAR_HOST, _HOST_BYTES).decode("ascii", "replace")
        if not near_seal.is_host(host):
            problem = f"found {host!r:.40}, expected 32 hex digits: remove it; the next near save makes a new one"
            raise OSError(errno.EIO, problem, self.storage.url_of(near_seal.NEAR_HOST))
        return host

    def url(self) -> str | None:
        """Return the URL of the output dir, as its first writer on this host has recorded it; None if unknown."""
        with suppress(*ABSENT, NotPlainError, UnicodeDecodeError):
            url = self.storage.read(near_seal.NEAR_URL, _URL_BYTES).decode()
            return url if _place(url) == self.place else None
        return None

    def begin(self, intent: Intent) -> None:
        """Make the directory of a near save. Raises OSError if that fails. Rule *never_overwrite*: its name is new."""
        with suppress(FileExistsError):
            self.storage.make_dir(intent.directory.rpartition("/")[0])
        self.storage.make_dir(intent.directory)
        write_intent(self.storage, intent)

    def seal(self, intent: Intent, seal: NearSeal) -> None:
        path, data = layout.join(intent.directory, near_seal.NEAR_JSON), near_seal.encode(seal)
        near_seal.decode(data, path)  # checks that readers will accept the seal
        self.storage.put_if_absent(path, data)

    def sealed(self) -> Iterator[Sealed]:
        """Yield all sealed near saves, even if files are missing; log damaged seals.

        Raises OSError if the directory cannot be read.
        """
        for directory in self.directories():
            data = self._read(layout.join(directory, near_seal.NEAR_JSON))
            save = None if data is None else self.opened(directory, data)
            if data is not None and save is not None:
                files = {file.name for file in save.manifest.files}
                missing = {file.name for file in unlisted(save.manifest.files, self.storage.listed(directory))}
                yield Sealed(directory, data, frozenset(files - missing))

    def opened(self, directory: str, data: bytes) -> Checkpoint | None:
        """Return the near save of a seal. If the seal is damaged or of another output dir, log that and return None."""
        path = layout.join(directory, near_seal.NEAR_JSON)
        try:
            seal = near_seal.decode(data, path)
        except (CorruptCheckpointError, FormatVersionError) as error:
            log.warning("%s: a near save is passed over: %s", self.storage.url, error)
            return None
        if seal.place != self.place or near_seal.near_dir(seal.manifest.save_id) != directory:
            log.warning("%s: %s is passed over: it belongs to another output dir or directory", self.storage.url, path)
            return None
        return Checkpoint(directory, seal.manifest, near_dir=self.storage)

    def directories(self) -> Iterator[str]:
        for epoch in self.storage.list_dirs():
            names = {layout.join(epoch, name.partition("/")[0]) for name in self.storage.list_files(epoch)}
            yield from sorted(name for name in names if near_seal.parse_near(name) is not None)

    def clear(self) -> list[str]:
        """Remove all near saves, sealed or not; return their directories. Raises OSError if files remain."""
        directories = list(self.directories())
        for directory in directories:
            self.remove(directory)
        return directories

    def remove(self, directory: str) -> None:
        """Remove a near save, its seal first, so that no reader takes the remaining files for a complete near save.

        Raises OSError if files remain.
        """
        self.storage.remove(layout.join(directory, near_seal.NEAR_JSON))
        for name in self.storage.list_files(directory):
            self.storage.remove(layout.join(directory, name))
        self.storage.remove_empty_dirs(directory)
        with suppress(OSError):  # raised if other near saves of the epoch remain
            self.storage.remove_empty_dirs(directory.rpartition("/")[0])

    def try_remove(self, directory: str) -> bool:
        try:
            self.remove(directory)
        except OSError as error:
            log.warning("could not remove all of %s/%s: %s", self.storage.url, directory, error)
            return False
        return True

    def remove_drafts(self, directory: str) -> None:
        """Remove the drafts that a dead writer or restore has left in a near save.

        Raises OSError if a draft could not be removed.
        """
        for name in filter(layout.is_draft, self.storage.list_files(directory)):
            self.storage.remove(layout.join(directory, name))

    def _read(self, path: str) -> bytes | None:
        try:
            return self.storage.read(path, near_seal.MAX_BYTES + 1)
        except NotPlainError as error:
            log.warning("%s: %s is passed over: %s", self.storage.url, path, error)
        except ABSENT:
            pass
        return None


def places(near: Near) -> list[NearDir]:
    """Return the directories of all output dirs in a near dir. Raises OSError if the near dir cannot be read."""
    names = LocalStorage(layout.join(_path(near), near_seal.NEAR_ROOT)).list_dirs()
    return [NearDir(near, name) for name in names if near_seal.is_place(name)]


def _place(url: str) -> str:
    return f"{xxhash.xxh3_64_intdigest(_canonical(url).encode()):016x}"


def _canonical(url: str) -> str:
    return url if "://" in url else os.path.realpath(url)


def _path(near: Near) -> str:
    return os.path.realpath(os.path.expanduser(near.path))  # noqa: PTH111  # pathlib raises RuntimeError


class NotedHost:
    """The record in an output dir that this host has near saves. One rank of the host writes it. Not thread-safe."""

    def __init__(self, storage: Storage, near_dir: NearDir) -> None:
        self._storage, self._dir = storage, near_dir
        self._epoch: int | None = None  # epoch of the note; an output dir that was made anew has lost the note

    def note(self, epoch: int, reach: Callable[[], object] = lambda: None) -> None:
        """Write the note before the host gets rows, once per epoch; call ``reach`` before the write.

        Raises OSError if the near dir or the output dir cannot be used.
        """
        if self._epoch != epoch:
            reach()
            note_near_host(self._storage, NearHost(self._dir.host(), socket.gethostname(), self._dir.path))
            self._epoch = epoch

    def remove(self) -> None:
        """Remove the note, because no near save is left on this host. Log a failure."""
        self._epoch = None
        try:
            self._storage.remove(near_seal.host_note(self._dir.host()))
        except (OSError, CorruptCheckpointError) as error:
            log.warning("%s: cannot note there that no near save is on this host: %s", self._storage.url, error)
