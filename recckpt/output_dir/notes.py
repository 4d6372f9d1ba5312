"""Notes in an output dir about other places: mirrors, and hosts with near saves (docs/format.md, 15 and 16)."""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar

from recckpt.errors import CorruptCheckpointError, FormatVersionError, RecckptError
from recckpt.format import layout, near_seal
from recckpt.format.codec import Count, FileKind, JsonRecord, plain
from recckpt.storage import ABSENT, Storage
from recckpt.storage.retry import read_twice

_MAX_BYTES = 64 << 20
_T = TypeVar("_T", bound=JsonRecord)
_MIRROR = FileKind("recckpt-mirror", 1, "mirror_xxh3", 64 << 20)  # part of the format
_MIRROR_REMEDY = "if this directory is a mirror, remove it and mirror again; else remove this file"
_NEAR_HOST = FileKind("recckpt-near-host", 1, "near_host_xxh3", 64 << 20)  # part of the format
_NEAR_HOST_REMEDY = "remove this file: the next near save on that host writes it again"


def make_own_dir(storage: Storage, directory: str) -> None:
    for name in (layout.OWN_DIR, directory):
        with suppress(FileExistsError):
            storage.make_dir(name)


def _put(storage: Storage, path: str, data: bytes) -> None:
    with suppress(*ABSENT):
        if storage.read(path, _MAX_BYTES) == data:
            return
    make_own_dir(storage, path.rpartition("/")[0])
    storage.replace(path, data)


def _paths_of_hosts(storage: Storage) -> list[str]:
    names = storage.list_files(near_seal.NEAR_NOTES)
    return [layout.join(near_seal.NEAR_NOTES, name) for name in names if not layout.is_draft(name)]


def _read(storage: Storage, path: str, kind: FileKind, record: type[_T], remedy: str) -> _T | None:
    try:
        return read_twice(storage, path, lambda: kind.open(storage.read(path, _MAX_BYTES), path).read(record))
    except ABSENT:
        return None
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(
            path, error.where, found=error.found, expected=error.expected, remedy=remedy
        ) from error


class MirrorNote(JsonRecord, frozen=True):
    url: str  # URL of the run, as used by the mirror
    run: str  # nonce of the run's first claim, which identifies it; "" without claims
    nonce: str  # 32 hex digits, unique to this mirror process
    host: str
    pid: Count
    time: str  # when the mirror began, UTC; for people only


def put_mirror_note(storage: Storage, note: MirrorNote) -> None:
    """Make an output dir a mirror, or take the mirror over, durably."""
    _put(storage, layout.MIRROR, _MIRROR.encode(plain(note)))
    for directory in (layout.OWN_DIR, ""):
        storage.sync_dir(directory)


def mirror_note(storage: Storage) -> MirrorNote | None:
    """Return the note of a mirror; None if an output dir is not a mirror. Raises an error if the note is damaged."""
    return _read(storage, layout.MIRROR, _MIRROR, MirrorNote, _MIRROR_REMEDY)


def refuse_mirror(storage: Storage) -> None:
    """Raise RecckptError if an output dir is a mirror, because the next pass would remove new saves there."""
    note = mirror_note(storage)
    if note is not None:
        raise RecckptError(
            f"{storage.url} is a mirror of {note.url}, and must not be saved to. Read it with CheckpointReader or "
            "load_into, or start from it with a model bank. To continue training from it, copy it elsewhere, "
            f"or end its `recckpt mirror`; and remove {layout.MIRROR} there"
        )


class NearHost(JsonRecord, frozen=True):
    host: str  # id in its near dir
    name: str  # name of the machine, for people
    path: str  # path of its near dir
    damage: str = ""  # why the note cannot be read; then name and path are ""

    @property
    def shown(self) -> str:
        return f"{self.name}:{self.path}" if not self.damage else f"a host whose note is damaged ({self.damage})"

    @property
    def as_data(self) -> dict[str, str]:
        as_data: dict[str, str] = plain(self)
        return as_data


def note_near_host(storage: Storage, host: NearHost) -> None:
    _put(storage, near_seal.host_note(host.host), _NEAR_HOST.encode(plain(host)))


def one_of_the_hosts(storage: Storage) -> tuple[NearHost | None, int]:
    """Return one of the noted hosts (None without any), and the number of noted hosts; reads only one note."""
    paths = _paths_of_hosts(storage)
    return _read_or_damage(storage, paths[0]) if paths else None, len(paths)


def noted_hosts(storage: Storage) -> list[NearHost]:
    """Return the hosts on which near saves may lie, including those whose notes cannot be read."""
    hosts = [_read_or_damage(storage, path) for path in _paths_of_hosts(storage)]
    return [host for host in hosts if host is not None]


def _read_or_damage(storage: Storage, path: str) -> NearHost | None:
    try:
        return _read(storage, path, _NEAR_HOST, NearHost, _NEAR_HOST_REMEDY)
    except (CorruptCheckpointError, FormatVersionError) as error:
        return NearHost(near_seal.host_of_note(path), "", "", damage=str(error))
