"""What an import reads from, whatever its format: what it holds, said first, and then streamed (no torch here)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from recckpt.types import SlotSpec

Array = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SourceRows:
    """Some rows of a table: their ids, and one array a slot, of shape (rows, *slot_shape), in the order of the slots.

    Values of bfloat16 come as uint16 bit patterns.
    """

    ids: Int64s
    columns: Sequence[Array]


@dataclass(frozen=True)
class SourceTable:
    """A table that a source has; ``n_rows`` is at least as many as there are where ``is_exact`` is false."""

    name: str
    n_rows: int
    slots: tuple[SlotSpec, ...]
    is_exact: bool = True

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, the id included."""
        return 8 + sum(slot.row_bytes for slot in self.slots)


@dataclass(frozen=True)
class SourceTensor:
    """A tensor that a source has: its values are read when they are asked for, dtypes that numpy lacks as bits.

    Attributes:
        name: in the source.
        dtype: a name of :data:`recckpt.format.dtypes.NUMPY_DTYPES`.
        shape: of all of it.
        same: equal for tensors that are the same one in memory (tied).
        read: returns rows [begin, end) of the first dimension; of a scalar, read(0, 1) has shape (1,).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    same: Hashable
    read: Callable[[int, int], Array]

    def whole(self) -> Array:
        """Return all values."""
        return self.read(0, self.shape[0] if self.shape else 1).reshape(self.shape)


@dataclass(frozen=True)
class LeftOut:
    """What a source has and the result will not have, or has in another form, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class SourceContents:
    """What a source holds.

    Attributes:
        format: its name, such as ``"recis"``.
        tables: in the order in which they are read.
        dense: tensors of the model.
        values: plain values beside them, which go to ``model.pt``.
        extra: states of registered objects.
        io_state: positions in the data, one dict a rank; () where it has none.
        dense_opt: ``parameter@optimizer`` of the optimizers among the registered objects that name their parameters.
        lineages: of those whose class is known.
        step: None where it does not say.
        left_out: all that has no counterpart, or changes its form.
    """

    format: str
    tables: tuple[SourceTable, ...] = ()
    dense: tuple[SourceTensor, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    io_state: Sequence[Mapping[str, Any]] = ()
    dense_opt: Sequence[str] = ()
    lineages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    step: int | None = None
    left_out: tuple[LeftOut, ...] = ()


class ImportSource(Protocol):
    """An open source; everything about it that can be checked without reading its rows has been."""

    contents: SourceContents

    def rows(self, table: SourceTable) -> Iterator[SourceRows]:
        """Yield all rows of a table, in any order, some megabytes at a time.

        Raises:
            ConversionError: a value is not what the source says.
        """

    def close(self) -> None:
        """Close its files."""


@dataclass(frozen=True)
class ImportOptions:
    """What the caller says about a source that does not describe itself.

    Attributes:
        table: the name of the one table in files of rows; "" for that of the file.
        ids: the column of ids in files of rows.
        embedding: the column of vectors in files of rows.
        slots: the other columns of Parquet and Arrow files that become slots; None for all.
        as_table: tensors that are to be tables -> the tensor of their ids, None for 0 to n - 1.
        names: tables, as the source calls them -> their names in the checkpoint; of any source.
        model: whose parameters the optimizers in a file of torch.save have; None where the file says so itself.
        optimizers: live optimizers over them, by the names that their states have in the file.
    """

    table: str = ""
    ids: str = "id"
    embedding: str = "embedding"
    slots: tuple[str, ...] | None = None
    as_table: Mapping[str, str | None] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    model: Any = None
    optimizers: Mapping[str, Any] = field(default_factory=dict)
