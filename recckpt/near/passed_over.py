"""The near saves that a restore has to pass over though they are newer than what it takes: what is lost, and why."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from recckpt.format.near_list import NearList
from recckpt.near.candidates import made_here
from recckpt.near.views import SeenSave
from recckpt.output_dir.listing import Checkpoint
from recckpt.output_dir.near_hosts import one_of_the_hosts
from recckpt.storage import Storage
from recckpt.text import plural

log = logging.getLogger("recckpt")

_VOID = "it does not count any more: since it was made ids were forgotten, or another process took the output dir over"
_NO_BASE = "the checkpoint that it stands on is damaged or gone, or cannot be read"


@dataclass(frozen=True)
class PassedOver:
    """A near save that is newer than what can be restored, and why it cannot be."""

    save: Checkpoint
    reason: str


def passed_over(
    storage: Storage, seen: Iterable[SeenSave], near_list: NearList, candidates: Sequence[Checkpoint]
) -> list[PassedOver]:
    """Return the near saves of this output dir that are newer than the first candidate, oldest first.

    What older takeovers left behind is older than the newest checkpoint, and asks the output dir for nothing.

    Args:
        storage: the output dir.
        seen: what all hosts have.
        near_list: says which count.
        candidates: what can be restored, newest first.
    """
    newest = candidates[0].manifest.order if candidates else (0, 0)
    newer = sorted(
        (each for each in seen if each.save.manifest.order > newest), key=lambda each: each.save.manifest.order
    )
    ours = made_here(storage, [each.save.manifest.save_id for each in newer])
    return [PassedOver(each.save, _reason(each, near_list)) for each in newer if each.save.manifest.save_id in ours]


def _reason(seen: SeenSave, near_list: NearList) -> str:
    if not near_list.counts(seen.save.manifest.save_id):
        return _VOID
    names = {file.name for file in seen.save.manifest.files}
    n_missing = len(names - seen.files)
    if n_missing:
        verb = "is" if n_missing == 1 else "are"
        return f"{n_missing} of its {plural(len(names), 'file')} {verb} on no host that is here, or cut short"
    return _NO_BASE


def log_passed_over(passed: Iterable[PassedOver], instead: Checkpoint | None) -> None:
    """Log what is lost, and what can be restored in its place."""
    restored = "nothing" if instead is None else instead.ckpt_id
    for each in passed:
        record = each.save.manifest
        log.warning(
            "near save %s of step %s is passed over for %s: %s", record.save_id, record.step, restored, each.reason
        )


def log_where_others_are(storage: Storage, path: str) -> None:
    """Log that no host here has near saves of an output dir, where hosts are noted in it; not worth an error."""
    host, n_hosts = None, 0
    with suppress(OSError):
        host, n_hosts = one_of_the_hosts(storage)
    if host is not None:
        others = f" and on {plural(n_hosts - 1, 'other host')}" if n_hosts > 1 else ""
        log.info("no near save in %s; there have been some on %s%s", path, host.shown, others)
