"""The mirrors that a run knows: each is noted in the run by whoever mirrors it (docs/format.md, section 15)."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace

import xxhash

from recckpt.errors import RecckptError
from recckpt.format import layout
from recckpt.format.json_fields import Fields, seal
from recckpt.output_dir.forget_requests import done_requests
from recckpt.output_dir.notes import note_paths, put_note, read_note
from recckpt.storage import Storage, open_storage

FORMAT = "recckpt-mirror"  # part of the format
VERSION = 1  # part of the format
_SEAL = "mirror_xxh3"  # part of the format
_LOOK_SEC = 30.0  # for which a look into a mirror is tried again, where its store does not answer


@dataclass(frozen=True)
class KnownMirror:
    """A mirror, as it is noted in its run."""

    run_url: str  # where the run was, as the mirror reached it: a copy of the run has its notes, and not its mirrors
    url: str  # where the mirror is
    host: str  # from which it was written: a path means something there alone
    forgotten: frozenset[str]  # requests to forget ids that have been carried out in it
    problem: str = ""  # why its own mirrors cannot be listed from here

    @property
    def name(self) -> str:
        """The name of its note."""
        return layout.known_mirror(xxhash.xxh3_128_hexdigest(f"{self.url}\n{self.host}".encode()))

    @property
    def is_here(self) -> bool:
        """Whether its place means something on this host."""
        return self.host in ("", socket.gethostname())

    def is_behind(self, forgotten: frozenset[str]) -> bool:
        """Say whether it is not known that it, and its own mirrors, have forgotten what these requests name."""
        return bool(forgotten) and (bool(self.problem) or not forgotten <= self.forgotten)


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


def mirrors_below(storage: Storage) -> Iterator[tuple[Storage, KnownMirror]]:
    """Yield the mirrors of a run, then the mirrors of those, and so on: each with the output dir that knows it.

    The mirrors of a mirror are read after all mirrors of its run were yielded, so that the caller may bring these up to
    date first. Those of a path on another host are unknown here. Where the mirrors of a mirror cannot be listed, that
    mirror is yielded again with the ``problem``.

    Raises:
        CorruptCheckpointError: a note in the run itself is damaged.
    """
    looked_at, runs = {storage.url}, [(storage, known_mirrors(storage))]
    while runs:
        run, mirrors = runs.pop(0)
        for mirror in mirrors:
            yield run, mirror
        for mirror in (each for each in mirrors if each.is_here and each.url not in looked_at):
            looked_at.add(mirror.url)  # mirrors may be mirrors of one another
            try:
                there = open_storage(mirror.url)
                there.give_up_after(_LOOK_SEC)
                runs.append((there, known_mirrors(there)))
            except (RecckptError, OSError, ValueError) as error:
                yield run, replace(mirror, problem=str(error))


def mirrors_behind(storage: Storage) -> list[KnownMirror]:
    """Return the mirrors, and mirrors of those, that may not have forgotten all that was forgotten in their run."""
    forgotten = done_requests(storage)
    below = (mirror for _, mirror in mirrors_below(storage)) if forgotten else ()
    return [mirror for mirror in below if mirror.is_behind(forgotten)]


def _decoded(fields: Fields) -> KnownMirror:
    places = fields.text("run"), fields.text("url"), fields.text("host")
    return KnownMirror(*places, frozenset(fields.texts("forgotten")))
