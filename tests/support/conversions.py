"""Rows and files that the tests of conversions are made of, and checkpoints read back as numpy arrays."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from recckpt import CheckpointReader
from recckpt.convert import ImportPlan, import_checkpoint
from recckpt.sparse.files.arrow_format import column_buffer

Columns = dict[str, np.ndarray]


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
