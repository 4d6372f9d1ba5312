"""Rows and files that the tests of conversions are made of, those of RecIS 1.0 too, and checkpoints read back."""

import json
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.distributed import checkpoint as dcp

from recckpt import CheckpointReader
from recckpt.convert import ImportPlan, import_checkpoint
from recckpt.errors import ConversionError
from recckpt.sparse.files.arrow_format import column_buffer

Columns = dict[str, np.ndarray]
SIZE = 65_536
_DTYPES = {"float32": "F32", "float64": "F64", "int64": "I64", "int32": "I32", "bool": "bool", "float16": "F16"}
Tables = dict[str, dict[str, np.ndarray]]  # table -> slot -> values of all ranks, "id" among them


def some_rows(n_rows: int = 100, dim: int = 3, seed: int = 0) -> Columns:
    """Return rows with negative and large ids, by column, with a NaN and a negative zero among the values."""
    random = np.random.default_rng(seed)
    ids = random.integers(-(2**63), 2**63 - 1, n_rows, np.int64, endpoint=True)
    ids[: min(n_rows, 4)] = [0, -1, 2**63 - 1, -(2**63)][:n_rows]
    embedding = random.standard_normal((n_rows, dim)).astype(np.float32)
    embedding[:1, :2] = np.nan, -0.0
    return {"id": ids, "embedding": embedding, "count": np.arange(n_rows, dtype=np.int32)}


def vectors(values: np.ndarray) -> pa.Array:
    """Return a matrix as a column of Arrow."""
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def arrow_table(rows: Columns) -> pa.Table:
    """Return rows as a table of Arrow."""
    return pa.table({name: vectors(values) if values.ndim > 1 else values for name, values in rows.items()})


def import_rows(source: Path, out: Path, **options: Any) -> ImportPlan:
    """Import with a budget so small that rows go through several runs."""
    return import_checkpoint(source, out, budget_bytes=2_000, **options)


def table_bytes(path: Path, table: str) -> dict[int, dict[str, bytes]]:
    """Return what a checkpoint has of a table: id -> slot -> the bytes of its values."""
    found: dict[int, dict[str, bytes]] = {}
    with CheckpointReader(path) as reader:
        for batch in reader.table(table):
            ids = batch.column("id").to_pylist()
            columns = {name: bytes(column_buffer(batch.column(name))) for name in batch.schema.names if name != "id"}
            for number, id_ in enumerate(ids):
                found[id_] = {name: part(data, number, len(ids)) for name, data in columns.items()}
    return found


def part(data: bytes, number: int, count: int) -> bytes:
    """Return one of so many equal parts of some bytes."""
    size = len(data) // count
    return data[number * size : (number + 1) * size]


def rows_bytes(rows: Mapping[str, np.ndarray]) -> dict[int, dict[str, bytes]]:
    """Return the same of rows."""
    slots = {name: values for name, values in rows.items() if name != "id"}
    return {int(id_): {name: values[n].tobytes() for name, values in slots.items()} for n, id_ in enumerate(rows["id"])}


def write_recis(
    path: Path,
    tables: Tables,
    *,
    ranks: int = 2,
    parallel: int = 4,
    scalars: dict[str, np.ndarray] | None = None,
    model: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
    positions: list[dict[str, Any]] | None = None,
) -> Path:
    """Write the files of all ranks into a directory ``ckpt_<step>``."""
    path.mkdir(parents=True)
    files: dict[str, int] = {}
    blocks: dict[str, int] = {}
    keys: dict[str, str] = {}
    for rank in range(ranks):
        dealt: list[dict[str, np.ndarray]] = [{} for _ in range(parallel)]
        turn = 0
        for key, internal, values in rank_blocks(tables, rank, ranks):
            dealt[turn % parallel][key] = values
            keys[key] = internal
            turn += 1
        for name, value in (scalars or {}).items() if rank == 0 else ():
            dealt[turn % parallel][f"{name}^ "] = value
            turn += 1
        for writer, held in enumerate(dealt):
            number = rank * parallel + writer
            if held:  # a writer without blocks makes no file
                name = f"model-{number:06d}-of-{ranks * parallel - 1:06d}.safetensors"
                (path / name).write_bytes(safetensors_bytes(held))
                files[name] = number
                blocks |= dict.fromkeys(held, number)
    (path / "index").write_text(json.dumps({"file_index": files, "block_index": blocks}, separators=(",", ":")))
    (path / "tensorkey.json").write_text(json.dumps(keys, indent=4))
    (path / "torch_rank_weights_embs_table_multi_shard.json").write_text("{}")
    if model is not None:
        torch.save(model, path / "model.pt")
    if extra is not None:
        torch.save(extra, path / "extra.pt")
    for rank, position in enumerate(positions or []):
        torch.save(position, path / f"io_state_{rank}.pt")
    if positions:
        (path / "io_state_count").write_text(str(len(positions)))
    return path


def rank_blocks(tables: Tables, rank: int, ranks: int) -> list[tuple[str, str, np.ndarray]]:
    """Return (key, internal name, values) of the blocks of one rank."""
    begins = [sum(SIZE // ranks + (r < SIZE % ranks) for r in range(n)) for n in range(ranks + 1)]
    begin, end = begins[rank], begins[rank + 1]
    text = f"{begin:05d}@{end:05d}@{SIZE}"
    found = []
    for table, slots in tables.items():
        rest = slots["id"].view(np.uint64) % SIZE
        own = np.flatnonzero((rest >= begin) & (rest < end))[::-1]
        for slot, values in slots.items():
            found.append((f"{table}.{slot}/part_{rank}_{ranks}", f"{table}@{slot}^{text}", values[own]))
    return found


def safetensors_bytes(tensors: dict[str, np.ndarray]) -> bytes:
    """Return a file as RecIS writes it: no metadata, bool in lower case, one space of padding at least."""
    header, data = {}, b""
    for name, values in tensors.items():
        begin, data = len(data), data + np.ascontiguousarray(values).tobytes()
        offsets = [begin, len(data)]
        header[name] = {"dtype": _DTYPES[values.dtype.name], "shape": list(values.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (8 - len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


class Code:
    """What a pickle would run that is read by a careless reader."""

    def __reduce__(self):
        return print, ("this must not run",)


def save_torch(state, path):
    torch.save(state, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def save_dcp(state, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    return path


def refused(source, match, out=None, **options):
    """Check that an import is refused, and writes nothing; return the error."""
    out = source.parent / "out" if out is None else out
    with pytest.raises(ConversionError, match=match) as error:
        import_checkpoint(source, out, **{"budget_bytes": 500, **options})
    assert not out.exists()
    assert not list(source.parent.glob("recckpt-*"))
    return error.value
