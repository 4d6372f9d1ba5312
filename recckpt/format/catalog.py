"""The catalog of a shard: its parts, their batches and checksums (docs/format.md, section 4)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from recckpt.errors import CorruptCheckpointError
from recckpt.format.json_fields import Fields, encode_of_shard, parse_of_shard
from recckpt.format.manifest import Manifest
from recckpt.format.safe_names import checked_name
from recckpt.format.shards import IdRange
from recckpt.types import SlotSpec

FORMAT = "recckpt-catalog"  # part of the format
VERSION = 1  # part of the format
MAX_BYTES = 1 << 30  # part of the format

PartKind = Literal["rows", "deletes"]  # what a part consists of: whole rows, or ids alone


@dataclass(frozen=True)
class Batch:
    """One record batch: rows of one table, in bucket order."""

    table: str
    rows: int  # at least 1
    buckets: tuple[int, int]  # [begin, end) of its first and last row
    ids: IdRange  # by which a reader of this batch alone can see that no other has one of its ids
    xxh3: dict[str, int]  # column name -> checksum of its values


@dataclass(frozen=True)
class Part:
    """One Arrow file."""

    file: str  # name in the checkpoint
    n_bytes: int
    frame: int  # checksum of all bytes but the column values
    tables: tuple[str, ...]  # the dictionary of its ``table`` column
    batches: tuple[Batch, ...]  # in file order
    holds: PartKind = "rows"


@dataclass(frozen=True)
class Catalog:
    """All that one shard wrote of its tables."""

    save_id: str
    shard: int
    shards: int
    parts: tuple[Part, ...]
    buckets: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        ranges = [batch.buckets for part in self.parts for batch in part.batches]
        object.__setattr__(
            self, "buckets", (min(r[0] for r in ranges), max(r[1] for r in ranges)) if ranges else (0, 0)
        )

    @cached_property
    def ids(self) -> Mapping[str, IdRange]:
        """The range of the ids of its rows by table, of the tables that have any."""
        return id_ranges(self.parts)

    @property
    def rows(self) -> dict[str, int]:
        """Rows by table, of the tables that have any."""
        return self._counted("rows")

    @property
    def deletes(self) -> dict[str, int]:
        """Deleted ids by table, of the tables that have any."""
        return self._counted("deletes")

    def parts_of(self, table: str, kind: PartKind) -> Iterator[tuple[Part, list[int]]]:
        """Yield the parts that hold rows, or deleted ids, of a table, each with the numbers of its batches of them."""
        for part in self.parts:
            numbers = [number for number, batch in enumerate(part.batches) if batch.table == table]
            if part.holds == kind and numbers:
                yield part, numbers

    def _counted(self, kind: PartKind) -> dict[str, int]:
        counts: dict[str, int] = {}
        for part in self.parts:
            for batch in part.batches if part.holds == kind else ():
                counts[batch.table] = counts.get(batch.table, 0) + batch.rows
        return counts


def id_ranges(parts: Iterable[Part]) -> dict[str, IdRange]:
    """Return the range of the ids of rows by table, of the tables that have any in these parts."""
    ranges: dict[str, IdRange] = {}
    for batch in (batch for part in parts if part.holds == "rows" for batch in part.batches):
        least, greatest = ranges.get(batch.table, batch.ids)
        ranges[batch.table] = min(least, batch.ids[0]), max(greatest, batch.ids[1])
    return ranges


def encode(catalog: Catalog) -> bytes:
    """Return the bytes of a catalog file; ValueError if it is too large to be read back."""
    shard = (catalog.save_id, catalog.shard, catalog.shards)
    data = encode_of_shard(FORMAT, VERSION, shard, "parts", map(_part_json, catalog.parts))
    if len(data) > MAX_BYTES:
        raise ValueError(
            f"the catalog of shard {catalog.shard} would have {len(data)} bytes, at most {MAX_BYTES} are read back: "
            "save on more ranks"
        )
    return data


def decode(data: bytes, path: str, manifest: Manifest, shard: int) -> Catalog:
    """Return the catalog in ``data``, checked against its manifest.

    Raises CorruptCheckpointError where it is not a whole catalog of this shard of this save, FormatVersionError where a
    newer format wrote it.
    """
    if len(data) > MAX_BYTES:
        raise CorruptCheckpointError(path, "its size", found=f"{len(data)} bytes", expected=f"at most {MAX_BYTES}")
    of = (manifest.files_id, shard, len(manifest.shards))
    fields = parse_of_shard(data, path, FORMAT, VERSION, of)
    return Catalog(*of, tuple(_part(entry, manifest) for entry in fields.objects("parts")))


def _part_json(part: Part) -> str:
    numbers = {name: number for number, name in enumerate(part.tables)}
    head: dict[str, Any] = {
        "file": part.file,
        "bytes": part.n_bytes,
        "frame": f"{part.frame:016x}",
        "tables": list(part.tables),
    }
    if part.holds == "deletes":
        head["holds"] = part.holds
    names = {name: json.dumps(name) for name in set[str]().union(*(batch.xxh3 for batch in part.batches))}
    batches = ",\n".join(_batch_json(batch, numbers[batch.table], names) for batch in part.batches)
    return f'{json.dumps(head)[:-1]}, "batches": [\n{batches}\n]}}'


def _batch_json(batch: Batch, table: int, names: Mapping[str, str]) -> str:
    """Return what ``json.dumps`` would, in half the time: a rank of 100 GB has 12,800 batches."""
    sums = ", ".join(f'{names[name]}: "{value:016x}"' for name, value in batch.xxh3.items())
    head = f'{{"table": {table}, "rows": {batch.rows}, "buckets": {list(batch.buckets)}, "ids": {list(batch.ids)}'
    return f'{head}, "xxh3": {{{sums}}}}}'


def _part(fields: Fields, manifest: Manifest) -> Part:
    file, n_bytes = checked_name(fields.text("file"), fields.path), fields.count("bytes")
    listed = manifest.file(file)
    if listed is None or listed.n_bytes != n_bytes:
        raise fields.wrong("file", f"{file} of {n_bytes} bytes", "a file that the manifest lists with this size")
    tables = fields.texts("tables")
    holds = _holds(fields, manifest)
    slots = _slots(fields, tables, manifest) if holds == "rows" else ()
    columns = {"table", "id", *(slot.name for slot in slots)}
    batches = tuple(_batch(entry, tables, columns) for entry in fields.objects("batches"))
    value_bytes = sum(batch.rows for batch in batches) * (2 + 8 + sum(slot.row_bytes for slot in slots))
    if value_bytes > n_bytes:  # or the loader would make room for rows that are not there
        raise fields.wrong("batches", f"rows of {value_bytes} bytes", f"less than the {n_bytes} of the file")
    return Part(file, n_bytes, fields.checksum("frame"), tuple(tables), batches, holds)


def _holds(fields: Fields, manifest: Manifest) -> PartKind:
    if not fields.has("holds") or fields.text("holds") == "rows":
        return "rows"
    if fields.text("holds") != "deletes" or manifest.kind != "delta":
        allowed = "'rows' or 'deletes'" if manifest.kind == "delta" else "'rows', in a full checkpoint"
        raise fields.wrong("holds", repr(fields.text("holds")), allowed)
    for table in fields.texts("tables"):
        if manifest.table(table) is None:
            raise fields.wrong("tables", repr(table), "a table that the manifest lists")
    return "deletes"


def _slots(fields: Fields, tables: list[str], manifest: Manifest) -> tuple[SlotSpec, ...]:
    """Return the slots that all tables of a part have."""
    slots: tuple[SlotSpec, ...] | None = None
    for table in tables:
        entry = manifest.table(table)
        if entry is None:
            raise fields.wrong("tables", repr(table), "a table that the manifest lists")
        if slots not in (None, entry.slots):
            raise fields.wrong("tables", f"{table!r} of other slots", "tables of one group")
        slots = entry.slots
    return slots or ()


def _batch(fields: Fields, tables: list[str], columns: set[str]) -> Batch:
    number = fields.count("table")
    if number >= len(tables):
        raise fields.wrong("table", str(number), f"less than {len(tables)}")
    checksums = fields.mapping("xxh3").checksums()
    if checksums.keys() != columns:
        raise fields.wrong("xxh3", str(sorted(checksums)), str(sorted(columns)))
    rows = fields.count("rows", low=1)
    return Batch(tables[number], rows, fields.buckets(), fields.id_range("ids"), checksums)
