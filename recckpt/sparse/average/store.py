"""The rows of an average: what a row was, what it drifts to, and since when."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.sparse.average.mixing import UNKNOWN, mixed, ticks, weights
from recckpt.sparse.average.snapshot import FROM, OF, SINCE, AverageSnapshot
from recckpt.sparse.table.column import Column
from recckpt.sparse.table.row_store import FirstValues, RowStore
from recckpt.sparse.table.rows import Rows
from recckpt.sparse.table.snapshot import Snapshot
from recckpt.types import EMBEDDING, SlotSpec

Int64s = npt.NDArray[np.int64]
_CLOCK_END = 1 << 61  # far from where int64 ends
_PIECE = 1 << 16  # rows at a time


class AverageStore(RowStore):
    """Rows of which ``embedding`` is the average at the time ``SINCE``, and ``OF`` the model's row since then.

    What comes through the door of any store, as rows of a load do, has its times as distances to the clock of now, or
    none: such a row stays as it is until the next update.

    Attributes:
        clock: the time of now.
        is_given: whether rows have come otherwise than by an update since the last one.
    """

    def __init__(self, device: torch.device, rows: Rows | None = None) -> None:
        super().__init__(device, rows)
        self.clock = 0
        self.is_given = True

    @classmethod
    def of(cls, store: RowStore) -> AverageStore:
        """Return an average that begins with the embeddings of a store that is no longer used."""
        rows = store.rows
        rows.keep_column(EMBEDDING)
        spec = rows.columns[EMBEDDING].spec
        rows.add_column(SlotSpec(OF, spec.dtype, spec.shape), 0)
        rows.add_column(SlotSpec(SINCE, "int64", ()), UNKNOWN)
        return cls(store.device, rows)

    def to(self, device: torch.device) -> AverageStore:
        """Return a copy with the slots on ``device``."""
        with self.lock:
            twin = AverageStore(device, self.rows.to(device))
            twin.clock = self.clock
            return twin

    def adopt(self, other: RowStore) -> None:
        """Replace all rows by those of a store that is no longer used."""
        with self.lock:
            super().adopt(other)
            self.clock, self.is_given = other.clock if isinstance(other, AverageStore) else 0, True

    def insert(self, ids: Int64s, values: Mapping[str, Tensor], embeddings: FirstValues | None = None) -> Int64s:
        """Set the rows of ``ids``."""
        with self.lock:
            return super().insert(ids, self._dated(values), embeddings)

    def write(self, rows: Int64s, values: Mapping[str, Tensor], flag: Int64s | None = None) -> None:
        """Set ``rows``."""
        with self.lock:
            super().write(rows, self._dated(values), flag)

    def erase(self, ids: Int64s) -> int:
        """Drop the rows of ``ids``."""
        with self.lock:
            self.is_given = True
            return super().erase(ids)

    def snapshot(self, name: str, slots: Collection[str] | None = None) -> Snapshot:
        """Return the rows as they are now, brought up as they are read."""
        with self.lock:
            return AverageSnapshot(super().snapshot(name), slots, self.clock)

    @property
    def saved_columns(self) -> Mapping[str, Column]:
        """The columns that a checkpoint has: the averages, and what they are made of."""
        spec = replace(self.columns[EMBEDDING].spec, name=FROM)
        return {**self.columns, FROM: Column(spec, self.device)}

    def read(self, columns: Mapping[str, Column], rows: Int64s, unseen: float) -> Tensor:
        """Return the averages of now; row -1 reads ``unseen``."""
        column, absent = columns[EMBEDDING], np.flatnonzero(rows < 0)
        if len(absent) == len(rows):
            return column.gather_or(rows, unseen)
        out = self._averages(columns, np.maximum(rows, 0), column.dtype)
        return out.index_fill_(0, torch.from_numpy(absent).to(out.device), unseen) if len(absent) else out

    def update(self, ids: Int64s, values: Tensor, kept: float, first: FirstValues) -> None:
        """Average rows with those of the model, all different; a new one begins at what ``first`` makes of its id.

        One whose value is that of the last update stays as it is: it goes on drifting there. Not seen before
        :meth:`advance`.
        """
        with self.lock:
            columns, values = self.columns, values.to(self.device)
            at = self.find(ids)
            new, known = np.flatnonzero(at < 0), np.flatnonzero(at >= 0)
            since = columns[SINCE].gather(at[known]).cpu().numpy()
            is_same = _equal_rows(columns[OF].gather(at[known]), _some(values, known)) & (since != UNKNOWN)
            old = known[~is_same]
            if len(old):
                self._set(ids[old], self._averages(columns, at[old], torch.float64), _some(values, old), kept)
            if len(new):
                begin = first(ids[new]).to(self.device)
                self._set(ids[new], begin.to(torch.promote_types(begin.dtype, torch.float32)), _some(values, new), kept)

    def drop(self, ids: Int64s) -> None:
        """Drop the rows of ids that the model has erased."""
        super().erase(ids)

    def advance(self, kept: float) -> None:
        """Let the clock go on by an update whose changed rows are there."""
        with self.lock:
            if self.clock > _CLOCK_END:
                self._turn_back()
            self.clock += ticks(kept)
            self.is_given = False
            if ticks(kept):
                self._replaced()  # each row has moved: a delta holds them all

    def _averages(self, columns: Mapping[str, Column], rows: Int64s, dtype: torch.dtype) -> Tensor:
        """Return the averages of now."""
        with self.lock:  # a row and its time are read together
            averages, of = columns[EMBEDDING].gather(rows), columns[OF].gather(rows)
            return mixed(averages, of, weights(columns[SINCE].gather(rows).cpu().numpy(), self.clock), dtype)

    def _set(self, ids: Int64s, before: Tensor, values: Tensor, kept: float) -> None:
        """Set rows to the averages of what they were before and their new values, at the time after this update."""
        averages = mixed(before, values, np.full(len(ids), kept), values.dtype)
        times = torch.full((len(ids),), self.clock + ticks(kept), device="cpu")
        super().insert(ids, {EMBEDDING: averages, OF: values, SINCE: times})

    def _dated(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return values that come from outside with times of this clock."""
        self.is_given = True
        if EMBEDDING not in values:
            return values
        if SINCE not in values:
            times = torch.full((len(values[EMBEDDING]),), UNKNOWN, device="cpu")
        else:
            times = torch.where(values[SINCE] == UNKNOWN, UNKNOWN, values[SINCE] + self.clock)
        return {**values, SINCE: times}

    def _turn_back(self) -> None:
        """Let the clock begin at 0 again; rows so old that they could end below what an int64 holds stay in place."""
        for begin in range(0, len(self), _PIECE):
            rows = np.arange(begin, min(begin + _PIECE, len(self)))
            times = self.columns[SINCE].gather(rows)
            moved = times.clamp(min=-_CLOCK_END) - self.clock
            super().write(rows, {SINCE: torch.where(times == UNKNOWN, times, moved)})
        self.clock = 0


def _some(values: Tensor, rows: Int64s) -> Tensor:
    """Return some rows of a tensor, without a copy where they are all."""
    return values if len(rows) == len(values) else values[torch.from_numpy(rows).to(values.device)]


def _equal_rows(some: Tensor, others: Tensor) -> npt.NDArray[np.bool_]:
    """Return which rows are equal bit for bit."""
    a, b = (tensor.cpu().contiguous().flatten(1).view(torch.uint8).numpy() for tensor in (some, others))
    equal: npt.NDArray[np.bool_] = (a == b).all(1)
    return equal
