"""Vectors that an export has put into int8, with a scale a row beside them, as the floats that they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from recckpt.convert.narrowed import SCALE
from recckpt.convert.source import ImportSource, LeftOut, SourceRows, SourceTable
from recckpt.types import EMBEDDING, SlotSpec

_SCALE = SlotSpec(EMBEDDING + SCALE, "float32", ())


def restored(source: ImportSource) -> ImportSource:
    """Return a source whose vectors are floats; the same one where no table has vectors of int8 with a scale."""
    return _Restored(source) if any(map(_is_narrow, source.contents.tables)) else source


def _is_narrow(table: SourceTable) -> bool:
    kinds = {slot.name: slot for slot in table.slots}
    return EMBEDDING in kinds and kinds[EMBEDDING].dtype == "int8" and kinds.get(_SCALE.name) == _SCALE


class _Restored:
    """Multiplies the vectors of a source by their scales."""

    def __init__(self, source: ImportSource) -> None:
        self._source = source
        contents = source.contents
        self._narrow = {table.name: table for table in contents.tables if _is_narrow(table)}
        tables = tuple(_wide(table) if table.name in self._narrow else table for table in contents.tables)
        left = [LeftOut(f"table {name}", f"int8 times {_SCALE.name} is float32 here") for name in self._narrow]
        self.contents = replace(contents, tables=tables, left_out=(*contents.left_out, *left))

    def rows(self, table: SourceTable) -> Iterator[SourceRows]:
        """Yield the rows of a table."""
        if table.name not in self._narrow:
            yield from self._source.rows(table)
            return
        narrow = self._narrow[table.name]
        for rows in self._source.rows(narrow):
            columns = dict(zip((slot.name for slot in narrow.slots), rows.columns, strict=True))
            vectors, scales = columns[EMBEDDING], columns.pop(_SCALE.name)
            columns[EMBEDDING] = vectors * scales.astype(np.float32).reshape(-1, *(1,) * (vectors.ndim - 1))
            yield SourceRows(rows.ids, [columns[slot.name] for slot in table.slots])

    def close(self) -> None:
        """Close its files."""
        self._source.close()


def _wide(table: SourceTable) -> SourceTable:
    kept = [slot for slot in table.slots if slot != _SCALE]
    slots = tuple(SlotSpec(EMBEDDING, "float32", slot.shape) if slot.name == EMBEDDING else slot for slot in kept)
    return replace(table, slots=slots)
