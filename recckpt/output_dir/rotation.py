"""Which checkpoints go, and how they go: the manifest first, so that no reader trusts what a crash leaves.

Pinned ones stay, by a small file each, so that any process may pin.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import datetime, timezone

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.output_dir.checkpoint_dir import Intent, has_manifest, read_intent
from recckpt.output_dir.listing import Checkpoint, Listing, locate
from recckpt.parallel.threads import run_all
from recckpt.policies.keep import Keep, as_keep
from recckpt.storage import Storage

log = logging.getLogger("recckpt")

_LAST = frozenset({layout.INTENT, layout.OFFER})  # files of an attempt, of an offer
THREADS = 8  # to remove files with, where the caller has no number of its own


def expired(
    listing: Listing,
    keep: int | Keep | None,
    pinned: Collection[str],
    base: str | None,
    *,
    now: datetime | None = None,
    step_prefix: str = layout.STEP_PREFIX,
    near_bases: Collection[str] = (),
) -> list[Checkpoint]:
    """Return the checkpoints to remove, in this order: those that no remaining checkpoint is read from.

    The newest of all stays whatever the policy says. So do pinned ones, the newest that a manager made (a save by hand
    takes nothing of what a run goes on from), and what a person has copied under a name of its own. An ephemeral
    checkpoint stays only while it is the newest of all; the policy does not see it. Links that others stand on stay and
    do not count. Damaged and fenced checkpoints neither count nor go, but for those that a whole form stands for, and
    damaged forms.

    Args:
        listing: what is there.
        keep: the policy.
        pinned: ids.
        base: save id of the checkpoint that the writer counts changes from, None where it has none.
        now: the time for the policy.
        step_prefix: of the ids that a manager gives.
        near_bases: save ids of what near saves stand on that may be restored.
    """
    kept = chosen(listing, keep, pinned, now or datetime.now(timezone.utc), step_prefix)
    stay = listing.chains.closure([*(c.manifest.origin for c in kept), *([base] if base else []), *near_bases])
    for checkpoint in listing.committed:
        if not layout.is_attempt(checkpoint.directory, checkpoint.ckpt_id):
            stay.update(link.directory for link in checkpoint.links)
    gone = [c for c in listing.committed if c.directory not in stay]
    gone += [c for c in listing.lost if _is_replaced(c, listing)]
    return in_order(gone, listing)


def chosen(
    listing: Listing, keep: int | Keep | None, pinned: Collection[str], now: datetime, step_prefix: str
) -> list[Checkpoint]:
    """Return the checkpoints that stay for their own sake."""
    current = listing.current
    regular = [checkpoint for checkpoint in current if not checkpoint.manifest.ephemeral]
    wanted_ids = as_keep(keep).kept([checkpoint.manifest for checkpoint in regular], now)
    of_policy = [checkpoint for checkpoint in regular if checkpoint.ckpt_id in wanted_ids]
    of_steps = [checkpoint for checkpoint in regular if layout.step_of_id(checkpoint.ckpt_id, step_prefix) is not None]
    kept = [*current[-1:], *of_steps[-1:], *of_policy, *(c for c in current if c.ckpt_id in pinned)]
    if len(of_policy) > 1 and regular[-1].below:  # one flipped bit of the newest full one must not take all
        newest_full = regular[-1].links[-1].directory
        kept += [c for c in regular if c.links[-1].directory != newest_full][-1:]
    return kept


def _is_replaced(damaged: Checkpoint, listing: Listing) -> bool:
    """Say whether readers have another representation of a damaged checkpoint, and one of the two is a form."""
    there = listing.representation(damaged.manifest.origin)
    is_ours = layout.is_attempt(damaged.directory, damaged.ckpt_id)
    return is_ours and there is not None and (damaged.manifest.form_of or there.manifest.form_of) is not None


def in_order(gone: Sequence[Checkpoint], listing: Listing) -> list[Checkpoint]:
    """Return them in the order of removal: a delta before its links, and of one place the delta before its forms.

    Damaged forms, and superseded ones on which nothing stands, go first: they must not become current again.
    """
    needed = {c.manifest.origin for c in listing.current} | {
        c.manifest.parent.save_id for c in gone if c.manifest.parent
    }

    def urgency(checkpoint: Checkpoint) -> tuple[bool, bool]:
        is_damaged_form = checkpoint.manifest.form_of is not None and checkpoint in listing.lost
        return is_damaged_form, checkpoint.manifest.origin not in needed

    newest_first = sorted(gone, key=lambda c: (c.manifest.place, c.manifest.kind == "delta"), reverse=True)
    return sorted(newest_first, key=urgency, reverse=True)


def sync_forms(storage: Storage, listing: Listing, gone: Sequence[Checkpoint]) -> None:
    """Make the forms that stay durable, before what they replace goes."""
    removed = {checkpoint.directory for checkpoint in gone}
    forms = [c.directory for c in listing.committed if c.manifest.form_of and c.directory not in removed]
    for directory in [*forms, ""] if forms and gone else []:
        storage.sync_dir(directory)


def pin(storage: Storage, ckpt_id: str) -> None:
    """Keep a checkpoint, whatever the policy says; CheckpointNotFoundError where it is not, or no longer, there."""
    locate(storage, ckpt_id)
    for directory in (layout.OWN_DIR, layout.PINS_DIR):
        with suppress(FileExistsError):
            storage.make_dir(directory)
    with suppress(FileExistsError):
        storage.put_if_absent(layout.pin(ckpt_id), b"{}\n")
    locate(storage, ckpt_id)


def unpin(storage: Storage, ckpt_id: str) -> None:
    """Unpin a checkpoint, so that the next save may remove it; does nothing to one that is not pinned."""
    storage.remove(layout.pin(ckpt_id))


def pinned_ids(storage: Storage) -> set[str]:
    """Return the ids that are pinned, even of checkpoints that are gone."""
    names = map(layout.parse_pin, storage.list_files(layout.PINS_DIR))
    return {ckpt_id for ckpt_id in names if ckpt_id is not None}


def leftovers(storage: Storage, listing: Listing, epoch: int, passed_over: set[str] | None = None) -> list[Intent]:
    """Return the attempts that never committed or are half removed, by writers up to ``epoch``.

    Those writers must be dead, or be the caller between two saves. A directory whose ``INTENT`` cannot be read holds
    nothing that counts: it is logged, passed over, and not looked at again where it is among ``passed_over``.
    """
    passed_over = set() if passed_over is None else passed_over
    leftovers = []
    for directory in listing.uncommitted:
        if directory in passed_over:
            continue
        try:
            intent = read_intent(storage, directory)
            if intent is not None and intent.epoch <= epoch and not has_manifest(storage, directory):
                leftovers.append(intent)
        except (OSError, CorruptCheckpointError) as error:
            passed_over.add(directory)
            log.warning(
                "%s/%s was never finished, and is passed over, since its %s cannot be read (%s); "
                "`recckpt repair --clean` removes it once its writer is dead",
                storage.url,
                directory,
                layout.INTENT,
                error,
            )
    return leftovers


def remove(storage: Storage, checkpoint: Checkpoint, concurrency: int) -> bool:
    """Remove what recckpt wrote of a checkpoint, with several threads, and say whether its manifest is gone.

    A failure is logged and never fails a save.
    """
    is_gone = False
    try:
        storage.remove(layout.join(checkpoint.directory, layout.MANIFEST))  # first: readers trust nothing without it
        is_gone = True
        storage.sync_dir(checkpoint.directory)
        _remove_files(storage, checkpoint.directory, {file.name for file in checkpoint.manifest.files}, concurrency)
    except OSError as error:
        log.warning("could not remove all of %s/%s: %s", storage.url, checkpoint.directory, error)
    return is_gone


def remove_leftover(storage: Storage, directory: str, concurrency: int) -> None:
    """Remove what an attempt without a manifest wrote; a failure is logged and tried again at the next save."""
    try:
        _remove_files(storage, directory, (), concurrency)
        log.info("removed %s/%s, which was never finished", storage.url, directory)
    except OSError as error:
        log.warning("could not remove all of the leftover %s/%s: %s", storage.url, directory, error)


def abandon(storage: Storage, directory: str) -> None:
    """Remove what a failed attempt wrote, so that it takes no room; a failure is logged.

    INTENT stays until the next save: all ranks must be through with the directory before its name is free.
    """
    try:
        names = storage.list_files(directory)
        for name in names if layout.MANIFEST not in names else ():
            if layout.is_ours(name) and name != layout.INTENT:
                storage.remove(layout.join(directory, name))
    except OSError as error:
        log.warning("could not remove all of the failed attempt %s/%s: %s", storage.url, directory, error)


def _remove_files(storage: Storage, directory: str, listed: Collection[str], concurrency: int) -> None:
    """Remove our files, and the directory if it is empty then; last the file that says whose leftover this is."""
    names = [name for name in storage.list_files(directory) if name in listed or layout.is_ours(name)]
    paths = [layout.join(directory, name) for name in names if name not in _LAST]
    run_all(storage.remove, paths, storage.threads(concurrency))  # of 1,024 ranks, 11,000 requests
    for name in _LAST.intersection(names):
        storage.remove(layout.join(directory, name))
    storage.remove_empty_dirs(directory)
