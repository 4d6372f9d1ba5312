"""Steps of an optimizer that only add gradients up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Accumulation:
    """Counts the steps of an optimizer, of which only each n-th updates rows."""

    n: int
    n_since: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether no gradients wait for a step that uses them."""
        return self.n_since == 0

    @property
    def is_due(self) -> bool:
        """Whether the next step is one that updates."""
        return self.n_since == self.n - 1

    def count(self) -> None:
        """Count a step that is done."""
        self.n_since = (self.n_since + 1) % self.n
