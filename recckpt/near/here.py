"""Near saves as one host sees them: which shards of each are here, and which other hosts should have by its seal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from recckpt.format import layout, near_seal
from recckpt.format.near_seal import NearSeal
from recckpt.near.candidates import counting
from recckpt.near.near_dir import NearDir
from recckpt.near.options import Near
from recckpt.output_dir.claims import last_takeover
from recckpt.output_dir.listing import Checkpoint, Listing
from recckpt.storage import Storage


@dataclass(frozen=True)
class NearHere:
    """A near save as a host sees it.

    Attributes:
        save: what the seal says.
        n_shards: how many shards it has.
        n_here: of how many all files are here.
        is_lost: whether a file of it is neither here nor, by the seal, on another host.
        is_elsewhere: whether other hosts have all of it, by the seal, so that it outlives this one.
    """

    save: Checkpoint
    n_shards: int
    n_here: int
    is_lost: bool
    is_elsewhere: bool


def near_saves_here(near_dir: NearDir) -> Iterator[NearHere]:
    """Yield the near saves of an output dir that are sealed on this host.

    Raises:
        OSError: the directory cannot be read.
    """
    host = near_dir.known_host()
    for sealed in near_dir.sealed():
        save = near_dir.opened(sealed.directory, sealed.seal)
        if save is not None:
            seal = near_seal.decode(sealed.seal, sealed.directory)
            missing = {file.name for file in save.manifest.files} - sealed.files
            yield _as_seen(save, seal, missing, host)


def counting_here(storage: Storage, listing: Listing, near: Near) -> list[NearHere]:
    """Return the near saves of an output dir on this host that count, newest first; takes nothing over.

    Where a part of one is here they count as if all hosts which should have the rest did.

    Raises:
        CorruptCheckpointError, FormatVersionError: the list of the newest takeover is damaged, or of a newer recckpt.
        OSError: a directory cannot be read.
    """
    here = {each.save.directory: each for each in near_saves_here(NearDir.of(near, storage.url)) if not each.is_lost}
    near_list = last_takeover(storage).near_list  # rule *list_read_last*
    saves = counting(storage, [each.save for each in here.values()], listing, near_list)
    return [replace(here[save.directory], save=save) for save in saves]


def _as_seen(save: Checkpoint, seal: NearSeal, missing: set[str], host: str | None) -> NearHere:
    n_shards = len(save.manifest.shards)
    shard_of = _shards_of([file.name for file in save.manifest.files], n_shards)
    lacking = {shard_of[name] for name in missing}
    away = {number for number in range(n_shards) if {*_holders(seal, number)} - {host}}
    return NearHere(save, n_shards, n_shards - len(lacking), not lacking <= away, len(away) == n_shards)


def _holders(seal: NearSeal, shard: int) -> Iterator[str]:
    host = seal.hosts[shard]
    yield host
    yield from seal.copies.get(host, ())


def _shards_of(names: Sequence[str], n_shards: int) -> dict[str, int]:
    """Return the shard that wrote each file, as names say; the first one writes what is of none."""
    named, begins = dict[str, int](), dict[str, int]()
    for number in range(n_shards):
        named |= dict.fromkeys((layout.io_state(number), layout.extra_of(number), layout.rng(number)), number)
        indexes = layout.catalog(number, n_shards), layout.dense_index(number, n_shards)
        begins |= dict.fromkeys(map(_begin, indexes), number)  # rows and tensors are named as what lists them
    return {name: named.get(name, begins.get(_begin(name), 0)) for name in names}


def _begin(name: str) -> str:
    return name.partition(".")[0]
