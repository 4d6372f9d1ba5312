"""Reads the rows of a checkpoint by docs/format.md and nothing else: an independent judge, which knows no recckpt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

Rows = dict[int, dict[str, bytes]]  # id -> slot -> bytes
MAX_LINKS = 1000


class DamagedError(Exception):
    """What section 12.3 calls damage."""


@dataclass(frozen=True)
class Checkpoint:
    """A manifest that counts, and where it is."""

    directory: Path
    manifest: dict[str, Any]

    @property
    def supersedes(self) -> dict[str, Any]:
        """The save that it holds anew; empty where it holds none."""
        return self.manifest.get("supersedes") or {}

    @property
    def place(self) -> tuple[int, int]:
        """Where it stands in the order of commits."""
        by = self.supersedes or self.manifest
        return by["epoch"], by["seq"]

    @property
    def order(self) -> tuple[tuple[int, int], tuple[int, int], str]:
        """The greatest of an id, or of a name, is the one that readers take."""
        return self.place, (self.manifest["epoch"], self.manifest["seq"]), self.manifest["save_id"]

    @property
    def name(self) -> tuple[str, str]:
        """Save id and checksum by which a delta names its rows."""
        if self.supersedes and self.supersedes["rows"] == "same":
            return self.supersedes["save_id"], self.supersedes["manifest"]
        return self.manifest["save_id"], self.manifest["manifest_xxh3"]

    def table(self, name: str) -> dict[str, Any]:
        """Return the entry of a table."""
        for table in self.manifest["tables"]:
            if table["name"] == name:
                return dict(table)
        raise DamagedError(f"{self.directory.name} lacks the table {name}")


def buckets_of(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the bucket of each id (section 1)."""
    z = ids.astype(np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    buckets: npt.NDArray[np.int64] = ((z ^ (z >> np.uint64(31))) >> np.uint64(48)).astype(np.int64)
    return buckets


def sealed(data: bytes, field: str) -> dict[str, Any]:
    """Return the object of a file that ends with a checksum of itself (section 3)."""
    body, _, _ = data.rpartition(f',\n  "{field}": "'.encode())
    found: dict[str, Any] = json.loads(data)
    if xxhash.xxh3_64_hexdigest(body) != found[field]:
        raise DamagedError(f"{field} does not match")
    return found


def counting(output_dir: Path) -> list[Checkpoint]:
    """Return the checkpoints that count, their own files included (sections 7 and 8)."""
    found = []
    for path in sorted(output_dir.glob("*/manifest.json")):
        manifest = sealed(path.read_bytes(), "manifest_xxh3")
        if all(_has_size(path.parent / file["name"], file["bytes"]) for file in manifest["files"]):
            found.append(Checkpoint(path.parent, manifest))
    lists = [sealed(path.read_bytes(), "owner_xxh3") for path in output_dir.glob(".recckpt/owner/*.list.json")]
    last: dict[str, Any] = max(lists, key=lambda each: each["epoch"], default={"epoch": 0, "committed": []})
    return [c for c in found if c.manifest["epoch"] >= last["epoch"] or c.manifest["save_id"] in last["committed"]]


def _has_size(path: Path, n_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == n_bytes


def named(save_id: str, checksum: str, among: list[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints of a name, the last first (section 12.3)."""
    return sorted((c for c in among if c.name == (save_id, checksum)), key=lambda c: c.order, reverse=True)


def chain(checkpoint: Checkpoint, among: list[Checkpoint], n_above: int = 0) -> list[Checkpoint] | None:
    """Return the links of a checkpoint, the newest first; None where one is missing (section 12.3)."""
    parent = checkpoint.manifest["parent"]
    if checkpoint.manifest["kind"] == "full":
        return [checkpoint]
    if n_above + 2 > MAX_LINKS:
        return None
    for below in named(parent["save_id"], parent["manifest"], among):
        if below.manifest["ckpt_id"] == parent["ckpt_id"] and below.place < checkpoint.place:
            links = chain(below, among, n_above + 1)
            if links is not None:
                return [checkpoint, *links]
    return None


def read(output_dir: Path, ckpt_id: str, table: str) -> Rows:
    """Return the rows of one table of the newest checkpoint of an id.

    Raises:
        DamagedError: the chain, a link or a checksum is not as it is to be.
    """
    among = counting(output_dir)
    newest = max((c for c in among if c.manifest["ckpt_id"] == ckpt_id), key=lambda c: c.order)
    same = named(*newest.name, among)
    links = next((links for c in same if (links := chain(c, among)) is not None), None)
    if links is None:
        raise DamagedError(f"{ckpt_id} has no whole chain")
    rows: Rows = {}
    known: set[int] = set()
    slots = links[0].table(table)["slots"]
    for link in links:
        entry = link.table(table)
        if entry["slots"] != slots:
            raise DamagedError(f"{link.directory.name} has other slots")
        upserts, deletes = _of_link(link, entry)
        rows.update((id_, row) for id_, row in upserts.items() if id_ not in known)
        known |= upserts.keys() | deletes
        if link.manifest["kind"] == "full" or entry["delta"]["replaced"]:
            break
    if len(rows) != links[0].table(table)["rows"]:
        raise DamagedError(f"{len(rows)} rows, expected {links[0].table(table)['rows']}")
    return rows


def _of_link(link: Checkpoint, entry: dict[str, Any]) -> tuple[Rows, set[int]]:
    """Return the rows and the deleted ids that one link holds of a table."""
    rows: Rows = {}
    deletes: set[int] = set()
    n_deletes = 0
    for shard in range(len(link.manifest["shards"])):
        in_shard: set[int] = set()
        for holds, ids, columns in _batches(link, shard, entry):
            new = set(ids.tolist())
            if len(new) < len(ids) or new & in_shard or (holds == "rows" and new & rows.keys()):
                raise DamagedError(f"{link.directory.name}: an id twice")
            in_shard |= new
            if holds == "deletes":
                deletes |= new
                n_deletes += len(ids)
            for row, id_ in enumerate(ids.tolist() if holds == "rows" else []):
                rows[id_] = {name: values[row].tobytes() for name, values in columns.items()}
    counts = entry.get("delta", {"upserts": entry["rows"], "deletes": 0})
    if (len(rows), n_deletes) != (counts["upserts"], counts["deletes"]):
        raise DamagedError(f"{link.directory.name}: {len(rows)} rows and {n_deletes} deletes, expected {counts}")
    return rows, deletes


def _batches(
    link: Checkpoint, shard: int, entry: dict[str, Any]
) -> Iterator[tuple[str, npt.NDArray[np.int64], dict[str, npt.NDArray[np.uint8]]]]:
    """Yield what the batches of a table hold, checked (sections 4 and 5)."""
    catalog = json.loads((link.directory / link.manifest["shards"][shard]["catalog"]).read_bytes())
    if catalog["save_id"] != link.manifest["save_id"]:
        raise DamagedError(f"{link.directory.name}: the catalog of another save")
    for part in catalog["parts"]:
        with pa.ipc.open_file(link.directory / part["file"]) as file:
            for number, batch in enumerate(part["batches"]):
                if part["tables"][batch["table"]] != entry["name"]:
                    continue
                found = file.get_batch(number)
                values = {name: _bytes_of(found.column(name)) for name in found.schema.names}
                for name, expected in batch["xxh3"].items():
                    if xxhash.xxh3_64_hexdigest(values[name].tobytes()) != expected:
                        raise DamagedError(f"{part['file']}, batch {number}, {name}: another checksum")
                ids = values.pop("id").reshape(-1).view(np.int64)
                order = buckets_of(ids)
                if [order[0], order[-1] + 1] != batch["buckets"] or (np.diff(order) < 0).any():
                    raise DamagedError(f"{part['file']}, batch {number}: not in the order of buckets")
                if [ids.min(), ids.max()] != batch["ids"]:
                    raise DamagedError(f"{part['file']}, batch {number}: ids of another range")
                values.pop("table")
                yield part.get("holds", "rows"), ids, values


def _bytes_of(column: pa.Array) -> npt.NDArray[np.uint8]:
    """Return the values of a column, one row each."""
    n_rows = len(column)
    column = column.storage if isinstance(column, pa.ExtensionArray) else column
    column = column.indices if isinstance(column, pa.DictionaryArray) else column
    column = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
    width = column.type.bit_width // 8
    data = np.frombuffer(column.buffers()[1], np.uint8)[column.offset * width :][: len(column) * width]
    return data.reshape(n_rows, -1)
