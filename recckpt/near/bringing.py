"""What a host lacks of a near save that may be restored is brought there from hosts that have it."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from recckpt.near.moves import Move
from recckpt.near.near_dir import HostSeen, NearDir
from recckpt.near.views import host_of
from recckpt.near.whole_files import WholeFiles
from recckpt.output_dir.listing import Checkpoint
from recckpt.text import size


@dataclass(frozen=True)
class Place:
    """What a rank says of its host before anything is brought there.

    Attributes:
        host: what it is known by, None where its near dir cannot be used.
        name: what its errors call it.
        needed: the files of the near save that this rank reads.
        free_bytes: the room of its file system; None where that is not known.
    """

    host: HostSeen | None
    name: str
    needed: frozenset[str]
    free_bytes: int | None

    @classmethod
    def of(cls, near_dir: NearDir, needed: frozenset[str]) -> Place:
        """Return that of a rank with this near dir."""
        free_bytes = None
        host = host_of(near_dir)  # first: it makes the directory
        with suppress(OSError):
            free_bytes = near_dir.storage.free_on_disk()
        return cls(host, f"{socket.gethostname()}:{near_dir.path}", needed, free_bytes)


@dataclass(frozen=True)
class Bringing:
    """The files of a near save that hosts lack and their ranks read, as all ranks know of them.

    Attributes:
        places: of all ranks.
        moves: of the files, each to the first rank of a host.
    """

    places: Sequence[Place]
    moves: Sequence[Move]

    @classmethod
    def of(cls, save: Checkpoint, places: Sequence[Place], of_hosts: Sequence[WholeFiles]) -> Bringing:
        """Return what is to be brought, of what hosts have whole; pure."""
        lacks = _lacks(places, of_hosts)
        moves = [
            Move(file.name, file.n_bytes, file.xxh3, holders[number % len(holders)], to)
            for number, file in enumerate(save.manifest.files)
            for holders in [[host.rank for host in of_hosts if file.name in host.names]]
            for to, names in lacks.items()
            if file.name in names
        ]
        return cls(places, moves)

    def brings_to(self, rank: int) -> bool:
        """Say whether files come to a rank."""
        return any(each.receiver == rank for each in self.moves)

    def shortage(self) -> OSError | None:
        """Return why it is not begun, where a host has no room for what comes to it."""
        for rank, place in enumerate(self.places):
            if place.free_bytes is not None and place.free_bytes < self._n_bytes(rank):
                return self.failure(rank, f"found {size(place.free_bytes)} free there: make room")
        return None

    def failure(self, rank: int, reason: str) -> OSError:
        """Return the error that says what a host, which this is a rank of, could not take."""
        needs = f"which needs {size(self._n_bytes(rank))} of it"
        return OSError(f"it cannot be brought to {self.places[rank].name}, {needs}: {reason}")

    def in_words(self) -> Iterator[str]:
        """Yield how much comes to each host, and from where."""
        for rank in sorted({each.receiver for each in self.moves}):
            senders = sorted({self.places[each.sender].name for each in self.moves if each.receiver == rank})
            yield f"{size(self._n_bytes(rank))} to {self.places[rank].name} from {', '.join(senders)}"

    def _n_bytes(self, rank: int) -> int:
        return sum(each.n_bytes for each in self.moves if each.receiver == rank)


def _lacks(places: Sequence[Place], of_hosts: Sequence[WholeFiles]) -> dict[int, frozenset[str]]:
    """Return what each host lacks of what its ranks read, by its first rank."""
    first, lacks = dict[HostSeen | None, int](), dict[int, frozenset[str]]()
    whole = {host.rank: host.names for host in of_hosts}
    for rank, place in enumerate(places):
        to = first.setdefault(place.host, rank)
        lacks[to] = lacks.get(to, frozenset()) | place.needed - whole.get(to, frozenset())
    return lacks
