"""The seal of a near save, ``near.json``: what a manifest is to a checkpoint (docs/format.md, section 16)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from recckpt.errors import CorruptCheckpointError
from recckpt.format import near_names
from recckpt.format.json_fields import check_seal, parse, seal
from recckpt.format.manifest import Manifest, parse_record, record_json

FORMAT = "recckpt-near"  # part of the format
VERSION = 1  # part of the format
MAX_BYTES = 64 << 20  # part of the format: as of a manifest
_SEAL = "near_xxh3"  # part of the format


@dataclass(frozen=True)
class NearSeal:
    """What is known of a near save without opening its other files.

    Attributes:
        manifest: as of a delta; its save id is the name of the near save.
        place: 16 hex digits of the output dir that it belongs to.
        hosts: of each shard, the host that wrote it.
        copies: of each host that has one, the other hosts that have the files of its shards too.
    """

    manifest: Manifest
    place: str
    hosts: tuple[str, ...]
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def encode(of: NearSeal) -> bytes:
    """Return the bytes of ``near.json``, sealed with their own checksum."""
    world = {"hosts": list(of.hosts), **({"copies": dict(of.copies)} if of.copies else {})}
    head = {"format": FORMAT, "version": VERSION, "place": of.place, "world": world}
    return seal({**head, **record_json(of.manifest)}, _SEAL)


def decode(data: bytes, path: str) -> NearSeal:
    """Return the seal in ``data``, the bytes of the file ``path``.

    Raises:
        CorruptCheckpointError: it is not a whole, sealed and consistent one of a delta.
        FormatVersionError: written by a newer format.
    """
    if len(data) > MAX_BYTES:
        raise CorruptCheckpointError(path, "its size", found=f"over {MAX_BYTES} bytes", expected="less")
    fields = parse(data, path)
    fields.check_format(FORMAT, VERSION)  # before the seal, as of a manifest
    manifest = parse_record(fields, check_seal(data, _SEAL, path))
    name = near_names.parse_near(manifest.save_id)
    if name is None or (name[0], name[2]) != (manifest.epoch, manifest.cut):
        raise fields.wrong("save_id", manifest.save_id, f"{manifest.epoch}.<nonce>.{manifest.cut}")
    if manifest.parent is None:
        raise fields.wrong("kind", "full", "delta")
    world = fields.mapping("world")
    hosts = tuple(world.texts("hosts"))
    if len(hosts) != len(manifest.shards):
        raise fields.wrong("world.hosts", f"{len(hosts)}", f"one for each of {len(manifest.shards)} shards")
    copies = world.named_texts("copies") if world.has("copies") else {}
    if not set(hosts).issuperset((*copies, *(host for there in copies.values() for host in there))):
        raise fields.wrong("world.copies", repr(copies), "hosts of world.hosts")
    return NearSeal(manifest, fields.text("place"), hosts, copies)
