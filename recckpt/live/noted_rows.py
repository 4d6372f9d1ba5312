"""Rows that are about to change, noted on the device where their numbers are: no step waits for it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.live.devices import wait_for_devices

Int64s = npt.NDArray[np.int64]


class NotedRows:
    """A byte a row on each device that names rows. Used under the lock of the store.

    Several streams may note at once: all write the same value.

    Args:
        begin: first row of the box that is noted.
        n_rows: how many are.
    """

    def __init__(self, begin: int, n_rows: int) -> None:
        self._begin, self._n_rows = begin, n_rows
        self._noted: dict[torch.device, Tensor | None] = {}  # None where there is no room

    @torch.no_grad()
    def note(self, rows: Tensor) -> bool:
        """Note rows, as :meth:`recckpt.types.Door.announce` takes them, once the current stream has made them.

        Returns:
            Whether it did: not where the device has no room.
        """
        noted = self._on(rows.device)
        if noted is None:
            return False
        if rows.dtype == torch.bool:
            noted[1:-1].logical_or_(rows.reshape(-1)[self._begin : self._begin + self._n_rows])
        else:  # those of others are noted before the first and behind the last
            places = (rows.reshape(-1).to(torch.int64) - (self._begin - 1)).clamp_(0, self._n_rows + 1)
            noted.index_fill_(0, places, True)
        return True

    @torch.no_grad()
    def take(self) -> Int64s:
        """Return what was noted since the last time, all different; waits for the devices."""
        all_noted = [noted for noted in self._noted.values() if noted is not None]
        wait_for_devices(all_noted)
        taken = [noted[1:-1].nonzero().flatten().cpu().numpy() for noted in all_noted]
        for noted in all_noted:
            noted.zero_()
        wait_for_devices(all_noted)  # before other streams note again
        return np.unique(np.concatenate(taken)) if len(taken) > 1 else np.concatenate([np.empty(0, np.int64), *taken])

    def _on(self, device: torch.device) -> Tensor | None:
        if device not in self._noted:
            self._noted[device] = noted = _zeros(self._n_rows + 2, device)
            wait_for_devices([] if noted is None else [noted])  # before other streams note
        return self._noted[device]


@torch.inference_mode(False)
def _zeros(n: int, device: torch.device) -> Tensor | None:
    """Return so many bytes; None where there is no room, for which training must not fail."""
    try:
        return torch.zeros(n, dtype=torch.bool, device=device)
    except torch.OutOfMemoryError:
        return None
