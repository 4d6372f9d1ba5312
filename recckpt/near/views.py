"""Which files of near saves each host has, and which near saves are valid (docs/format.md, section 16)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recckpt.format import layout, near_seal
from recckpt.format.near_seal import NearList
from recckpt.near.near_dir import HostSeen, NearDir, Sealed
from recckpt.output_dir.claims import last_takeover
from recckpt.output_dir.listing import Checkpoint, Listing, chained
from recckpt.policies.options import Near
from recckpt.storage import Storage

log = logging.getLogger("recckpt")
Gather = Callable[[Any], list[Any]]  # returns the values of all ranks, in rank order; collective
SeenSave = tuple[Checkpoint, set[str]]  # a near save that a host has sealed, and its files that are whole on any host


@dataclass(frozen=True)
class HostView:
    rank: int
    saves: Sequence[Sealed]


def look_together(near_dir: NearDir, rank: int, gather: Gather) -> list[HostView]:
    """Read the near dirs of all hosts; the first rank of each host reads, and logs failures. Collective."""
    is_first = is_first_of_host(near_dir, rank, gather)
    views: list[HostView | None] = gather(HostView(rank, _sealed(near_dir)) if is_first else None)
    return [view for view in views if view is not None]


def is_first_of_host(near_dir: NearDir, rank: int, gather: Gather) -> bool:
    """Return whether a rank is the first one with its near dir; False if its near dir is unusable. Collective."""
    hosts: list[HostSeen | None] = gather(host_of(near_dir))
    return hosts[rank] is not None and hosts.index(hosts[rank]) == rank


def complete(saves: Iterable[SeenSave]) -> list[Checkpoint]:
    return [save for save, files in saves if is_complete(save, files)]


def seen(near_dir: NearDir, views: Iterable[HostView]) -> list[SeenSave]:
    saves: dict[str, SeenSave] = {}
    for sealed in (sealed for view in views for sealed in view.saves):
        save = near_dir.opened(sealed.directory, sealed.seal) if sealed.directory not in saves else None
        if save is not None:
            saves[sealed.directory] = save, set()
        if sealed.directory in saves:
            saves[sealed.directory][1].update(sealed.files)
    return list(saves.values())


def is_complete(save: Checkpoint, files: Collection[str]) -> bool:
    """Return whether ``files`` are all files of a near save. Rule *all_pieces*."""
    return all(file.name in files for file in save.manifest.files)


def host_of(near_dir: NearDir) -> HostSeen | None:
    try:
        # The id and the identity of its file, because a near dir copied from another host has the same id.
        host, file = near_dir.host(), Path(near_dir.storage.url_of(near_seal.NEAR_HOST)).stat()
        return host, file.st_ino, file.st_ctime_ns
    except OSError as error:
        log.warning("%s: near saves there are passed over: %s", near_dir.storage.url, error)
        return None


def _sealed(near_dir: NearDir) -> Sequence[Sealed]:
    try:
        return list(near_dir.sealed())
    except OSError as error:
        log.warning("%s: near saves there are passed over: %s", near_dir.storage.url, error)
        return ()


def counting(saves: Iterable[Checkpoint], listing: Listing, near_list: NearList) -> list[Checkpoint]:
    """Return the valid ones of ``saves``, each with its parents, newest first. All their files must be on some host."""
    # Rule *epoch_rule*: the list does not name saves that an overtaken writer seals afterwards.
    whole = [save for save in saves if near_list.counts(save.manifest.save_id)]
    # Rules *base_by_save_id* and *parent_is_name*: the parents of a near save are found like those of a delta.
    saves = (c for c in chained([*listing.committed, *whole], listing.damaged)[0] if c.near_dir is not None)
    return sorted(saves, key=lambda save: save.manifest.order, reverse=True)  # rule *order_by_cut*


@dataclass(frozen=True)
class NearHere:
    save: Checkpoint
    n_shards: int
    n_here: int  # number of shards with all files on this host
    is_lost: bool  # whether a file is neither here nor, according to the seal, on another host
    is_elsewhere: bool  # whether, according to the seal, other hosts have all files


def near_saves_here(near_dir: NearDir) -> Iterator[NearHere]:
    """Yield the near saves of an output dir that are sealed on this host. Raises OSError if it cannot be read."""
    host = near_dir.known_host()
    for sealed in near_dir.sealed():
        save = near_dir.opened(sealed.directory, sealed.seal)
        if save is not None:
            seal = near_seal.decode(sealed.seal, sealed.directory)
            missing = {file.name for file in save.manifest.files} - sealed.files
            n_shards = len(save.manifest.shards)
            shard_of = _shards_of([file.name for file in save.manifest.files], n_shards)
            lacking = {shard_of[name] for name in missing}
            holders = ({hosts, *seal.copies.get(hosts, ())} for hosts in seal.hosts[:n_shards])
            away = {number for number, hosts in enumerate(holders) if hosts - {host}}
            yield NearHere(save, n_shards, n_shards - len(lacking), not lacking <= away, len(away) == n_shards)


def counting_here(storage: Storage, listing: Listing, near: Near) -> list[NearHere]:
    """Return the valid near saves of an output dir on this host, newest first, without taking over the output dir.

    If only some shards of a near save are here, the other hosts are assumed to have the rest. Raises
    CorruptCheckpointError or FormatVersionError if the newest list is damaged, or was written by a newer recckpt.
    """
    here = {each.save.directory: each for each in near_saves_here(NearDir.of(near, storage.url)) if not each.is_lost}
    near_list = last_takeover(storage).near  # rule *list_read_last*
    saves = counting([each.save for each in here.values()], listing, near_list)
    return [replace(here[save.directory], save=save) for save in saves]


def _shards_of(names: Sequence[str], n_shards: int) -> dict[str, int]:
    """Return the shard that wrote each file, by the file's name; without a shard in its name, the first shard."""
    named, begins = dict[str, int](), dict[str, int]()
    for number in range(n_shards):
        named |= {layout.of_rank(content, number): number for content in ("io_state", "extra", "rng")}
        indexes = layout.catalog(number, n_shards), layout.dense_index(number, n_shards)
        # Files of rows and tensors share a prefix, up to the first point, with the catalog or index that lists them.
        begins |= dict.fromkeys((index.partition(".")[0] for index in indexes), number)
    return {name: named.get(name, begins.get(name.partition(".")[0], 0)) for name in names}
