"""The hosts on which near saves of a run may lie: each is noted in the output dir (docs/format.md, section 16)."""

from __future__ import annotations

from dataclasses import dataclass

from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.format import near_names
from recckpt.format.json_fields import Fields, seal
from recckpt.output_dir.forget_requests import done_requests
from recckpt.output_dir.notes import note_paths, put_note, read_note
from recckpt.storage import Storage

FORMAT = "recckpt-near-host"  # part of the format
VERSION = 1  # part of the format
_SEAL = "near_host_xxh3"  # part of the format
_REMEDY = "remove it: the next near save on that host notes it again"


@dataclass(frozen=True)
class NearHost:
    """A host with near saves of an output dir, as it is noted there."""

    host: str  # the id in its near dir
    name: str  # of the machine, for people
    path: str  # of its near dir, there
    forgotten: frozenset[str] = frozenset()  # requests to forget ids, which no near save there has any more
    damage: str = ""  # why its note cannot be read; name and path are "" then

    @property
    def shown(self) -> str:
        """The host as a message names it."""
        return f"{self.name}:{self.path}" if not self.damage else f"a host whose note is damaged ({self.damage})"

    @property
    def as_data(self) -> dict[str, str]:
        """The host as programs read it."""
        data = {"host": self.host, "name": self.name, "path": self.path}
        return data | ({"damage": self.damage} if self.damage else {})


def note_near_host(storage: Storage, host: NearHost) -> None:
    """Note a host, unless it is noted like this."""
    data = seal(
        {
            "format": FORMAT,
            "version": VERSION,
            "host": host.host,
            "name": host.name,
            "path": host.path,
            "forgotten": sorted(host.forgotten),
        },
        _SEAL,
    )
    put_note(storage, near_names.host_note(host.host), data)


def noted_host(storage: Storage, host: str) -> NearHost | None:
    """Return what is noted of a host; None where nothing is.

    Raises:
        CorruptCheckpointError: the note is damaged.
        FormatVersionError: a newer recckpt wrote it.
    """
    return _read(storage, near_names.host_note(host))


def one_of_the_hosts(storage: Storage) -> tuple[NearHost | None, int]:
    """Return a host that is noted, None where none is, and how many there are; reads one note."""
    paths = note_paths(storage, near_names.NEAR_NOTES)
    return _read_or_damage(storage, paths[0]) if paths else None, len(paths)


def noted_hosts(storage: Storage) -> list[NearHost]:
    """Return the hosts on which near saves of an output dir may lie, those whose notes cannot be read among them."""
    hosts = [_read_or_damage(storage, path) for path in note_paths(storage, near_names.NEAR_NOTES)]
    return [host for host in hosts if host is not None]


def hosts_behind(storage: Storage, request: str | None = None) -> list[NearHost]:
    """Return the hosts of which it is not known that no near save there has ids that were forgotten.

    One whose note is damaged, or of a newer recckpt, is among them: what is there is not known.

    Args:
        storage: the output dir.
        request: the one whose ids are meant, which may not be done yet; None for all that are.
    """
    forgotten = done_requests(storage) if request is None else frozenset([request])
    return [host for host in noted_hosts(storage) if not forgotten <= host.forgotten] if forgotten else []


def _read_or_damage(storage: Storage, path: str) -> NearHost | None:
    try:
        return _read(storage, path)
    except (CorruptCheckpointError, FormatVersionError) as error:
        return NearHost(near_names.host_of_note(path), "", "", damage=str(error))


def _read(storage: Storage, path: str) -> NearHost | None:
    return read_note(storage, path, (FORMAT, VERSION, _SEAL), _decoded, _REMEDY)


def _decoded(fields: Fields) -> NearHost:
    return NearHost(fields.text("host"), fields.text("name"), fields.text("path"), frozenset(fields.texts("forgotten")))
