"""The protocols of tables, and checks of callers' arguments. Imports no torch."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, cast, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SavableTable", "LiveTable", "WatchedTable", "Door", "Box", "RowShare", "SlotSpec", "is_hashtable"]

# Attributes of a CheckpointableTensor (recckpt.dense.sharded): the shape of the whole, and the places of its shards.
GEOMETRY = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
EMBEDDING = "embedding"  # part of the format: the slot that holds a table's values
ITEM_BYTES: dict[str, int] = {  # part of the format: the dtypes of slots and their bytes per value
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
}
MAX_EXACT_COUNT = 1 << 53  # for steps, look-ups and rows: floats cannot count further in steps of one
MAX_TABLE_NAME_BYTES = 1024
_BYTES = re.compile(r"(\d{1,19}(?:\.\d{1,19})?) ?([kmgtp]i?)?b", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, order=True)
class SlotSpec:
    """One named column of a table.

    Attributes:
        name: ``embedding`` or an optimizer slot such as ``sparse_adamw_exp_avg``.
        dtype: a key of :data:`ITEM_BYTES`.
        shape: shape of one row; ``()`` is a scalar slot.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)

    @property
    def kind(self) -> str:
        """Dtype and shape as text, such as ``float32[16]``."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]" if self.shape else self.dtype


@runtime_checkable
class SavableTable(Protocol):
    """Anything that recckpt saves as a table: ids, and tensors with one row for each id.

    ``ids()``, ``embeddings()`` and all ``slots`` have the same order of rows. All of them may be
    views: recckpt reads them while the save runs and never writes to them.
    ``recckpt.testing.SavableTableContract`` tests a table.
    """

    name: str

    def ids(self) -> Tensor:
        """Return the int64 ids, shape (rows,)."""

    def embeddings(self) -> Tensor:
        """Return the values, shape (rows, *embedding_shape)."""

    @property
    def slots(self) -> Mapping[str, Tensor]:
        """Return the optimizer slots by name, each of shape (rows, *slot_shape)."""

    def insert(self, ids: Tensor, embeddings: Tensor, slots: Mapping[str, Tensor] | None = None) -> None:
        """Set the rows of ``ids``, adding those that are new."""

    def clear(self) -> None:
        """Drop all rows."""

    def __len__(self) -> int:
        """Return the number of rows."""


@dataclass(frozen=True)
class Box:
    """One rank's part of a live table: a range of its rows, with all their columns or a range of columns.

    Attributes:
        rows: (first, end) of the rows; the index of a row in the whole table is its id.
        replica: index of this copy among equal copies of these rows.
        n_replicas: how many copies there are, each on another rank.
        columns: the column ranges [begin, end) of the embeddings of these rows, contiguous, one per rank; () if rows
            are whole. Slots are split in the same way, or have one value per row.
        part: index in ``columns`` of this rank's range.
    """

    rows: tuple[int, int]
    replica: int = 0
    n_replicas: int = 1
    columns: tuple[tuple[int, int], ...] = ()
    part: int = 0

    @property
    def own_rows(self) -> tuple[int, int]:
        """(first, end) of the rows that this rank saves: each of k copies or parts saves 1/k of the rows."""
        return self.shares[self.part if self.columns else self.replica]

    @property
    def shares(self) -> tuple[tuple[int, int], ...]:
        """The rows (first, end) that each copy or part saves."""
        first, end = self.rows
        n = len(self.columns) or self.n_replicas
        borders = [first + (end - first) * i // n for i in range(n + 1)]
        return tuple(pairwise(borders))


@dataclass(frozen=True)
class RowShare:
    """The rows [begin, end) that one rank saves of a live table with ``size`` rows; the index of a row is its id."""

    begin: int
    end: int
    size: int


class Door(Protocol):
    """The object through which an adapter announces changes of a live table. Thread-safe; recckpt implements it.

    Row indices are relative to the first row of the box.
    """

    def announce(self, rows: Tensor) -> None:
        """Announce that ``rows`` will change: int64 on any device, repeats allowed, or a bool for each row of the box.

        Announcing rows that do not change does no harm. On CUDA, the caller's current stream must be the stream that
        writes. When this returns, snapshots have copied what they need to host memory, so the caller may queue the
        write immediately.
        """

    def announce_all(self) -> None:
        """Announce that any row may change, if the caller does not know which rows change."""

    def replaced(self) -> None:
        """Report that all rows were replaced, such as by a load; open snapshots can no longer be read."""

    def failed(self, error: Exception) -> None:
        """Report that the adapter no longer knows which rows change; the next save raises this, training continues."""


@runtime_checkable
class LiveTable(Protocol):
    """A table in the memory of another library, which recckpt saves and restores in place.

    ``recckpt.testing.LiveTableContract`` tests one.

    All methods are called in the thread that calls the saver.

    Attributes:
        name: its name in checkpoints.
        n_rows: how many rows the table has over all ranks.
    """

    name: str
    n_rows: int

    def box(self) -> Box:
        """Return this rank's part of the table; rows (0, 0) if it has none."""

    def prepare(self) -> None:
        """Bring the memory up to date before it is read or written: flush caches, wait for evictions.

        On CUDA, recckpt reads what the caller's current stream sees, as after ``loss.backward()``.

        Raises:
            LiveTableError: the table cannot be read now, such as while its weights are stashed elsewhere.
        """

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the present slots by name, with ``embedding``: contiguous views of shape (rows of the box, *shape).

        Called at every save and load: if memory or slots differ from before, the next save holds all rows.
        """

    def attach(self, door: Door) -> Callable[[], object]:
        """Begin to announce each change before it is made; return a function that stops the announcements."""

    def scalars(self) -> Mapping[str, int | float]:
        """Return the optimizer's counters for the whole table, such as ``step``."""

    def settings(self) -> Mapping[str, Any]:
        """Return the optimizer's settings as in a parameter group, such as ``lr`` and ``eps``."""

    def finish(self, scalars: Mapping[str, int | float], settings: Mapping[str, Any]) -> None:
        """Set scalars and settings (each may be empty) after a load wrote its last row to the tensors.

        Called for each table with loaded rows, even if both are empty: the table must reread cached values.
        """


