"""Writes a RecIS checkpoint as RecIS 1.0 does, by the description of its format alone."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

SIZE = 65_536
_DTYPES = {"float32": "F32", "float64": "F64", "int64": "I64", "int32": "I32", "bool": "bool", "float16": "F16"}
Tables = dict[str, dict[str, np.ndarray]]  # table -> slot -> values of all ranks, "id" among them


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
