"""The rows of an average at one moment: read as the averages of that moment, and as what they were made of."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.sparse.average.mixing import UNKNOWN, mixed, weights
from recckpt.sparse.table.snapshot import Snapshot
from recckpt.types import EMBEDDING, SlotSpec

Bytes = npt.NDArray[np.uint8]
FROM, OF, SINCE = "average_from", "average_of", "average_since"  # part of the format
_COLUMNS = {FROM: EMBEDDING, OF: OF, SINCE: SINCE}  # slot of a snapshot -> of the store


class AverageSnapshot(Snapshot):
    """A snapshot of an average, whose ``embedding`` is the average of that moment, and ``FROM`` that of the store.

    Times are distances to the clock of the moment, 0 or less.
    """

    def __init__(self, rows: Snapshot, slots: Collection[str] | None, clock: int) -> None:
        self.name, self.n_rows = rows.name, rows.n_rows
        self._rows, self._clock = rows, clock
        self._specs = {spec.name: spec for spec in rows.slots}
        embedding = self._specs[EMBEDDING]
        specs = (embedding, SlotSpec(FROM, embedding.dtype, embedding.shape), self._specs[OF], self._specs[SINCE])
        self.slots = tuple(spec for spec in specs if slots is None or spec.name in slots)

    @property
    def n_kept(self) -> int:
        """Rows that were copied aside so far."""
        return self._rows.n_kept

    def read(self, column: int, rows: npt.NDArray[Any], target: Bytes, *, is_last: bool) -> None:
        """Copy rows of the id, column 0, or of a slot; after ``is_last`` they are not read again, in any slot."""
        if column == 0:
            self.read_ids(rows, target)
        else:
            self._read(rows, {self.slots[column - 1].name: target}, is_last=is_last)

    def read_ids(self, rows: npt.NDArray[Any], target: Bytes) -> None:
        """Copy the ids of rows."""
        self._rows.read_ids(rows, target)

    def peek(self, rows: npt.NDArray[Any], targets: Mapping[str, Bytes]) -> None:
        """Copy rows of some slots into a target each."""
        self._read(rows, targets, is_last=False)

    def narrow(self, bits: Bytes) -> None:
        """Protect from now on, and let be read, only rows whose bit is 1."""
        self._rows.narrow(bits)

    def close(self) -> None:
        """Let the average go."""
        self._rows.close()

    def _read(self, rows: npt.NDArray[Any], targets: Mapping[str, Bytes], *, is_last: bool) -> None:
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
