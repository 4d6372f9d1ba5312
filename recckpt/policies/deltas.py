"""Decides whether the next checkpoint is a delta, from the sizes of the chain below it; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recckpt.types import positive_int, positive_number

MAX_DELTAS = 999  # part of the format: a chain has at most 1,000 links, one of them full
_PATIENCE = 2  # with compact=True, a chain may become this many times as long before the next full save


@dataclass(frozen=True)
class Chain:
    """The chain below the next delta: the newest full or compacted checkpoint, and the deltas since."""

    n_deltas: int  # deltas since the full or compacted checkpoint
    delta_bytes: int  # bytes of all files of the deltas
    full_bytes: int  # bytes of all files of the full or compacted checkpoint


@dataclass(frozen=True)
class Deltas:
    """Delta checkpoints, with a full or compacted checkpoint from time to time.

    Args:
        full_every: number of deltas after a full checkpoint, before the next full checkpoint.
        max_chain_bytes: limit for the bytes of the deltas, as a multiple of the bytes of the full checkpoint.
        max_dirty: greatest share of changed rows for a delta; if more rows have changed, the save is full.
        compact: whether a chain that reaches these limits is compacted in the background while training continues. If
            so, a save is full only after the chain has reached twice the limits.

    Raises:
        ValueError: an argument is invalid.
    """

    full_every: int = 20
    max_chain_bytes: float = 1.0
    max_dirty: float = 0.5
    compact: bool = False

    def __post_init__(self) -> None:
        if positive_int("Deltas: full_every", self.full_every) > MAX_DELTAS:
            raise ValueError(f"Deltas: full_every must be at most {MAX_DELTAS}, found {self.full_every}")
        positive_number("Deltas: max_chain_bytes", self.max_chain_bytes)
        if positive_number("Deltas: max_dirty", self.max_dirty) > 1:
            raise ValueError(f"Deltas: max_dirty must be at most 1, found {self.max_dirty!r}")
        if type(self.compact) is not bool:
            raise ValueError(f"Deltas: compact must be True or False, found {self.compact!r}")

    def why_full(self, chain: Chain | None, n_changed: int, n_rows: int) -> str | None:
        """Return why the next checkpoint is full; None if it is a delta. Pure.

        Args:
            chain: the chain of the base; None without a base.
            n_changed: rows that a delta would hold, of all tables and ranks.
            n_rows: rows of all tables and ranks.
        """
        if chain is None:
            return "there is no checkpoint to count changes from"
        if n_rows == 0:
            return "there are no rows"
        if n_changed > self.max_dirty * n_rows:
            return f"{n_changed} of {n_rows} rows have changed, more than a share of {self.max_dirty} (max_dirty)"
        return self._why_too_long(chain, _PATIENCE if self.compact else 1)

    def why_compact(self, chain: Chain) -> str | None:
        """Return why a chain should be compacted; None if it should not. Pure."""
        return self._why_too_long(chain, 1) if self.compact else None

    def _why_too_long(self, chain: Chain, times: int) -> str | None:
        n_deltas, factor = min(times * self.full_every, MAX_DELTAS), times * self.max_chain_bytes
        if chain.n_deltas >= n_deltas:
            return f"{chain.n_deltas} deltas since the last full checkpoint, the limit is {n_deltas} (full_every)"
        if chain.delta_bytes > factor * chain.full_bytes:
            sizes = f"{chain.delta_bytes} bytes of deltas, {chain.full_bytes} of the full checkpoint"
            return f"{sizes}, the limit is {factor} times that (max_chain_bytes)"
        return None


def as_deltas(deltas: Any) -> Deltas | None:
    """Return the policy for an argument ``deltas``; None for full checkpoints only. ValueError for anything else."""
    if isinstance(deltas, Deltas):
        return deltas
    if type(deltas) is not bool:
        raise ValueError(f"deltas must be True, False or Deltas(...), found {deltas!r}")
    return Deltas() if deltas else None
