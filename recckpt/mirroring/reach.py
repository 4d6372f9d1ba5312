"""Forgetting reaches the mirrors that a run knows, and theirs: each gets a pass, as if it were called there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from recckpt.errors import RecckptError
from recckpt.format.manifest import Manifest
from recckpt.mirroring.mirror import mirror as mirror_run
from recckpt.output_dir.forget_requests import done_requests
from recckpt.output_dir.known_mirrors import KnownMirror, mirrors_below
from recckpt.output_dir.listing import list_checkpoints
from recckpt.policies.keep import Keep
from recckpt.storage import Storage, open_storage

log = logging.getLogger("recckpt")


@dataclass(frozen=True)
class PresentIds(Keep):
    """What a mirror has: whoever reaches it does not know the policy that it has been given."""

    ckpt_ids: frozenset[str]

    def kept(self, checkpoints: Sequence[Manifest], now: datetime) -> set[str]:
        """Return those of the ids."""
        return {checkpoint.ckpt_id for checkpoint in checkpoints if checkpoint.ckpt_id in self.ckpt_ids}


def reach_mirrors(storage: Storage) -> None:
    """Bring what was forgotten in a run into its mirrors, and theirs; log which of them may still have the ids.

    No mirror is made, and none gets checkpoints of ids that it did not have, but for the newest.
    """
    forgotten = done_requests(storage)
    for run, mirror in mirrors_below(storage):
        if not mirror.is_behind(forgotten):
            continue
        if mirror.problem:
            what = "%s: mirrors of %s may still have the ids, and cannot be listed: %s"
            log.warning(what, run.url, mirror.url, mirror.problem)
            continue
        try:
            _reach(run, mirror, forgotten)
        except (RecckptError, OSError, ValueError) as error:
            what = "%s: the mirror %s may still have the ids: %s; its next pass takes them out"
            log.warning(what, run.url, mirror.url, error)


def _reach(run: Storage, mirror: KnownMirror, forgotten: frozenset[str]) -> None:
    if mirror.run_url != run.url:
        raise RecckptError(f"it is a mirror of {mirror.run_url}, as which this run was known to it")
    if not mirror.is_here:
        raise RecckptError(f"it is on the host {mirror.host}")
    if not forgotten <= done_requests(run):
        raise RecckptError(f"its run is the mirror {run.url}, which may have them, too")
    there = list_checkpoints(open_storage(mirror.url))
    if there.is_empty:
        raise RecckptError("nothing is there now")
    mirror_run(run.url, mirror.url, keep=PresentIds(frozenset(there.ckpt_ids)))
