"""The interface of import sources of any format: first the contents, then the rows as a stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from recckpt.errors import ConversionError
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.format.tensor_index import NUMPY_DTYPES
from recckpt.text import first_few, nearest
from recckpt.types import SlotSpec, check_table_name

Array = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]
STEP_BYTES = 16 << 20  # bytes of rows that a source reads at once
ID_REMEDY = "ids are int64: hash or number them first"
_RESERVED = frozenset({"", "id", "table", "op"})  # part of the format


@dataclass(frozen=True)
class SourceRows:
    """Some rows of a table: ids, and one array of shape (rows, *slot_shape) per slot, in the order of the slots.

    Values of bfloat16 are uint16 bit patterns.
    """

    ids: Int64s
    columns: Sequence[Array]

    def checked(self, table: SourceTable) -> SourceRows:
        """Return the rows as contiguous arrays; ConversionError if they do not match the slots of their table."""
        for slot, column in zip(table.slots, self.columns, strict=True):
            expected: tuple[Any, ...] = (NUMPY_DTYPES[slot.dtype], (len(self.ids), *slot.shape))
            if (column.dtype, column.shape) != expected:
                found = f"{column.dtype} of shape {column.shape}"
                path, where = f"table {table.name!r}", f"slot {slot.name!r}"
                raise ConversionError(path, where, found=found, expected=f"{expected[0]} of shape {expected[1]}")
        return SourceRows(self.ids, [np.ascontiguousarray(column) for column in self.columns])


@dataclass(frozen=True)
class SourceTable:
    name: str
    n_rows: int
    slots: tuple[SlotSpec, ...]

    @property
    def row_bytes(self) -> int:
        return 8 + sum(slot.row_bytes for slot in self.slots)

    def steps(self, n_rows: int) -> Iterator[tuple[int, int]]:
        """Split ``n_rows`` rows into consecutive ranges [begin, end), each to be read at once."""
        step = max(1, STEP_BYTES // self.row_bytes)
        yield from ((begin, min(begin + step, n_rows)) for begin in range(0, n_rows, step))

    def check(self, source: str) -> None:
        """Raise ConversionError if the table's name or a slot's name is invalid in a checkpoint."""
        try:
            check_table_name(self.name)
        except ValueError as error:
            raise ConversionError(source, repr(self.name), found=str(error), expected="a table name") from error
        names = [slot.name for slot in self.slots]
        if len(set(names)) < len(names) or _RESERVED & set(names):
            expected = f"different names, none of them {', '.join(sorted(filter(None, _RESERVED)))}"
            raise ConversionError(source, f"table {self.name!r}", found=f"slots {names}", expected=expected)


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of a source; its values are read on request, as bit patterns if numpy lacks the dtype."""

    name: str  # name in the source
    dtype: str  # a name of :data:`recckpt.format.tensor_index.NUMPY_DTYPES`
    shape: tuple[int, ...]  # shape of the whole tensor
    same: Hashable  # equal for tensors that share memory (tied)
    # returns rows [begin, end) of the first dimension; for a scalar, read(0, 1) has shape (1,)
    read: Callable[[int, int], Array]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize

    def whole(self) -> Array:
        return self.read(0, self.shape[0] if self.shape else 1).reshape(self.shape)


@dataclass(frozen=True)
class LeftOut:
    """Something in a source that the result lacks, or has in another form, with the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class SourceContents:
    format: str  # name of the format, such as ``"recis"``
    tables: tuple[SourceTable, ...] = ()  # in reading order
    dense: tuple[SourceTensor, ...] = ()  # tensors of the model
    values: Mapping[str, Any] = field(default_factory=dict)  # plain values of the model, for ``model.pt``
    extra: Mapping[str, Any] = field(default_factory=dict)  # states of registered objects
    io_state: Sequence[Mapping[str, Any]] = ()  # positions in the data, one dict per rank
    # ``parameter@optimizer`` of the optimizers among the registered objects that name their parameters
    dense_opt: Sequence[str] = ()
    lineages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # optimizer -> its class and bases
    step: int | None = None  # None if unknown
    left_out: tuple[LeftOut, ...] = ()  # what is omitted, or changes its form


@dataclass(frozen=True)
class ImportSource:
    """An open source. Everything that can be checked without reading rows has been checked."""

    contents: SourceContents  # contents of the source
    # yields all rows of a table in any order, some megabytes at a time, and closes each file once it is read;
    # ConversionError if a value does not match the contents
    rows: Callable[[SourceTable], Iterator[SourceRows]]


@dataclass(frozen=True)
class ImportOptions:
    """Facts about a source that its files do not state, supplied by the caller.

    Attributes:
        table: name of the only table in files of rows; "" for the file's name.
        ids: column of ids in files of rows.
        embedding: column of vectors in files of rows.
        slots: other columns of Parquet and Arrow files that become slots; None for all.
        as_table: tensor to import as a table -> the tensor of its ids, None for 0 to n - 1.
        names: name of a table in the source -> its name in the checkpoint; for any format.
        model: model of the optimizers in a file of torch.save; None if the file names their parameters.
        optimizers: for a file of torch.save: name of an optimizer's state in the file -> live optimizer.
    """

    table: str = ""
    ids: str = "id"
    embedding: str = "embedding"
    slots: tuple[str, ...] | None = None
    as_table: Mapping[str, str | None] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    model: Any = None
    optimizers: Mapping[str, Any] = field(default_factory=dict)


def int64_ids(values: Array, path: str, where: str) -> Int64s:
    """Return ids as int64; ConversionError for floats, values beyond int64, or more or less than one dimension."""
    if values.ndim != 1:
        raise ConversionError(path, where, found=f"ids of shape {values.shape}", expected="one dimension")
    if values.dtype.kind not in "iu":
        nan = " with NaN among them" if values.dtype.kind == "f" and np.isnan(values).any() else ""
        found = f"ids of {values.dtype}{nan}"
        raise ConversionError(path, where, found=found, expected="integers of int64", remedy=ID_REMEDY)
    if values.dtype == np.uint64 and len(values) and values.max() > np.iinfo(np.int64).max:
        found = f"the id {values.max()}, beyond int64"
        raise ConversionError(path, where, found=found, expected="at most 2**63 - 1", remedy=ID_REMEDY)
    return np.ascontiguousarray(values, np.int64)


def no_such_table(path: str, name: str, there: Sequence[str], why: str = "") -> ConversionError:
    found, remedy = f"no table {name!r}{why}", nearest(name, there).strip("; ")
    return ConversionError(path, "", found=found, expected=f"one of {first_few(there, 20)}", remedy=remedy)


def optimizer_state(steps: Mapping[str, int], slots: Sequence[str]) -> dict[str, Any]:
    """Return the sparse optimizer's entry among the registered objects; {} without steps."""
    state = {table: {"step": step} for table, step in steps.items()}
    groups = [{"tables": list(steps)}]
    return {SPARSE_OPTIM: {"slots": list(slots), "state": state, "param_groups": groups}} if steps else {}
