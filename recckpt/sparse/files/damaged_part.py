"""What is left of a damaged part: its record batches one by one, each whole or with the reason why it is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from recckpt.format.buckets import bucket_of
from recckpt.format.catalog import Batch, Part
from recckpt.sparse.files.arrow_format import (
    ID_SPEC,
    TABLE,
    Messages,
    check_message,
    column_array,
    column_buffer,
    ids_in,
    part_schema,
    slot_field,
)
from recckpt.types import SlotSpec

_SCAN_BYTES = 64 << 20
_MAX_METADATA_BYTES = 1 << 20  # of a record batch: a few hundred bytes a column
_UNREADABLE = (pa.ArrowException, OSError, ValueError, MemoryError)


class Remains:
    """Gives out the batches of a part whose columns still have the checksums of its catalog entry.

    Goes by the footer first. Where that does not lead to a batch, the file is searched for it: a batch that is whole
    is found whatever has happened to the schema, the footer and the other batches.
    """

    def __init__(self, data: memoryview, part: Part, slots: Sequence[SlotSpec]) -> None:
        self._data, self._part, self._specs = pa.py_buffer(data), part, [ID_SPEC, *slots]
        self._names = [spec.name for spec in self._specs]
        self._schema = part_schema(slots)
        self._arrow = _opened(self._data, self._schema)

    def batch(self, number: int) -> pa.RecordBatch | str:
        """Return ids and slots of a batch that is whole, else what is wrong with it."""
        batch = _read(self._arrow, number)
        wrong = batch if isinstance(batch, str) else _wrong(batch, self._part.batches[number], self._names)
        if wrong and number in self._scattered:
            batch, wrong = self._scattered[number], ""
        return wrong or _values_of(batch, self._specs)

    def table(self, number: int) -> str | None:
        """Return the table that a batch belongs to by the file itself, None where that is damaged."""
        batch = _read(self._arrow, number)
        return None if isinstance(batch, str) else _table_of(batch)

    @cached_property
    def _scattered(self) -> Mapping[int, pa.RecordBatch]:
        """The batches that are found without the footer, the schema and the dictionary; all of their columns whole."""
        fields = [pa.field(TABLE, pa.int16(), nullable=False), *(self._schema.field(name) for name in self._names)]
        numbers = {_key(batch.xxh3, batch.rows): number for number, batch in enumerate(self._part.batches)}
        batches: dict[int, pa.RecordBatch] = {}
        for batch in _messages(self._data, pa.schema(fields)):
            digests = {name: _digest(batch, name) for name in batch.schema.names}
            number = numbers.get(_key(digests, batch.num_rows))
            if number is not None:
                batches[number] = batch
        return batches


def unverified_batches(
    data: memoryview, table: str, slots: Sequence[SlotSpec], buckets: tuple[int, int]
) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a table from a part that no catalog describes: the values are not checked.

    A batch with buckets beside those of the shard, or with its rows out of order, is left out.
    """
    reader = _opened(pa.py_buffer(data), part_schema(slots))
    for number in range(0 if isinstance(reader, str) else reader.num_record_batches):
        batch = _read(reader, number)
        if not isinstance(batch, str) and _table_of(batch) == table:
            ids = ids_in(batch)
            order = bucket_of(ids).astype(np.int64)
            if len(ids) and buckets[0] <= order[0] and order[-1] < buckets[1] and (np.diff(order) >= 0).all():
                yield _values_of(batch, [ID_SPEC, *slots])


def _opened(data: pa.Buffer, schema: pa.Schema) -> Any:
    """Return a reader of an Arrow file of this schema, columns in any order; the reason where it cannot be read."""
    expected = {field.name: field for field in schema}
    try:
        reader = pa.ipc.open_file(pa.BufferReader(data))
        Messages(memoryview(data)).check_all()
        same = len(reader.schema) == len(schema) and {field.name: field for field in reader.schema} == expected
    except _UNREADABLE as error:
        return f"no Arrow file ({error})"
    return reader if same else "columns of another schema"


def _table_of(batch: pa.RecordBatch) -> str | None:
    """Return the one table that all rows of a batch say they belong to."""
    column = batch.column(TABLE)
    try:
        column.validate(full=True)
        names = {column.dictionary[int(n)].as_py() for n in np.unique(np.frombuffer(column_buffer(column), np.int16))}
    except (*_UNREADABLE, LookupError):
        return None
    return names.pop() if len(names) == 1 else None


def _values_of(batch: pa.RecordBatch, specs: Sequence[SlotSpec]) -> pa.RecordBatch:
    """Return the columns of a batch made anew from their values: what else the file says of them may be wrong."""
    arrays = [column_array(spec, column_buffer(batch.column(spec.name)), batch.num_rows) for spec in specs]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([slot_field(spec) for spec in specs]))


def _read(reader: Any, number: int) -> pa.RecordBatch | str:
    if isinstance(reader, str):
        return reader
    try:
        batch = reader.get_batch(number)
        batch.validate()
    except _UNREADABLE as error:
        return f"an unreadable batch ({error})"
    return batch


def _wrong(found: pa.RecordBatch, expected: Batch, names: Sequence[str]) -> str:
    """Say in what columns a batch is not as it was written."""
    if found.num_rows != expected.rows:
        return f"{found.num_rows} rows, expected {expected.rows}"
    for name in names:
        digest = _digest(found, name)
        if digest != expected.xxh3[name]:
            return f"column {name!r} with checksum {digest:016x}, expected {expected.xxh3[name]:016x}"
    return ""


def _digest(batch: pa.RecordBatch, name: str) -> int:
    return xxhash.xxh3_64_intdigest(column_buffer(batch.column(name)))


def _key(digests: Mapping[str, int], rows: int) -> tuple[object, ...]:
    return (rows, *sorted(digests.items()))


def _messages(data: pa.Buffer, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield all that is a record batch of this schema, wherever in the file it lies."""
    end = 0
    for begin, size in _message_offsets(data):
        if begin < end:
            continue
        source = pa.BufferReader(data.slice(begin))
        try:
            check_message(memoryview(data)[begin : begin + 8 + size])
            message = pa.ipc.read_message(source)
            if message.type != "record batch":
                continue
            batch = pa.ipc.read_record_batch(message, schema)
            batch.validate()
        except (*_UNREADABLE, EOFError):
            continue
        yield batch
        end = begin + source.tell()


def _message_offsets(data: pa.Buffer) -> Iterator[tuple[int, int]]:
    """Yield where a message may begin, with -1 and the size of its metadata on a multiple of 8, and that size."""
    if data.size < 8:
        return
    words = np.frombuffer(data, "<i4", count=data.size // 8 * 2).reshape(-1, 2)
    step = _SCAN_BYTES // 8
    for first in range(0, len(words), step):
        mark, size = words[first : first + step].T
        begins = np.flatnonzero((mark == -1) & (size > 0) & (size <= _MAX_METADATA_BYTES) & (size % 8 == 0))
        yield from ((8 * (first + int(begin)), int(size[begin])) for begin in begins)
