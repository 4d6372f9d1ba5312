"""Steps of an optimizer of which only each n-th updates rows, and what such counting does not go with."""

from __future__ import annotations

import sys
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

    def refuse(self, *, scaler: bool) -> None:
        """Refuse a step that another one counts or scales already.

        Args:
            scaler: whether a ``GradScaler`` calls it, for which the gradients are still scaled.

        Raises:
            ValueError: it accumulates, and a ``GradScaler`` or accelerate calls it; or both of them do.
        """
        if scaler and self.n > 1:  # it would unscale the sum so far with each of them
            raise ValueError(
                f"found a GradScaler and set_grad_accum_steps({self.n}), expected one of them: leave it at 1, and "
                "accumulate by calling scaler.step and update on each n-th batch"
            )
        if self.n > 1 and is_stepped_by_accelerate():
            raise ValueError(
                f"found set_grad_accum_steps({self.n}) of an optimizer that accelerate has prepared, which counts "
                "batches too: leave it at 1, and give Accelerator(gradient_accumulation_steps=...)"
            )
        if scaler:
            raise ValueError(
                "accelerate updates the scale after the step of each optimizer that it has prepared, so with fp16 the "
                "gradients of a second one would be unscaled twice: prepare recckpt.sparse.JointOptimizer(dense, "
                "sparse) in place of the two, or use mixed_precision='bf16'"
            )


def is_stepped_by_accelerate() -> bool:
    """Say whether an optimizer that accelerate has prepared is making this step: it leaves no mark on the inner one."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "accelerate.optimizer":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
