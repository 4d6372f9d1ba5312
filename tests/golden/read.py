"""Reads an edition without torch: ``python tests/golden/read.py EDITION_DIR`` says where it is not what was written.

Prints a line of JSON, family -> what differs there, and ends with 1 where something does. Knows recckpt as a reader
does who never had torch.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from recckpt import CheckpointReader
from recckpt.types import SlotSpec


def differing(family: Path) -> list[str]:
    """Return where the checkpoints of a family differ from what was noted of them."""
    expected = json.loads((family / "expected.json").read_text("utf-8"))["checkpoints"]
    try:
        return [line for name, content in expected.items() for line in _of_checkpoint(family / name, content)]
    except Exception as error:
        return [repr(error)]


def _of_checkpoint(path: Path, content: dict[str, Any]) -> Iterator[str]:
    with CheckpointReader(path) as reader:
        tables = {name: _table(reader, name) for name in reader.tables()}
        unseen = [name for name, table in tables.items() if not _is_looked_up(reader, name, table)]
        dense = {name: _tensor(reader, name) for name in reader.tensor_names()}
    yield from (f"{path.name}: look-ups in {name!r}" for name in unseen)
    for found, expected in ((tables, content["tables"]), (dense, content["dense"])):
        yield from (
            f"{path.name}: {name!r}" for name in found.keys() | expected if found.get(name) != expected.get(name)
        )


def _table(reader: CheckpointReader, name: str) -> dict[str, Any]:
    """Return the rows of a table in the order of their ids."""
    slots = [slot for slot in reader.manifest.named_table(name).slots if not slot.name.startswith("average_")]
    batches = list(reader.table(name))
    ids = np.concatenate([batch.column("id").to_numpy() for batch in batches] or [np.empty(0, np.int64)])
    order = np.argsort(ids)
    return {"ids": ids[order].tolist(), "slots": {slot.name: _slot(slot, batches, order) for slot in slots}}


def _is_looked_up(reader: CheckpointReader, name: str, table: dict[str, Any]) -> bool:
    """Say whether the first ids of a table are found by the buckets that they must be in, and no other."""
    ids = table["ids"][:3]
    asked = [*ids, min(set(range(len(table["ids"]) + 1)).difference(table["ids"]))]
    return sorted(id_ for batch in reader.table(name, ids=asked) for id_ in batch.column("id").to_pylist()) == ids


def _slot(slot: SlotSpec, batches: list[pa.RecordBatch], order: Any) -> dict[str, Any]:
    rows = [_rows(batch.column(slot.name), slot.row_bytes) for batch in batches]
    values = np.concatenate(rows or [np.empty((0, slot.row_bytes), np.uint8)])[order]
    return {"dtype": slot.dtype, "shape": [len(order), *slot.shape], "hex": values.tobytes().hex()}


def _rows(column: pa.Array, row_bytes: int) -> Any:
    """Return the bytes of a column, one row each."""
    n_rows = len(column)
    column = column.storage if isinstance(column, pa.ExtensionArray) else column
    column = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
    width = column.type.bit_width // 8
    data = np.frombuffer(column.buffers()[1], np.uint8)[column.offset * width :][: len(column) * width]
    return data.reshape(n_rows, row_bytes)


def _tensor(reader: CheckpointReader, name: str) -> dict[str, Any]:
    values = reader.read_tensor(name).tobytes().hex()
    return {"dtype": reader.tensor_dtype(name), "shape": list(reader.tensor_shape(name)), "hex": values}


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]  # whoever imports it fails
    families = sorted(path.parent for path in Path(sys.argv[1]).glob("*/expected.json"))
    found = {family.name: differing(family) for family in families}
    print(json.dumps(found))
    sys.exit(1 if any(found.values()) else 0)
