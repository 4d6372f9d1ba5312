"""Writes full checkpoints, deltas and compacted ones by docs/format.md: what recckpt is to write, and damage of it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from support.spec_reader import Checkpoint, buckets_of

Vectors = Mapping[int, Sequence[float]]  # id -> the numbers of its slots, one after another; all slots are float32
Shards = Sequence[tuple[Vectors, Sequence[int]]]  # rows and deleted ids of each


@dataclass(frozen=True)
class Held:
    """What a checkpoint holds of a table.

    Attributes:
        rows: of the table in the checkpoint.
        shards: what each shard has; as many for all tables.
        replaced: whether nothing older counts.
        slots: name -> shape of each; the embedding first.
        live: how it was live; None where it was not.
    """

    rows: int
    shards: Shards
    replaced: bool = False
    slots: tuple[tuple[str, tuple[int, ...]], ...] = (("embedding", (2,)),)
    live: Mapping[str, Any] | None = None

    def entry(self, name: str, *, of_delta: bool) -> dict[str, Any]:
        """Return what a manifest says of it."""
        slots = [{"name": slot, "dtype": "float32", "shape": list(shape)} for slot, shape in self.slots]
        entry: dict[str, Any] = {"name": name, "rows": self.rows, "slots": slots}
        if of_delta:
            upserts, deletes = (sum(len(shard[k]) for shard in self.shards) for k in (0, 1))
            entry["delta"] = {"upserts": upserts, "deletes": deletes, "replaced": self.replaced}
        return entry if self.live is None else {**entry, "live": dict(self.live)}


def write_full(output_dir: Path, ckpt_id: str, tables: Mapping[str, Held], **changes: Any) -> Checkpoint:
    """Write a full checkpoint of tables and of nothing else; ``changes`` as of :func:`write_delta`."""
    directory, save_id = output_dir / ckpt_id, secrets.token_hex(16)
    manifest = {
        "format": "recckpt",
        "version": 1,
        "checksum": "xxh3_64",
        "ckpt_id": ckpt_id,
        "save_id": save_id,
        "kind": "full",
        "parent": None,
        "epoch": 1,
        "seq": 1,
        "step": None,
        "time": "2026-01-01T00:00:00Z",
        **_tables(directory, save_id, tables, of_delta=False),
        "names": {"dense": [], "extra": [], "io_state": []},
        "state": {},
        "flags": {"ephemeral": False},
        "writer": {},
        **changes,
    }
    return _sealed(directory, manifest)


def write_delta(base: Checkpoint, ckpt_id: str, rows: int, shards: Shards, **changes: Any) -> Checkpoint:
    """Write a delta of the only table of its base; arguments of :class:`Held`, and of :func:`write_delta_of`."""
    [entry] = base.manifest["tables"]
    slots = tuple((slot["name"], tuple(slot["shape"])) for slot in entry["slots"])
    held = Held(rows, shards, changes.pop("replaced", False), slots, changes.pop("live", entry.get("live")))
    return write_delta_of(base, ckpt_id, {entry["name"]: held}, **changes)


def write_delta_of(base: Checkpoint, ckpt_id: str, tables: Mapping[str, Held], **changes: Any) -> Checkpoint:
    """Write a delta of tables.

    Args:
        base: on which it stands.
        ckpt_id: its id and directory.
        tables: what it holds of them.
        changes: other fields of the manifest than those of a good one.
    """
    directory, save_id = base.directory.parent / ckpt_id, secrets.token_hex(16)
    below = {"ckpt_id": base.manifest["ckpt_id"], "save_id": base.name[0], "directory": base.directory.name}
    manifest = {
        **base.manifest,
        "ckpt_id": ckpt_id,
        "save_id": save_id,
        "kind": "delta",
        "parent": {**below, "manifest": base.name[1]},
        "chain": [below, *base.manifest.get("chain", [])],
        "seq": base.place[1] + 1,
        **_tables(directory, save_id, tables, of_delta=True),
        **changes,
    }
    manifest.pop("supersedes", None)
    return _sealed(directory, manifest)


def write_compacted(delta: Checkpoint, vectors: Vectors, **changes: Any) -> Checkpoint:
    """Write what supersedes a delta, with these rows, adopted by the owner of the next epoch."""
    save_id = secrets.token_hex(16)
    directory = delta.directory.parent / f"{delta.directory.name}.{save_id}"
    [entry] = delta.manifest["tables"]
    slots = tuple((slot["name"], tuple(slot["shape"])) for slot in entry["slots"])
    of = {"save_id": delta.manifest["save_id"], "manifest": delta.manifest["manifest_xxh3"], "rows": "same"}
    of |= {"directory": delta.directory.name, "epoch": delta.place[0], "seq": delta.place[1], "why": "compacted"}
    manifest = {
        **{key: value for key, value in delta.manifest.items() if key != "chain"},
        "save_id": save_id,
        "kind": "full",
        "parent": None,
        "epoch": delta.manifest["epoch"] + 1,
        "seq": delta.manifest["seq"] + 7,
        "supersedes": of,
        **_tables(
            directory,
            save_id,
            {entry["name"]: Held(entry["rows"], [(vectors, ())], slots=slots, live=entry.get("live"))},
            of_delta=False,
        ),
        **changes,
    }
    return _sealed(directory, manifest)


def _tables(directory: Path, save_id: str, tables: Mapping[str, Held], *, of_delta: bool) -> dict[str, Any]:
    """Write parts and catalogs, of which each table has a group; return the fields of the manifest that list them."""
    (directory / "sparse").mkdir(parents=True)
    files, entries = [], []
    [shards] = {len(held.shards) for held in tables.values()} or {1}
    for shard in range(shards):
        name, parts = f"sparse/{shard:05}-of-{shards:05}", []
        for group, (table, held) in enumerate(tables.items()):
            if held.shards[shard][0]:
                rows = {table: held.shards[shard][0]}
                parts.append(_part(directory, f"{name}.g{group}.00.arrow", rows, held.slots))
        gone = {table: dict.fromkeys(held.shards[shard][1], ()) for table, held in tables.items()}
        if any(gone.values()):
            deletes = {table: ids for table, ids in gone.items() if ids}
            parts.append({**_part(directory, f"{name}.deletes.00.arrow", deletes, ()), "holds": "deletes"})
        catalog = {"format": "recckpt-catalog", "version": 1, "save_id": save_id, "shard": shard, "shards": shards}
        data = json.dumps({**catalog, "parts": parts}).encode()
        (directory / f"{name}.json").write_bytes(data)
        files += [{"name": part["file"], "bytes": part["bytes"]} for part in parts]
        files.append({"name": f"{name}.json", "bytes": len(data), "xxh3": xxhash.xxh3_64_hexdigest(data)})
        ranges = [batch["buckets"] for part in parts for batch in part["batches"]]
        covered = [min(r[0] for r in ranges), max(r[1] for r in ranges)] if ranges else [0, 0]
        own = {table: held.shards[shard][0] for table, held in tables.items()}
        ids = {table: [min(rows), max(rows)] for table, rows in own.items() if rows}
        entries.append({"catalog": f"{name}.json", "buckets": covered, "ids": ids})
    listed = [held.entry(table, of_delta=of_delta) for table, held in tables.items()]
    return {"tables": listed, "files": files, "shards": entries}


def _part(
    directory: Path, name: str, tables: Mapping[str, Vectors], slots: Sequence[tuple[str, tuple[int, ...]]]
) -> dict[str, Any]:
    """Write a part, a batch a table; without slots, of deleted ids."""
    batches, entries, dictionary = [], [], pa.array(list(tables))
    for number, vectors in enumerate(tables.values()):
        ids = np.array(list(vectors), np.int64)
        order = buckets_of(ids := ids[np.argsort(buckets_of(ids), kind="stable")])
        values: dict[str, npt.NDArray[Any]] = {"table": np.full(len(ids), number, np.int16), "id": ids}
        columns = [pa.DictionaryArray.from_arrays(pa.array(values["table"]), dictionary), pa.array(ids)]
        numbers, done = np.array([vectors[i] for i in ids.tolist()], np.float32).reshape(len(ids), -1), 0
        for slot, shape in slots:
            width = int(np.prod(shape))
            values[slot] = np.ascontiguousarray(numbers[:, done : done + width])
            flat, done = pa.array(values[slot].reshape(-1)), done + width
            columns.append(pa.FixedSizeListArray.from_arrays(flat, width) if shape else flat)
        batches.append(pa.record_batch(columns, names=list(values)))
        sums = {column: xxhash.xxh3_64_hexdigest(found.tobytes()) for column, found in values.items()}
        buckets = [int(order[0]), int(order[-1]) + 1]
        of_ids = [int(ids.min()), int(ids.max())]
        entries.append({"table": number, "rows": len(ids), "buckets": buckets, "ids": of_ids, "xxh3": sums})
    with pa.OSFile(str(directory / name), "wb") as sink, pa.ipc.new_file(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    data = (directory / name).read_bytes()
    return {"file": name, "bytes": len(data), "frame": _frame(data), "tables": list(tables), "batches": entries}


def _frame(data: bytes) -> str:
    """Return the checksum of all bytes that are not column values."""
    whole, frame, done = pa.py_buffer(data), xxhash.xxh3_64(), 0
    with pa.ipc.open_file(whole) as reader:
        for column in (column for n in range(reader.num_record_batches) for column in reader.get_batch(n).columns):
            column = column.indices if isinstance(column, pa.DictionaryArray) else column
            column = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
            begin = column.buffers()[1].address - whole.address
            frame.update(data[done:begin])
            done = begin + len(column) * column.type.bit_width // 8
    frame.update(data[done:])
    return frame.hexdigest()


def _sealed(directory: Path, manifest: dict[str, Any]) -> Checkpoint:
    """Write a manifest, which ends with a checksum of itself."""
    body = json.dumps({key: value for key, value in manifest.items() if key != "manifest_xxh3"}, indent=2)
    data = body.removesuffix("\n}").encode()
    seal = xxhash.xxh3_64_hexdigest(data)
    (directory / "manifest.json").write_bytes(data + f',\n  "manifest_xxh3": "{seal}"\n}}\n'.encode())
    return Checkpoint(directory, {**manifest, "manifest_xxh3": seal})
