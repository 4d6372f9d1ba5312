"""A table of which this rank has no rows: it says of the table what those that have some say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from recckpt.live.boxes import RankPart
from recckpt.types import Box, Door


class AbsentTable:
    """A live table that lies on other ranks.

    Args:
        name: in checkpoints.
        there: what another rank has of it.
        box: no rows, of the part that the other has.
    """

    def __init__(self, name: str, there: RankPart, box: Box) -> None:
        self.name, self.n_rows, self.reason, self._box = name, there.n_rows, there.why, box
        slots = there.slots
        self._tensors = {
            slot.name: torch.empty((0, *slot.shape), dtype=getattr(torch, slot.dtype), device="cpu") for slot in slots
        }
        self._scalars, self._settings = dict(there.scalars), dict(there.settings)

    def box(self) -> Box:
        """Return no rows."""
        return self._box

    def prepare(self) -> None:
        """Do nothing: there are no rows."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the slots, without rows."""
        return self._tensors

    def attach(self, door: Door) -> Callable[[], object]:
        """Announce nothing: no rows change here."""
        return lambda: None

    def scalars(self) -> Mapping[str, int | float]:
        """Return what other ranks had when they last told."""
        return self._scalars

    def settings(self) -> Mapping[str, Any]:
        """Return what other ranks had when they last told."""
        return self._settings

    def finish(self, scalars: Mapping[str, int | float], settings: Mapping[str, Any]) -> None:
        """Take what other ranks have."""
        self._scalars, self._settings = {**self._scalars, **scalars}, {**self._settings, **settings}
