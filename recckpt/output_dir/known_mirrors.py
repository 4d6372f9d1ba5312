"""The mirrors that a run knows: each is noted in the run by whoever mirrors it (docs/format.md, section 8)."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from recckpt.format import layout
from recckpt.format.json_fields import Fields, seal
from recckpt.output_dir.forget_requests import done_requests
from recckpt.output_dir.notes import note_paths, put_note, read_note
from recckpt.storage import Storage

FORMAT = "recckpt-mirror"  # part of the format
VERSION = 1  # part of the format
_SEAL = "mirror_xxh3"  # part of the format


@dataclass(frozen=True)
class KnownMirror:
    """A mirror, as it is noted in its run."""

    run_url: str  # where the run was, as the mirror reached it: a copy of the run has its notes, and not its mirrors
    url: str  # where the mirror is
    host: str  # from which it was written: a path means something there alone
    forgotten: frozenset[str]  # requests to forget ids that have been carried out in it

    @property
    def name(self) -> str:
        """The name of its note."""
        return layout.known_mirror(xxhash.xxh3_128_hexdigest(f"{self.url}\n{self.host}".encode()))


def note_mirror(storage: Storage, mirror: KnownMirror) -> None:
    """Note a mirror in its run, unless it is noted like this."""
    data = seal(
        {
            "format": FORMAT,
            "version": VERSION,
            "run": mirror.run_url,
            "url": mirror.url,
            "host": mirror.host,
            "forgotten": sorted(mirror.forgotten),
        },
        _SEAL,
    )
    put_note(storage, mirror.name, data)


def known_mirrors(storage: Storage) -> list[KnownMirror]:
    """Return the mirrors that a run knows; CorruptCheckpointError where the note of one is damaged."""
    kind, remedy = (FORMAT, VERSION, _SEAL), "remove it: the next pass of the mirror notes it again"
    paths = note_paths(storage, layout.MIRRORS_DIR)
    mirrors = [read_note(storage, path, kind, _decoded, remedy) for path in paths]
    return [mirror for mirror in mirrors if mirror is not None]


def mirrors_behind(storage: Storage) -> list[KnownMirror]:
    """Return the mirrors of which it is not known that they have forgotten all that was forgotten in their run."""
    forgotten = done_requests(storage)
    return [mirror for mirror in known_mirrors(storage) if not forgotten <= mirror.forgotten] if forgotten else []


def _decoded(fields: Fields) -> KnownMirror:
    places = fields.text("run"), fields.text("url"), fields.text("host")
    return KnownMirror(*places, frozenset(fields.texts("forgotten")))
