"""The mirrors that a run knows: each is noted in the run by whoever mirrors it (docs/format.md, section 8)."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import xxhash

from recckpt.errors import CorruptCheckpointError
from recckpt.format import drafts, layout
from recckpt.format.json_fields import check_seal, parse, seal
from recckpt.output_dir.forget_requests import requests
from recckpt.storage import ABSENT, Storage
from recckpt.storage.read_again import read_twice

FORMAT = "recckpt-mirror"  # part of the format
VERSION = 1  # part of the format
_MAX_BYTES = 64 << 20
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
    with suppress(*ABSENT):
        if storage.read(mirror.name, _MAX_BYTES) == data:
            return
    for directory in (layout.OWN_DIR, layout.MIRRORS_DIR):
        with suppress(FileExistsError):
            storage.make_dir(directory)
    storage.replace(mirror.name, data)


def known_mirrors(storage: Storage) -> list[KnownMirror]:
    """Return the mirrors that a run knows; CorruptCheckpointError where the note of one is damaged."""
    names = [name for name in storage.list_files(layout.MIRRORS_DIR) if not drafts.is_draft(name)]
    mirrors = [_read(storage, layout.join(layout.MIRRORS_DIR, name)) for name in names]
    return [mirror for mirror in mirrors if mirror is not None]


def mirrors_behind(storage: Storage) -> list[KnownMirror]:
    """Return the mirrors of which it is not known that they have forgotten all that was forgotten in their run."""
    forgotten = {request for request, is_done in requests(storage).items() if is_done}
    return [mirror for mirror in known_mirrors(storage) if not forgotten <= mirror.forgotten] if forgotten else []


def _read(storage: Storage, path: str) -> KnownMirror | None:
    def read() -> KnownMirror:
        data = storage.read(path, _MAX_BYTES)
        fields = parse(data, path)
        fields.check_format(FORMAT, VERSION)
        check_seal(data, _SEAL, path)
        places = fields.text("run"), fields.text("url"), fields.text("host")
        return KnownMirror(*places, frozenset(fields.texts("forgotten")))

    try:
        return read_twice(storage, path, read)
    except ABSENT:
        return None  # removed meanwhile
    except CorruptCheckpointError as error:
        remedy = "remove it: the next pass of the mirror notes it again"
        raise CorruptCheckpointError(
            path, error.where, found=error.found, expected=error.expected, remedy=remedy
        ) from error
