"""Near saves on disk: their names, their seal, and the list of valid ones (docs/format.md, section 16)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from recckpt.format.codec import FileKind, JsonRecord, plain
from recckpt.format.layout import OWN_DIR
from recckpt.format.manifest import Manifest, manifest_of, record_json

NEAR_NOTES = f"{OWN_DIR}/near"
NEAR_ROOT = "recckpt-near"
NEAR_HOST = "host"
NEAR_URL = "output_dir"
NEAR_JSON = "near.json"
_PLACE = re.compile(r"[0-9a-f]{16}", re.ASCII)
_HOST = re.compile(r"[0-9a-f]{32}", re.ASCII)
_NEAR = re.compile(r"([1-9]\d{0,17})\.([0-9a-f]{32})[./]([1-9]\d{0,17})", re.ASCII)
MAX_BYTES = 64 << 20  # part of the format: as for a manifest
KIND = FileKind("recckpt-near", 1, "near_xxh3", MAX_BYTES)  # part of the format


def is_place(name: str) -> bool:
    """Return whether a directory has the name of a place, the checksum of an output dir."""
    return _PLACE.fullmatch(name) is not None


def is_host(text: str) -> bool:
    return _HOST.fullmatch(text) is not None


def host_note(host: str) -> str:
    return f"{NEAR_NOTES}/{host}.json"


def host_of_note(path: str) -> str:
    return path.rpartition("/")[2].removesuffix(".json")


def near_name(epoch: int, nonce: str, cut: int) -> str:
    """Return the name of a near save; its files contain this name instead of a save id."""
    return f"{epoch}.{nonce}.{cut}"


def near_dir(name: str) -> str:
    return "/".join(name.rsplit(".", 1))


def parse_near(name: str) -> tuple[int, str, int] | None:
    match = _NEAR.fullmatch(name)
    return (int(match[1]), match[2], int(match[3])) if match else None


@dataclass(frozen=True)
class NearList:
    """Which near saves a takeover declares valid.

    Attributes:
        by: ``<epoch>.<nonce>`` of the newest writer of near saves, whose near saves are valid; "" without such a
            writer.
        names: valid near saves of earlier writers.
        is_void: whether all near saves are invalid.
    """

    by: str = ""
    names: frozenset[str] = frozenset()
    is_void: bool = False

    def counts(self, name: str) -> bool:
        """Return whether a near save is valid. Rule *epoch_rule*: saves sealed by an overtaken writer are invalid."""
        return self.is_of_run(name) and not self.is_void

    def is_of_run(self, name: str) -> bool:
        """Return whether a writer of this output dir, known to the list, made the near save (rule *run_identity*)."""
        return name in self.names or (self.by != "" and name.startswith(f"{self.by}."))


@dataclass(frozen=True)
class NearSeal:
    """All that readers know of a near save without opening its other files.

    Attributes:
        manifest: of a delta; its save id is the name of the near save.
        place: 16 hex digits that identify its output dir.
        hosts: for each shard, the host that wrote it.
        copies: host -> the other hosts that have copies of the files it wrote.
    """

    manifest: Manifest
    place: str
    hosts: tuple[str, ...]
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class _World(JsonRecord, frozen=True):
    hosts: tuple[str, ...]
    copies: Mapping[str, tuple[str, ...]] = {}


def encode(of: NearSeal) -> bytes:
    world = plain(_World(of.hosts, of.copies))
    return KIND.encode({"place": of.place, "world": world, **record_json(of.manifest)})


def decode(data: bytes, path: str) -> NearSeal:
    """Return the seal in ``data``, the bytes of the file ``path``.

    Raises CorruptCheckpointError if ``data`` is not the complete seal of a delta, FormatVersionError if a newer
    format wrote it.
    """
    document = KIND.open(data, path)
    world, manifest = document.read(_World, "world"), manifest_of(document)
    hosts, copies = world.hosts, world.copies
    name = parse_near(manifest.save_id)
    if name is None or (name[0], name[2]) != (manifest.epoch, manifest.cut):
        raise document.wrong("save_id", manifest.save_id, f"{manifest.epoch}.<nonce>.{manifest.cut}")
    if manifest.parent is None:
        raise document.wrong("kind", "full", "delta")
    if len(hosts) != len(manifest.shards):
        raise document.wrong("world.hosts", len(hosts), f"one host for each of {len(manifest.shards)} shards")
    if not set(hosts).issuperset((*copies, *(host for there in copies.values() for host in there))):
        raise document.wrong("world.copies", repr(copies), "hosts of world.hosts")
    return NearSeal(manifest, document.text("place"), hosts, copies)
