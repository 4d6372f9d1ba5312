"""What each host has of near saves, and what all hosts have together (docs/format.md, section 16)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
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
class SeenSave:
    """A near save of which a host has a seal, and its files that hosts have, with their size."""

    save: Checkpoint
    files: set[str]


def look_together(near_dir: NearDir, rank: int, gather: Gather) -> list[HostView]:
    """Look at the near dirs of all hosts, each by its first rank, which logs what fails there. Collective."""
    is_first = is_first_of_host(near_dir, rank, gather)
    views: list[HostView | None] = gather(HostView(rank, _sealed(near_dir)) if is_first else None)
    return [view for view in views if view is not None]


def is_first_of_host(near_dir: NearDir, rank: int, gather: Gather) -> bool:
    """Say whether a rank is the first of those that see its near dir; none is where it cannot be used. Collective."""
    hosts: list[HostSeen | None] = gather(host_of(near_dir))
    return hosts[rank] is not None and hosts.index(hosts[rank]) == rank


def complete(saves: Iterable[SeenSave]) -> list[Checkpoint]:
    """Return the near saves of which each file is on a host."""
    return [each.save for each in saves if is_complete(each.save, each.files)]


def seen(near_dir: NearDir, views: Iterable[HostView]) -> list[SeenSave]:
    """Return what all hosts have together; the seal of the first host that has one counts."""
    saves: dict[str, SeenSave] = {}
    for sealed in (sealed for view in views for sealed in view.saves):
        save = near_dir.opened(sealed.directory, sealed.seal) if sealed.directory not in saves else None
        if save is not None:
            saves[sealed.directory] = SeenSave(save, set())
        if sealed.directory in saves:
            saves[sealed.directory].files.update(sealed.files)
    return list(saves.values())


def is_complete(save: Checkpoint, files: Collection[str]) -> bool:
    """Say whether these are all files of a near save. Rule *all_pieces*."""
    return all(file.name in files for file in save.manifest.files)


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
