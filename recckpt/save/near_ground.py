"""What near saves stand on: the newest checkpoint of their saver, as each rank looks at it before all agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from recckpt.errors import RecckptError
from recckpt.near.tier import NearTier
from recckpt.output_dir.commit import chain_of
from recckpt.parallel.outcomes import outcome_of
from recckpt.save.background_save import SaveRunner
from recckpt.save.delta_base import Changes, PeekedChanges
from recckpt.save.forgetting import end_pending
from recckpt.save.job import Destination
from recckpt.save.near_plan import NearStand


class Resumed(Protocol):
    """Says whether a checkpoint of the output dir was loaded, and how metrics call the job."""

    is_resumed: bool
    run: str


@dataclass(frozen=True)
class NearLook:
    """What a rank has seen: its host, "" where that is not known; what it counts from; as rank 0, what it stands on."""

    changes: PeekedChanges
    host: str = ""
    stand: NearStand | None = None
    failure: Exception | None = None

    def raise_failure(self) -> None:
        """Raise what has gone wrong, if something has."""
        if self.failure is not None:
            raise self.failure


class NearGround:
    """What the near saves of one saver stand on.

    Args:
        to: where checkpoints go.
        changes: what they count from.
        tier: where near saves go.
        runner: runs the saves of checkpoints.
        loads: says whether the run goes on from a checkpoint of the output dir.
    """

    def __init__(self, to: Destination, changes: Changes, tier: NearTier, runner: SaveRunner, loads: Resumed) -> None:
        self._to, self._changes, self._tier, self._runner, self._loads = to, changes, tier, runner, loads

    @property
    def has_base(self) -> bool:
        """Whether this rank has a checkpoint to count from; not while the first of this writer is yet to be settled."""
        is_settled = self._to.fence.is_settled or not self._to.fence.epoch or not self._runner.is_running
        return self._changes.base is not None and is_settled

    def hold(self) -> int:
        """Hold the output dir, as rank 0, and return the epoch.

        Rule *takeover_before_near*: no near save is made before its list is there.

        Raises:
            WriterFencedError, OSError: as :meth:`Fence.hold`.
        """
        self._to.fence.hold_once(is_resumed=self._loads.is_resumed)
        return self._to.fence.epoch

    def look(self, rank: int, step: int | None, stood_in: int) -> NearLook:
        """Return what this rank knows of a near save of a step. Raises nothing, and makes nothing but a host id.

        Args:
            rank: number of this rank.
            step: the step.
            stood_in: the last step at which a checkpoint was to take the place of one.
        """
        host, failure = outcome_of(lambda: self._prepared(rank))
        if rank or host is None:
            return NearLook(self._changes.peeked, host or "", None, failure)
        changes = self._changes.peeked
        stand, failure = outcome_of(lambda: self._stand(changes, step, stood_in))
        if _base_of(changes) != _base_of(self._changes):  # committed meanwhile: rotation did not see this one
            return self.look(rank, step, stood_in)
        return NearLook(changes, host, stand, failure)

    def _prepared(self, rank: int) -> str:
        """Return the id of this host; as rank 0, once the base is confirmed and what is to be forgotten is."""
        if rank == 0 and self.has_base:
            if self._changes.has_candidate:
                self._changes.confirm(self._to.storage, self._to.fence, is_resumed=self._loads.is_resumed)
            if not self._to.fence.is_settled:
                end_pending(self._to)
        return self._tier.dir.host()

    def _stand(self, changes: Changes, step: int | None, stood_in: int) -> NearStand | None:
        to, fence, base = self._to, self._to.fence, changes.base
        if base is None or not self.has_base:
            return None
        intent, cut = self._tier.begin(fence.epoch, fence.nonce, step, base.save_id)
        links = chain_of(fence.listing, base.save_id)
        if not links:
            return None
        if not fence.is_settled:  # a checkpoint in its place would not mend that
            raise RecckptError(f"{to.storage.url}: ids are yet to be forgotten there, as the log says")
        return NearStand(intent, cut, fence.listing.next_seq, links, stood_in)


def _base_of(changes: Changes) -> str | None:
    return None if changes.base is None else changes.base.save_id
