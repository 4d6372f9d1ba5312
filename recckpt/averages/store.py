"""The rows of an average: the average, the model's value it drifts to, and since when; read as of one moment.

An update turns an average ``e`` and a value ``w`` of the model into ``kept * e + (1 - kept) * w``. While ``w`` stays,
many updates are one that keeps the product of their shares. So a row holds its average and the model's value as of the
last update at which that value changed, and the time of it on a clock that advances by ``-log(kept)`` with each update.

The clock is an integer: its differences are exact, so a row saved by its distance to the clock goes on bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.sparse.table.column import Column
from recckpt.sparse.table.kernels import compiled
from recckpt.sparse.table.row_store import FirstValues, RowStore
from recckpt.sparse.table.rows import Rows
from recckpt.sparse.table.snapshot import Snapshot, SnapshotOver
from recckpt.types import EMBEDDING, SlotSpec

Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]
UNKNOWN = -(1 << 63)  # in place of a time: the row is its average, and what it drifts to is not known
_TICKS = 1 << 40  # of the clock while a share falls by a factor of e
_NOTHING = 750  # exp(-750) is 0.0
_COMPILED = {torch.float32, torch.float64}
_CLOCK_END = 1 << 61  # far from where int64 ends
_PIECE = 1 << 16  # rows at a time
Bytes = npt.NDArray[np.uint8]
FROM, OF, SINCE = "average_from", "average_of", "average_since"  # part of the format
_COLUMNS = {FROM: EMBEDDING, OF: OF, SINCE: SINCE}  # slot of a snapshot -> of the store


def ticks(kept: float) -> int:
    return round(min(-math.log(kept), _NOTHING) * _TICKS) if kept > 0 else _NOTHING * _TICKS


def weights(times: Int64s, clock: int) -> Float64s:
    """Return the share of the average that each row still has."""
    is_known = times != UNKNOWN
    ages = np.where(is_known, np.maximum(clock - np.where(is_known, times, clock), 0), 0)
    return np.exp(ages / -_TICKS)


def mixed(averages: Tensor, values: Tensor, shares: Float64s, dtype: torch.dtype) -> Tensor:
    """Return ``share * average + (1 - share) * value`` for each row, in float64, rounded once; exact for 0 and 1."""
    if averages.device.type == "cpu" and {averages.dtype, values.dtype, dtype} <= _COMPILED:
        out = torch.empty(averages.shape, dtype=dtype, device="cpu")
        rows, others = averages.contiguous().flatten(1), values.contiguous().flatten(1)
        _mix(rows.numpy(), others.numpy(), shares, out.flatten(1).numpy())
        return out
    share = torch.from_numpy(shares).to(averages.device).view(-1, *[1] * (averages.dim() - 1))
    wide, other = averages.to(torch.float64), values.to(torch.float64)
    out = torch.where(share == 1, wide, torch.where(share == 0, other, wide * share + other * (1 - share)))
    return out.to(dtype) if dtype.is_floating_point else out.round().to(dtype)


@compiled
def _mix(averages: Any, values: Any, shares: Any, out: Any) -> None:
    """Mix row by row: a row's result does not depend on other rows."""
    for i in range(len(shares)):
        share, rest = shares[i], 1.0 - shares[i]
        for j in range(out.shape[1]):
            if share == 1.0:
                out[i, j] = averages[i, j]
            elif share == 0.0:
                out[i, j] = values[i, j]
            else:
                out[i, j] = share * averages[i, j] + rest * values[i, j]


