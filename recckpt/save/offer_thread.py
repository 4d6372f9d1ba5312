"""``Deltas(compact=True)``: a thread of the saver compacts a chain that has grown long, while training goes on."""

from __future__ import annotations

import logging
import threading

from recckpt.compaction.compact import make_offer
from recckpt.compaction.whole import Means
from recckpt.output_dir.commit import chain_of
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import Checkpoint
from recckpt.parallel.executor import StoppedError
from recckpt.parallel.threads import give_way
from recckpt.parallel.waiting import Latch, start
from recckpt.save.delta_base import Changes
from recckpt.storage import Storage

log = logging.getLogger("recckpt")

_BUDGET_BYTES = 64 << 20  # beside a trainer, which needs its memory


class OfferThread:
    """Makes offers, one at a time, in a thread that gives way to training. Not thread-safe.

    An error is logged and fails nothing: a later save is full where the chain is too long by then.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._stop = Latch()
        self._offered: str | None = None

    def begin_if_due(self, storage: Storage, fence: Fence, changes: Changes | None) -> None:
        """Begin an offer of what the next delta would stand on, if the policy wants one; rank 0 calls this."""
        chain = changes.chain(fence) if changes else None
        if changes is None or changes.base is None or chain is None or self._is_at_work:
            return
        reason = changes.policy.why_compact(chain)
        if reason is not None and self._offered not in fence.listing.uncommitted:  # one that waits is enough
            log.info("%s: compacting in the background: %s", storage.url, reason)
            newest = chain_of(fence.listing, changes.base.save_id)[0]
            self._stop = Latch()
            # A daemon: an interpreter that ends does not wait for it, and what it leaves is no whole offer.
            self._thread = threading.Thread(
                target=self._run, args=(storage, newest, self._stop), name="recckpt-compact", daemon=True
            )
            start(self._thread)

    def close(self) -> None:
        """End what is at work, which leaves nothing; an offer may be begun again."""
        thread, self._thread = self._thread, None
        self._stop.set()
        if thread is not None:
            thread.join()

    @property
    def _is_at_work(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self, storage: Storage, checkpoint: Checkpoint, stop: Latch) -> None:
        give_way()
        try:
            done = make_offer(storage, checkpoint, Means(None, 1, _BUDGET_BYTES, stop.is_set, has_bar=False))
            self._offered = done.directory or self._offered
        except StoppedError:
            log.info("%s: the compaction of %r was ended", storage.url, checkpoint.ckpt_id)
        except Exception as error:
            log.warning("%s: %r could not be compacted: %s", storage.url, checkpoint.ckpt_id, error)
