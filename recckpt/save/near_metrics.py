"""The metrics of near saves: how they go, and what a loss would cost."""

from __future__ import annotations

import time

from recckpt.output_dir.listing import Listing
from recckpt.save.save_info import SaveInfo
from recckpt.telemetry import measure


class NearMetrics:
    """Records the metrics of the near saves of one saver, on rank 0. Thread-safe.

    Args:
        run: the job, as its series name it.
    """

    def __init__(self, run: str) -> None:
        self._run, self._newest_step = run, 0  # of those that this process has made

    def due(self, info: SaveInfo, listing: Listing) -> None:
        """Record what a loss would have cost when one was due, whether it began or not.

        Args:
            info: of the near save.
            listing: what is committed in the output dir.
        """
        step = info.step or 0
        durable = listing.committed[-1].manifest.step or 0 if listing.committed else 0
        lags = {"lag": step - durable, "near.lag": step - max(durable, self._newest_step)}
        none = {"near.saves": 0, "near.failures": 0}  # to Prometheus, what is not there has not increased
        measure(self._run, {name: max(0, lag) for name, lag in lags.items()} | none)

    def made(self, info: SaveInfo) -> None:
        """Record one that was acknowledged."""
        self._newest_step = info.step or 0
        seconds = {"near.pause": info.blocked_sec, "near.duration": info.seconds, "near.last_save.time": time.time()}
        measure(self._run, {"near.saves": 1, "near.bytes": info.n_bytes, **seconds})

    def failed(self) -> None:
        """Record one that has failed."""
        measure(self._run, {"near.failures": 1})
