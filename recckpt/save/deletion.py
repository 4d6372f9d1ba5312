"""What a saver does where one of its checkpoints is deleted by hand."""

from __future__ import annotations

import logging

from recckpt.compaction.read_again import remove_checked
from recckpt.errors import RecckptError
from recckpt.output_dir.deletion import chosen
from recckpt.output_dir.listing import Checkpoint, locate
from recckpt.output_dir.rotation import pinned_ids
from recckpt.parallel.ranks import Ranks
from recckpt.save.job import Destination

log = logging.getLogger("recckpt")


class Deletion:
    """Removes checkpoints of one saver's output dir, whose owner the saver is, or becomes."""

    def __init__(self, to: Destination) -> None:
        self._to = to

    def delete(self, ranks: Ranks, ckpt_id: str) -> None:
        """Remove a checkpoint; as :meth:`recckpt.CheckpointManager.delete`. Collective; no save is under way."""
        ranks = ranks if ranks.size == 1 else ranks.raising(_failed)
        for rank, other in enumerate(ranks.gather(ckpt_id)):
            if other != ckpt_id:
                raise _failed(rank, f"it was to delete {other!r}, this one {ckpt_id!r}: all ranks name the same step")
        if ranks.on_first(lambda: self._is_base(self._chosen(ckpt_id))) and self._to.changes is not None:
            self._to.changes.drop_base()  # first: whatever fails from here on, no delta stands on what may be gone
        ranks.on_first(lambda: self._remove(ckpt_id))

    def _chosen(self, ckpt_id: str) -> list[Checkpoint]:
        """Take the output dir over, or check that it is held, and return what goes."""
        storage, fence = self._to.storage, self._to.fence
        locate(storage, ckpt_id)  # before anything changes
        fence.hold()
        listing, near = fence.listing, self._to.near
        newest = max((checkpoint.manifest.order for checkpoint in listing.committed), default=(0, 0))
        return chosen(listing, ckpt_id, pinned_ids(storage), storage.url, near.bases(newest) if near else ())

    def _is_base(self, victims: list[Checkpoint]) -> bool:
        """Say whether the next delta would stand on one of these."""
        base = self._to.changes.base if self._to.changes is not None else None
        return base is not None and base.save_id in {victim.manifest.origin for victim in victims}

    def _remove(self, ckpt_id: str) -> None:
        storage, fence = self._to.storage, self._to.fence
        victims = self._chosen(ckpt_id)
        gone = remove_checked(storage, fence, victims, self._to.concurrency)
        fence.write_index()
        if {victim.directory for victim in victims}.difference(gone):
            what = f"not all of {ckpt_id!r} could be removed, as the log says"
            raise RecckptError(f"{storage.url}: {what}; delete it again")
        log.info("%s: %s was deleted by hand", storage.url, ckpt_id)


def _failed(rank: int, cause: str) -> RecckptError:
    return RecckptError(f"deleting failed on rank {rank}: {cause}")
