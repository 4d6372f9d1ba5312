"""Writes deltas and forms of one table by docs/format.md, section 12: what recckpt is to write, and damage of it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash
from spec_reader import Checkpoint, buckets_of

Vectors = Mapping[int, Sequence[float]]  # id -> embedding


def write_delta(
    base: Checkpoint, ckpt_id: str, rows: int, shards: Sequence[tuple[Vectors, Sequence[int]]], **changes: Any
) -> Checkpoint:
    """Write a delta of the only table of its base: rows and deleted ids of each shard.

    Args:
        base: on which it stands.
        ckpt_id: its id and directory.
        rows: of the table in this checkpoint.
        shards: what each holds.
        changes: other fields of the manifest, or of the table's entry, than those of a good one.
    """
    directory, save_id = base.directory.parent / ckpt_id, secrets.token_hex(16)
    files = _files(directory, save_id, base.manifest["tables"][0], shards)
    upserts, deletes = (sum(len(shard[k]) for shard in shards) for k in (0, 1))
    below = {"ckpt_id": base.manifest["ckpt_id"], "save_id": base.origin, "directory": base.directory.name}
    delta = {"upserts": upserts, "deletes": deletes, "replaced": changes.pop("replaced", False)}
    manifest = {
        **base.manifest,
        "ckpt_id": ckpt_id,
        "save_id": save_id,
        "kind": "delta",
        "parent": {**below, "manifest": base.checksum},
        "chain": [below, *base.manifest.get("chain", [])],
        "seq": base.place[1] + 1,
        "tables": [{**base.manifest["tables"][0], "rows": rows, "delta": delta}],
        **files,
        **changes,
    }
    manifest.pop("form_of", None)
    return _sealed(directory, manifest)


def write_form(delta: Checkpoint, vectors: Vectors, **changes: Any) -> Checkpoint:
    """Write an offer of a delta with these rows, adopted by the owner of the next epoch."""
    offer = secrets.token_hex(16)
    directory = delta.directory.parent / f"{delta.directory.name}.{offer}"
    entry = {key: value for key, value in delta.manifest["tables"][0].items() if key != "delta"}
    origin = {"save_id": delta.origin, "manifest": delta.checksum, "epoch": delta.place[0], "seq": delta.place[1]}
    manifest = {
        **{key: value for key, value in delta.manifest.items() if key != "chain"},
        "save_id": secrets.token_hex(16),
        "kind": "full",
        "parent": None,
        "epoch": delta.manifest["epoch"] + 1,
        "seq": delta.manifest["seq"] + 7,
        "tables": [entry],
        "form_of": {**origin, "offer": offer},
        **_files(directory, offer, entry, [(vectors, ())]),
        **changes,
    }
    return _sealed(directory, manifest)


def _files(
    directory: Path, save_id: str, table: Mapping[str, Any], shards: Sequence[tuple[Vectors, Sequence[int]]]
) -> dict[str, Any]:
    """Write parts and catalogs; return the fields of the manifest that list them."""
    (directory / "sparse").mkdir(parents=True)
    files, entries = [], []
    for shard, (vectors, deletes) in enumerate(shards):
        name, parts = f"sparse/{shard:05}-of-{len(shards):05}", []
        if vectors:
            parts.append(_part(directory, f"{name}.g0.00.arrow", table["name"], vectors))
        if deletes:
            part = _part(directory, f"{name}.deletes.00.arrow", table["name"], dict.fromkeys(deletes))
            parts.append({**part, "holds": "deletes"})
        catalog = {"format": "recckpt-catalog", "version": 1, "save_id": save_id, "shard": shard, "shards": len(shards)}
        data = json.dumps({**catalog, "parts": parts}).encode()
        (directory / f"{name}.json").write_bytes(data)
        files += [{"name": part["file"], "bytes": part["bytes"]} for part in parts]
        files.append({"name": f"{name}.json", "bytes": len(data), "xxh3": xxhash.xxh3_64_hexdigest(data)})
        ranges = [part["batches"][0]["buckets"] for part in parts]
        covered = [min(r[0] for r in ranges), max(r[1] for r in ranges)] if ranges else [0, 0]
        entries.append({"catalog": f"{name}.json", "buckets": covered})
    return {"files": files, "shards": entries}


def _part(directory: Path, name: str, table: str, vectors: Mapping[int, Sequence[float] | None]) -> dict[str, Any]:
    """Write a part of one batch; ids without a vector are deletes."""
    ids = np.array(list(vectors), np.int64)
    ids = ids[np.argsort(buckets_of(ids), kind="stable")]
    values: dict[str, npt.NDArray[Any]] = {"table": np.zeros(len(ids), np.int16), "id": ids}
    columns = {
        "table": pa.DictionaryArray.from_arrays(pa.array(values["table"]), pa.array([table])),
        "id": pa.array(ids),
    }
    if None not in vectors.values():
        values["embedding"] = np.array([vectors[i] for i in ids.tolist()], np.float32)
        flat = pa.array(values["embedding"].reshape(-1))
        columns["embedding"] = pa.FixedSizeListArray.from_arrays(flat, values["embedding"].shape[1])
    batch = pa.record_batch(list(columns.values()), names=list(columns))
    with pa.OSFile(str(directory / name), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    order = buckets_of(ids)
    entry = {
        "table": 0,
        "rows": len(ids),
        "buckets": [int(order[0]), int(order[-1]) + 1],
        "xxh3": {column: xxhash.xxh3_64_hexdigest(found.tobytes()) for column, found in values.items()},
    }
    data = (directory / name).read_bytes()
    return {"file": name, "bytes": len(data), "frame": _frame(data), "tables": [table], "batches": [entry]}


def _frame(data: bytes) -> str:
    """Return the checksum of all bytes that are not column values."""
    whole, frame, done = pa.py_buffer(data), xxhash.xxh3_64(), 0
    with pa.ipc.open_file(whole) as reader:
        for column in reader.get_batch(0).columns:
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
