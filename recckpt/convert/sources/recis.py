"""A RecIS checkpoint, of any number of ranks: tables with slots, dense state, registered objects, positions, step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from recckpt.convert.recis_blocks import RecisBlocks, TableSlice, read_blocks
from recckpt.convert.recis_names import (
    EXTRA,
    INDEX,
    MODEL,
    N_POSITIONS,
    POSITIONS,
    SERVING,
    SHARD,
    STEP_DIR,
    TENSOR_KEYS,
    positions_of,
)
from recckpt.convert.recis_optimizers import as_here, state_here
from recckpt.convert.row_checks import int64_ids
from recckpt.convert.source import ImportOptions, LeftOut, SourceContents, SourceRows, SourceTable
from recckpt.convert.source_files import SourceFiles
from recckpt.convert.tensor_source import STEP_BYTES, slot_of
from recckpt.convert.torch_file import load_torch_dict, portable_values, split_values
from recckpt.errors import ConversionError
from recckpt.format.layout import SPARSE_OPTIM

_OF_FILTERS = re.compile(r".*([0-9a-f]{64}|@filter_global_step).*", re.ASCII)


def recognises(files: SourceFiles) -> bool:
    """Say whether these are files of this format: of a checkpoint, or of an output dir with several."""
    names = {name.rpartition("/")[2] for name in files.names}
    return bool({INDEX, TENSOR_KEYS} & names) and any(map(SHARD.fullmatch, files.names))


def open_source(files: SourceFiles, options: ImportOptions) -> RecisSource:
    """Open a checkpoint; of an output dir the newest.

    Raises:
        ConversionError: a file is missing, cut or contradicts another, or a pickle needs code.
    """
    if options.as_table:
        raise ConversionError(files.url, "", found="tensors that are to be tables", expected="its own tables alone")
    if "checkpoint" in files.names and INDEX not in files.names:
        lines = files.read("checkpoint", 1 << 24).decode("utf-8", "replace").split()
        if not lines:
            raise ConversionError(files.path("checkpoint"), "", found="no checkpoint", expected="ids, newest last")
        files = SourceFiles(f"{files.url.rstrip('/')}/{lines[-1]}")
    return RecisSource(files, read_blocks(files))


class RecisSource:
    """An open RecIS checkpoint."""

    def __init__(self, files: SourceFiles, blocks: RecisBlocks) -> None:
        self._files = files
        self._tables = {name: [as_here(own) for own in slices] for name, slices in blocks.tables.items()}
        left = [LeftOut(SERVING, "is for RecIS's server")] if SERVING in files.names else []
        tables = [self._table(name, slices, left) for name, slices in self._tables.items()]
        extra = dict(load_torch_dict(files, EXTRA)) if EXTRA in files.names else {}
        step = _step(extra.pop("global_step", None), files)
        state = load_torch_dict(files, MODEL) if MODEL in files.names else {}
        for name in [name for name in state if _OF_FILTERS.fullmatch(name)]:
            left.append(LeftOut(f"{MODEL} {name}", "counts steps for a filter of RecIS"))
            del state[name]
        dense, values = split_values(state, files.path(MODEL))
        slots = {table.name: [slot.name for slot in table.slots] for table in tables}
        scalars, others = state_here(blocks.dense, slots, left, files.url)
        extra = portable_values(extra, files.path(EXTRA))
        self.contents = SourceContents(
            "recis",
            tuple(tables),
            dense=(*dense.values(), *others),
            values=values,
            extra=extra | ({SPARSE_OPTIM: scalars} if scalars else {}),
            io_state=_positions(files),
            step=step,
            left_out=tuple(left),
        )

    def rows(self, table: SourceTable) -> Iterator[SourceRows]:
        """Yield the rows of a table, rank after rank."""
        for own in self._tables[table.name]:
            n_rows, step = own.ids.shape[0], max(1, STEP_BYTES // table.row_bytes)
            for begin in range(0, n_rows, step):
                end = min(begin + step, n_rows)
                where = f"table {table.name!r}, slice [{own.begin}, {own.end}) of {own.size}"
                ids = int64_ids(own.ids.read(begin, end), self._files.url, where)
                rest = ids.view(np.uint64) % np.uint64(own.size)
                strange = ids[(rest < own.begin) | (rest >= own.end)]
                if len(strange):
                    found, expected = f"the id {strange[0]}", "ids whose remainder lies in the slice"
                    raise ConversionError(self._files.url, where, found=found, expected=expected)
                values = (own.slots[slot.name].read(begin, end) for slot in table.slots)
                yield SourceRows(ids, [v.view(np.uint8) if v.dtype == np.bool_ else v for v in values])

    def close(self) -> None:
        """Do nothing: each file is closed once it is read."""

    def _table(self, name: str, slices: list[TableSlice], left: list[LeftOut]) -> SourceTable:
        slots = []
        for slot, tensor in slices[0].slots.items():
            is_bool = tensor.dtype == "bool"
            if is_bool:
                left.append(LeftOut(f"table {name}, slot {slot}", "of bool, is here uint8 of 0 and 1"))
            slots.append(slot_of(slot, replace(tensor, dtype="uint8") if is_bool else tensor, self._files.url))
        return SourceTable(name, sum(own.ids.shape[0] for own in slices), tuple(slots))


def _step(value: Any, files: SourceFiles) -> int | None:
    if value is not None:
        try:
            step = int(value)
        except (TypeError, ValueError, RuntimeError) as error:
            where = "global_step"
            raise ConversionError(files.path(EXTRA), where, found=f"{value!r:.60}", expected="a step") from error
        return step
    named = STEP_DIR.fullmatch(files.url.rstrip("/").rpartition("/")[2])
    return int(named[1]) if named else None


def _positions(files: SourceFiles) -> list[Mapping[str, Any]]:
    """Return the positions of all ranks, in order."""
    numbers = [int(match[1]) for name in files.names if (match := POSITIONS.fullmatch(name))]
    count = len(numbers)
    if N_POSITIONS in files.names:
        text = files.read(N_POSITIONS, 100)
        if not re.fullmatch(rb"\s*\d{1,9}\s*", text):
            path = files.path(N_POSITIONS)
            raise ConversionError(path, "", found=f"{text[:40]!r}", expected="the number of ranks")
        count = int(text)
    names = [files.need(positions_of(rank), f"the position of rank {rank} of {count}") for rank in range(count)]
    return [portable_values(load_torch_dict(files, name), files.path(name)) for name in names]
