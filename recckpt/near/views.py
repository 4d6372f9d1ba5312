"""What each host has of near saves, and what all hosts have together (docs/format.md, section 16)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recckpt.near.near_dir import HostSeen, NearDir, Sealed
from recckpt.output_dir.listing import Checkpoint

log = logging.getLogger("recckpt")

Gather = Callable[[Any], list[Any]]  # the values of all ranks, in their order; collective


@dataclass(frozen=True)
class HostView:
    """The near saves on one host, by its first rank."""

    rank: int
    saves: Sequence[Sealed]


@dataclass(frozen=True)
class Seen:
    """A near save, and who has which of its files.

    Attributes:
        save: what the seal says.
        holders: of each file of it that is there on a host, the first ranks of those hosts.
    """

    save: Checkpoint
    holders: Mapping[str, Sequence[int]]

    @property
    def is_complete(self) -> bool:
        """Whether each of its files is on a host. Rule *all_pieces*."""
        return all(file.name in self.holders for file in self.save.manifest.files)


def look_together(near_dir: NearDir, rank: int, gather: Gather) -> list[HostView]:
    """Look at the near dirs of all hosts, each by its first rank, which logs what fails there. Collective."""
    is_first = is_first_of_host(near_dir, rank, gather)
    views: list[HostView | None] = gather(HostView(rank, _sealed(near_dir)) if is_first else None)
    return [view for view in views if view is not None]


def is_first_of_host(near_dir: NearDir, rank: int, gather: Gather) -> bool:
    """Say whether a rank is the first of those that see its near dir; none is where it cannot be used. Collective."""
    hosts: list[HostSeen | None] = gather(host_of(near_dir))
    return hosts[rank] is not None and hosts.index(hosts[rank]) == rank


def seen_together(near_dir: NearDir, views: Iterable[HostView]) -> list[Seen]:
    """Return all near saves of all hosts; the seal of the first host that has one counts."""
    saves: dict[str, tuple[Checkpoint, dict[str, list[int]]]] = {}
    for view in views:
        for sealed in view.saves:
            if sealed.directory not in saves:
                save = near_dir.opened(sealed.directory, sealed.seal)
                if save is None:
                    continue
                saves[sealed.directory] = save, {}
            holders = saves[sealed.directory][1]
            for name in sealed.files:
                holders.setdefault(name, []).append(view.rank)
    return [Seen(save, holders) for save, holders in saves.values()]


def complete(seen: Iterable[Seen]) -> list[Checkpoint]:
    """Return the near saves of which each file is on a host."""
    return [each.save for each in seen if each.is_complete]


def host_of(near_dir: NearDir) -> HostSeen | None:
    """Return what this host is known by, None where its near dir cannot be used; that is logged."""
    try:
        return near_dir.host_seen()
    except OSError as error:
        log.warning("%s: near saves there are passed over: %s", near_dir.storage.url, error)
        return None


def _sealed(near_dir: NearDir) -> Sequence[Sealed]:
    try:
        return list(near_dir.sealed())
    except OSError as error:
        log.warning("%s: near saves there are passed over: %s", near_dir.storage.url, error)
        return ()