@runtime_checkable
class WatchedTable(LiveTable, Protocol):
    """A live table that notices some unannounced changes."""

    def look(self) -> None:
        """Call the door's ``replaced`` if there were unannounced changes since the last call.

        Called from any thread, during training.
        """


def is_optimizer_slot(name: str) -> bool:
    """Return whether a slot belongs to the sparse optimizer: its name begins with ``sparse_``. Part of the format."""
    return name.startswith("sparse_")


def is_hashtable(obj: object) -> TypeGuard[SavableTable]:
    """Return whether ``obj`` fits the :class:`SavableTable` protocol, as our tables do and foreign ones may."""
    # Checking the whole protocol takes at least 14 us and reads the slots, so methods of the class are checked first.
    if isinstance(obj, type) or not hasattr(obj, "embeddings"):
        return False
    return (_is_table_class(cast(Any, type(obj))) and hasattr(obj, "name")) or isinstance(obj, SavableTable)


@lru_cache(64)
def _is_table_class(kind: type) -> bool:
    return all(hasattr(kind, name) for name in ("ids", "embeddings", "slots", "insert", "clear", "__len__"))


def check_table_name(name: Any) -> str:
    """Return ``name``; ValueError if no table can have it."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"a table name must be a non-empty string, found {name!r}")
    if "\0" in name:
        raise ValueError(f"a table name must not contain a NUL character, found {name!r}")
    try:
        size = len(name.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise ValueError(f"a table name must be encodable as UTF-8, found {name!r}") from error
    if size > MAX_TABLE_NAME_BYTES:
        raise ValueError(
            f"a table name must have at most {MAX_TABLE_NAME_BYTES} bytes of UTF-8, found {size}: {name[:40]!r}..."
        )
    return name


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def positive_int(name: str, value: Any) -> int:
    """Return ``value``; ValueError if it is not an int of at least 1."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be an int of at least 1, found {value!r}")
    return value


def count_of(name: str, value: Any) -> int:
    """Return ``value``; ValueError if it is not an int from 1 to 2**53."""
    if positive_int(name, value) > MAX_EXACT_COUNT:
        raise ValueError(f"{name} must be at most {MAX_EXACT_COUNT}, found {value}")
    return int(value)


def byte_count(name: str, value: Any) -> int:
    """Return a number of bytes, given as an int or as text such as ``"2 TB"`` or ``"16GiB"``; ValueError if wrong."""
    match = _BYTES.fullmatch(value.strip()) if type(value) is str else None
    number = value if type(value) is int else 0
    if match:
        prefix = (match[2] or "").lower()
        number = int(Fraction(match[1]) * (1024 if prefix.endswith("i") else 1000) ** " kmgtp".index(prefix[:1] or " "))
    if not 1 <= number < 1 << 63:
        raise ValueError(
            f"{name} must be a number of bytes of at least 1, such as 500_000_000 or '2 TB', found {value!r:.100}"
        )
    return int(number)


def flag(name: str, value: Any) -> bool:
    """Return ``value``; ValueError if it is neither True nor False."""
    if type(value) is not bool:
        raise ValueError(f"{name} must be True or False, found {value!r:.100}")
    return value


def positive_number(name: str, value: Any) -> float:
    """Return ``value``; ValueError if it is not a finite number above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:  # this excludes NaN
        raise ValueError(f"{name} must be a finite number above 0, found {value!r}")
    return float(value)
