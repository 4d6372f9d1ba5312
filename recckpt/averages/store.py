"""The rows of an average table. An update costs nothing for rows of the model that have not changed.

An update turns an average ``e`` and a value ``w`` of the model into ``kept * e + (1 - kept) * w``. While ``w`` does not
change, n updates equal one update whose ``kept`` is the product of all n. So a row stores three things, written at the
last update that saw a new ``w``: its average then, ``w``, and the time. Readers compute the present average from these.
Time is a clock that each update advances by ``-log(kept)``.

The clock is an integer, so differences of times are exact. A row is saved with its distance to the clock, so after a
restore its average is the same bit for bit.
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

from recckpt.format.tables import AVERAGE
from recckpt.sparse.table.column import Column
from recckpt.sparse.table.kernels import compiled
from recckpt.sparse.table.row_store import FirstValues, RowStore
from recckpt.sparse.table.rows import Rows
from recckpt.sparse.table.snapshot import Snapshot, SnapshotOver
from recckpt.types import EMBEDDING, SlotSpec

Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]
UNKNOWN = -(1 << 63)  # replaces a time if the stored average is the present one, and the model's value is unknown
_TICKS = 1 << 40  # ticks in which the weight of an old average falls by a factor of e
_NOTHING = 750  # exp(-750) is 0.0
_COMPILED = {torch.float32, torch.float64}
_CLOCK_END = 1 << 61  # far below the largest int64
_PIECE = 1 << 16  # rows to process at once
Bytes = npt.NDArray[np.uint8]
FROM, OF, SINCE = AVERAGE  # the stored average, the model's value, and the time at which both were written
_COLUMNS = {FROM: EMBEDDING, OF: OF, SINCE: SINCE}  # slot of a snapshot -> column of the store


def ticks(kept: float) -> int:
    return round(min(-math.log(kept), _NOTHING) * _TICKS) if kept > 0 else _NOTHING * _TICKS


def weights(times: Int64s, clock: int) -> Float64s:
    """Return, per row, the share of the stored average in the present average; the rest is the model's value."""
    is_known = times != UNKNOWN
    ages = np.where(is_known, np.maximum(clock - np.where(is_known, times, clock), 0), 0)
    return np.exp(ages / -_TICKS)


def mixed(averages: Tensor, values: Tensor, shares: Float64s, dtype: torch.dtype) -> Tensor:
    """Return ``share * average + (1 - share) * value`` per row, in float64, rounded once; exact for shares 0 and 1."""
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
    """Write the mixed rows to ``out``, one row at a time, so that a row's result does not depend on other rows."""
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
    """The store of an average table: ``embedding`` is the average at time ``SINCE``, ``OF`` the model's row since then.

    Rows that are written from outside, such as by a load, have times relative to the present clock, or no time. The
    average of a row without a time does not change until the next update.

    Attributes:
        clock: the present time.
        is_given: whether rows were written or erased from outside since the last update.
    """

    def __init__(self, device: torch.device, rows: Rows | None = None) -> None:
        super().__init__(device, rows)
        self.clock = 0
        self.is_given = True

    @classmethod
    def of(cls, store: RowStore) -> AverageStore:
        """Return an empty store for averages of the rows of ``store``, which is empty, too."""
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
        """Return a snapshot of the present averages; each average is computed when it is read."""
        with self.lock:
            return AverageSnapshot(super().snapshot(name), slots, self.clock)

    @property
    def further_columns(self) -> Mapping[str, Column]:
        return {}

    @property
    def saved_columns(self) -> Mapping[str, Column]:
        """The columns of the store, and ``FROM`` for the stored average, because a save writes both averages."""
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
        """Return column -> slot that fills it: all columns from a saved average, else the embeddings alone."""
        if {FROM, OF, SINCE} <= slots.keys():
            return {EMBEDDING: slots[FROM], OF: slots[OF], SINCE: slots[SINCE]}
        return {EMBEDDING: slots[EMBEDDING]} if EMBEDDING in slots else {}

    def update(self, ids: Int64s, values: Tensor, kept: float, first: FirstValues) -> None:
        """Move averages toward values of the model, and keep the share ``kept`` of the old averages.

        The ids are distinct. The average of a new id begins at ``first(ids)``. The stored row of an id does not change
        if the model's value equals that of the last update, because readers compute the average from the clock. The
        update takes effect with :meth:`advance`.
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
        """Advance the clock by one update, after :meth:`update` has written the changed rows."""
        with self.lock:
            if self.clock > _CLOCK_END:  # restart the clock at 0; clamp the times of very old rows to avoid an overflow
                for begin in range(0, len(self), _PIECE):
                    rows = np.arange(begin, min(begin + _PIECE, len(self)))
                    times = self.columns[SINCE].gather(rows)
                    moved = times.clamp(min=-_CLOCK_END) - self.clock
                    super().write(rows, {SINCE: torch.where(times == UNKNOWN, times, moved)})
                self.clock = 0
            self.clock += ticks(kept)
            self.is_given = False
            if ticks(kept):
                self._observers.replaced()  # every average has changed, so a delta contains all rows

    def _averages(self, columns: Mapping[str, Column], rows: Int64s, dtype: torch.dtype) -> Tensor:
        with self.lock:  # a row and its time are read together
            averages, of = columns[EMBEDDING].gather(rows), columns[OF].gather(rows)
            return mixed(averages, of, weights(columns[SINCE].gather(rows).cpu().numpy(), self.clock), dtype)

    def _set(self, ids: Int64s, before: Tensor, values: Tensor, kept: float) -> None:
        averages = mixed(before, values, np.full(len(ids), kept), values.dtype)
        times = torch.full((len(ids),), self.clock + ticks(kept), device="cpu")
        super().insert(ids, {EMBEDDING: averages, OF: values, SINCE: times})

    def _dated(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return values from outside with absolute times; their own times are relative to the present clock."""
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
    """A snapshot: ``embedding`` is the average at the snapshot's time, and ``FROM`` the average in the store.

    Times are relative to the clock at that time, so they are 0 or less.
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
