"""torch.distributed.checkpoint without a process group: dense tensors, and the columns of tables as others."""

from __future__ import annotations

import tempfile
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from recckpt.convert.source import Array, LeftOut
from recckpt.convert.target_files import RECORDS, TargetFiles
from recckpt.convert.view import Export, TableView
from recckpt.errors import ConversionError
from recckpt.format.dtypes import NUMPY_DTYPES
from recckpt.storage.transfers import WorkDir
from recckpt.text import Progress

ALL_SLOTS, INCREMENTS, DTYPES = True, False, ("float16", "bfloat16", "int8")
_STEP_BYTES = 8 << 20


def write(export: Export, files: TargetFiles, progress: Progress) -> list[LeftOut]:
    """Write a checkpoint by the library itself, from files that are mapped, and take it to the target."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with ExitStack() as stack:
        state: dict[str, Any] = {}
        for name, tensor in export.tensors.model.items():
            state[name] = _torch(export.tensors.read(tensor).reshape(-1), tensor.dtype, tensor.shape)
        for table in export.tables:
            for name, values, dtype in _columns(table, stack, progress):
                if name in state:
                    found, expected = "a dense tensor and a column", "different names"
                    raise ConversionError(files.url, repr(name), found=found, expected=expected)
                state[name] = _torch(values.reshape(-1), dtype, values.shape)
            progress.add_rows(table.n_rows)
        made = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recckpt-")))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is what is meant
            save(state, storage_writer=FileSystemWriter(made), no_dist=True)
        del state
        for path in sorted(made.iterdir()):
            with path.open("rb") as source, files.create(path.name) as sink:
                while data := source.read(_STEP_BYTES):
                    sink.write(data)
    files.put_json(export.metadata(), RECORDS["dcp"])
    return []


def _columns(table: TableView, stack: ExitStack, progress: Progress) -> list[tuple[str, Array, str]]:
    """Return (name, values, dtype) of the columns of a table, each in a file without a name."""
    specs = [("id", "int64", ()), *((slot.name, slot.dtype, slot.shape) for slot in table.slots)]
    columns: list[tuple[str, Array, str]] = []
    for name, dtype, shape in specs:
        file = stack.enter_context(WorkDir(tempfile.gettempdir()).new_file())
        whole = (table.n_rows, *shape)
        item = NUMPY_DTYPES[dtype]
        file.truncate(max(1, int(np.prod(whole)) * item.itemsize))
        values: Array = np.memmap(file, item, "r+", shape=whole) if table.n_rows else np.empty(whole, item)
        columns.append((f"{table.name}.{name}", values, dtype))
    begin = 0
    for rows in table.rows():
        end = begin + len(rows.ids)
        for (_, values, _), values_read in zip(columns, [rows.ids, *rows.columns], strict=True):
            values[begin:end] = values_read
            progress.advance(values_read.nbytes)
        begin = end
    return columns


def _torch(values: Array, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return an array as a tensor of torch over the same memory."""
    import torch

    kind = getattr(torch, dtype)
    if not len(values):
        return torch.empty(shape, dtype=kind, device="cpu")
    return torch.from_numpy(values.view(np.uint8)).view(kind).reshape(shape)