class AverageStore(RowStore):
    """A store whose ``embedding`` is the average at the time ``SINCE``, and ``OF`` the model's row since then.

    Rows that come otherwise, as from a load, have times as distances to the present clock, or none; a row without a
    time stays as it is until the next update.

    Attributes:
        clock: the present time.
        is_given: whether rows have come otherwise than by an update since the last one.
    """

    def __init__(self, device: torch.device, rows: Rows | None = None) -> None:
        super().__init__(device, rows)
        self.clock = 0
        self.is_given = True

    @classmethod
    def of(cls, store: RowStore) -> AverageStore:
        """Make an empty average of the rows of an empty store."""
        columns, initial = {EMBEDDING: store.columns[EMBEDDING]}, {EMBEDDING: store.rows.initial[EMBEDDING]}
        rows, spec = Rows(store.device, columns, initial), columns[EMBEDDING].spec
        rows.add_column(SlotSpec(OF, spec.dtype, spec.shape), 0)
        rows.add_column(SlotSpec(SINCE, "int64", ()), UNKNOWN)
        return cls(store.device, rows)

    def to(self, device: torch.device) -> AverageStore:
        with self.lock:
            twin = AverageStore(device, self.rows.to(device))
            twin.clock = self.clock
            return twin

    def adopt(self, other: RowStore) -> None:
        with self.lock:
            super().adopt(other)
            self.clock, self.is_given = other.clock if isinstance(other, AverageStore) else 0, True

    def insert(self, ids: Int64s, values: Mapping[str, Tensor], embeddings: FirstValues | None = None) -> Int64s:
        with self.lock:
            return super().insert(ids, self._dated(values), embeddings)

    def write(self, rows: Int64s, values: Mapping[str, Tensor], flag: Int64s | None = None) -> None:
        with self.lock:
            super().write(rows, self._dated(values), flag)

    def erase(self, ids: Int64s) -> int:
        with self.lock:
            self.is_given = True
            return super().erase(ids)

    def snapshot(self, name: str, slots: Collection[str] | None = None) -> Snapshot:
        """Return the averages as of now; they are computed when they are read."""
        with self.lock:
            return AverageSnapshot(super().snapshot(name), slots, self.clock)

    @property
    def further_columns(self) -> Mapping[str, Column]:
        return {}

    @property
    def saved_columns(self) -> Mapping[str, Column]:
        """The averages, and what they are made of."""
        spec = replace(self.columns[EMBEDDING].spec, name=FROM)
        return {**self.columns, FROM: Column(spec, self.device)}

    def read(self, columns: Mapping[str, Column], rows: Int64s, unseen: float) -> Tensor:
        column, absent = columns[EMBEDDING], np.flatnonzero(rows < 0)
        if len(absent) == len(rows):
            return column.gather_or(rows, unseen)
        out = self._averages(columns, np.maximum(rows, 0), column.dtype)
        return out.index_fill_(0, torch.from_numpy(absent).to(out.device), unseen) if len(absent) else out

    def embeddings(self) -> Tensor:
        return self._averages(self.columns, np.arange(len(self)), self.columns[EMBEDDING].dtype)

    def filled_by(self, slots: Mapping[str, str]) -> Mapping[str, str]:
        """Return the columns of a saved average; of another table, its embeddings alone."""
        if {FROM, OF, SINCE} <= slots.keys():
            return {EMBEDDING: slots[FROM], OF: slots[OF], SINCE: slots[SINCE]}
        return {EMBEDDING: slots[EMBEDDING]} if EMBEDDING in slots else {}

    def update(self, ids: Int64s, values: Tensor, kept: float, first: FirstValues) -> None:
        """Average rows with distinct rows of the model; a new row begins at ``first(ids)``.

        A row whose value has not changed since the last update is left to drift. Changes are seen after
        :meth:`advance`.
        """
        with self.lock:
            columns, values = self.columns, values.to(self.device)
            at = self.find(ids)
            new, known = np.flatnonzero(at < 0), np.flatnonzero(at >= 0)
            since = columns[SINCE].gather(at[known]).cpu().numpy()
            both = (columns[OF].gather(at[known]), _some(values, known))
            before, now = (rows.cpu().contiguous().flatten(1).view(torch.uint8).numpy() for rows in both)
            is_same = (before == now).all(1) & (since != UNKNOWN)  # bit for bit
            old = known[~is_same]
            if len(old):
                self._set(ids[old], self._averages(columns, at[old], torch.float64), _some(values, old), kept)
            if len(new):
                begin = first(ids[new]).to(self.device)
                self._set(ids[new], begin.to(torch.promote_types(begin.dtype, torch.float32)), _some(values, new), kept)

    def drop(self, ids: Int64s) -> None:
        super().erase(ids)

    def advance(self, kept: float) -> None:
        """Advance the clock by an update whose changed rows are there."""
        with self.lock:
            if self.clock > _CLOCK_END:  # it begins at 0 again; rows so old that an int64 might end stay in place
                for begin in range(0, len(self), _PIECE):
                    rows = np.arange(begin, min(begin + _PIECE, len(self)))
                    times = self.columns[SINCE].gather(rows)
                    moved = times.clamp(min=-_CLOCK_END) - self.clock
                    super().write(rows, {SINCE: torch.where(times == UNKNOWN, times, moved)})
                self.clock = 0
            self.clock += ticks(kept)
            self.is_given = False
            if ticks(kept):
                self._observers.replaced()  # each row has moved: a delta holds them all

    def _averages(self, columns: Mapping[str, Column], rows: Int64s, dtype: torch.dtype) -> Tensor:
        with self.lock:  # a row and its time are read together
            averages, of = columns[EMBEDDING].gather(rows), columns[OF].gather(rows)
            return mixed(averages, of, weights(columns[SINCE].gather(rows).cpu().numpy(), self.clock), dtype)

    def _set(self, ids: Int64s, before: Tensor, values: Tensor, kept: float) -> None:
        averages = mixed(before, values, np.full(len(ids), kept), values.dtype)
        times = torch.full((len(ids),), self.clock + ticks(kept), device="cpu")
        super().insert(ids, {EMBEDDING: averages, OF: values, SINCE: times})

    def _dated(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Give values from outside times of this clock."""
        self.is_given = True
        if EMBEDDING not in values:
            return values
        if SINCE not in values:
            times = torch.full((len(values[EMBEDDING]),), UNKNOWN, device="cpu")
        else:
            times = torch.where(values[SINCE] == UNKNOWN, UNKNOWN, values[SINCE] + self.clock)
        return {**values, SINCE: times}


def _some(values: Tensor, rows: Int64s) -> Tensor:
    return values if len(rows) == len(values) else values[torch.from_numpy(rows).to(values.device)]


class AverageSnapshot(SnapshotOver):
    """A snapshot whose ``embedding`` is the average of that moment, and ``FROM`` that of the store.

    Times are distances to the clock of that moment, 0 or less.
    """

    def __init__(self, rows: Snapshot, slots: Collection[str] | None, clock: int) -> None:
        super().__init__(rows)
        self.in_place, self._clock = None, clock
        self._specs = {spec.name: spec for spec in rows.slots}
        embedding = self._specs[EMBEDDING]
        specs = (embedding, SlotSpec(FROM, embedding.dtype, embedding.shape), self._specs[OF], self._specs[SINCE])
        self.slots = tuple(spec for spec in specs if slots is None or spec.name in slots)

    def read_slots(self, rows: npt.NDArray[Any], targets: Mapping[str, Bytes], *, is_last: bool) -> None:
        needed = self._specs if EMBEDDING in targets else [_COLUMNS[name] for name in targets]
        read = {name: np.empty(len(rows) * self._specs[name].row_bytes, np.uint8) for name in needed}
        self._rows.read_slots(rows, read, is_last=is_last)
        for name, target in targets.items():
            if name == EMBEDDING:
                averages, of = self._tensor(read, EMBEDDING), self._tensor(read, OF)
                shares = weights(self._tensor(read, SINCE).numpy(), self._clock)
                values = mixed(averages, of, shares, averages.dtype)
            elif name == SINCE:
                times = self._tensor(read, SINCE)
                values = torch.where(times == UNKNOWN, times, times - self._clock)
            else:
                values = self._tensor(read, _COLUMNS[name])
            target[:] = values.contiguous().view(-1).view(torch.uint8).numpy()

    def _tensor(self, read: Mapping[str, Bytes], name: str) -> Tensor:
        spec = self._specs[name]
        return torch.from_numpy(read[name]).view(getattr(torch, spec.dtype)).view(-1, *spec.shape)
