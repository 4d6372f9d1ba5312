"""The shards of a checkpoint, as its manifest lists them (docs/format.md, section 3)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from recckpt.format import layout
from recckpt.format.json_fields import Fields
from recckpt.format.safe_names import checked_name

IdRange = tuple[int, int]  # the least and the greatest, both included

_MAX_RANGES = 1 << 16  # of all shards: every listing reads manifests, and tables times shards may be a million


@dataclass(frozen=True)
class ShardEntry:
    """Where a shard's catalog is, and which buckets [begin, end) and ids its rows have."""

    catalog: str
    buckets: tuple[int, int]
    ids: Mapping[str, IdRange] | None = None  # by table; None where only the catalog says that


def are_disjoint(ranges: Iterable[IdRange]) -> bool:
    """Say whether no two ranges of ids meet."""
    return all(before[1] < following[0] for before, following in pairwise(sorted(ranges)))


def overlap(spans: Sequence[tuple[int, int]]) -> bool:
    """Say whether any two ranges of buckets [begin, end) meet; empty ones do not."""
    ordered = sorted(span for span in spans if span[0] < span[1])
    return any(following[0] < before[1] for before, following in pairwise(ordered))


def in_manifest(shards: Sequence[ShardEntry]) -> tuple[ShardEntry, ...]:
    """Return what a manifest says of shards: their ids where buckets do not say which shard has an id."""
    n_ranges = sum(len(shard.ids or ()) for shard in shards)
    if n_ranges <= _MAX_RANGES and overlap([shard.buckets for shard in shards]):
        return tuple(shards)
    return tuple(replace(shard, ids=None) for shard in shards)


def shard_json(shard: ShardEntry) -> dict[str, Any]:
    """Return the JSON object of an entry."""
    entry: dict[str, Any] = {"catalog": shard.catalog, "buckets": list(shard.buckets)}
    return entry if shard.ids is None else {**entry, "ids": {name: list(ids) for name, ids in shard.ids.items()}}


def parse_shard(fields: Fields) -> ShardEntry:
    """Return the entry in a JSON object; CorruptCheckpointError for a wrong one."""
    catalog = checked_name(fields.text("catalog"), fields.path)
    return ShardEntry(catalog, fields.buckets(), fields.id_ranges("ids") if fields.has("ids") else None)


def check_shards(shards: Sequence[ShardEntry], files: Collection[str], tables: Collection[str], fields: Fields) -> None:
    """Raise CorruptCheckpointError where shards have other catalogs than they must, or ids of no table."""
    if not shards:
        raise fields.wrong("shards", "none", "at least one")
    for number, shard in enumerate(shards):
        name = layout.catalog(number, len(shards))
        if shard.catalog != name or name not in files:
            raise fields.wrong(f"shards[{number}].catalog", shard.catalog, f"{name}, listed")
        for table in (shard.ids or {}).keys() - tables:
            raise fields.wrong(f"shards[{number}].ids", f"a range of {table!r}", "tables that the manifest lists")
