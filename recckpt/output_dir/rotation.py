"""Decides which checkpoints are removed, and removes them: the manifest first, so that no reader trusts a partly
removed one.

Pinned checkpoints stay. A pin is a small file, so that any process may pin.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from heapq import heapify, heappop, heappush

from recckpt.errors import CheckpointInUseError, CorruptCheckpointError
from recckpt.format import layout
from recckpt.output_dir.checkpoint_dir import Intent, has_manifest, read_intent
from recckpt.output_dir.listing import Checkpoint, Listing, age, locate
from recckpt.output_dir.notes import make_own_dir
from recckpt.parallel.threads import run_all
from recckpt.policies.keep import Keep, as_keep
from recckpt.storage import Storage

log = logging.getLogger("recckpt")
THREADS = 8  # threads that remove files, if the caller has no number of its own


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
    """Return the checkpoints to remove, in order of removal. No remaining checkpoint is based on them.

    Whatever the policy says, these stay: the newest of all; pinned ones; the newest that a manager made (so a manual
    save never removes the checkpoint from which a run resumes); and copies that a person made under another name. An
    ephemeral checkpoint stays only while it is the newest of all; the policy does not see it. Parents of remaining
    checkpoints stay, and are not counted. Damaged and fenced checkpoints are neither counted nor removed, except a
    damaged one with an intact replacement, if one of the two was compacted.

    ``base`` is the save id of the checkpoint since which the writer counts changes. ``near_bases`` are the save ids of
    the parents of restorable near saves. ``step_prefix`` is the prefix of ids made by a manager.
    """
    kept = chosen(listing, keep, pinned, now or datetime.now(timezone.utc), step_prefix)
    stay = listing.chains.closure([*(c.manifest.name for c in kept), *([base] if base else []), *near_bases])
    for checkpoint in listing.committed:
        if not layout.is_attempt(checkpoint.directory, checkpoint.ckpt_id):
            stay.update(link.directory for link in checkpoint.links)
    gone = [c for c in listing.committed if c.directory not in stay]
    gone += [c for c in listing.lost if _is_replaced(c, listing)]
    return in_order(gone, listing)


def chosen(
    listing: Listing, keep: int | Keep | None, pinned: Collection[str], now: datetime, step_prefix: str
) -> list[Checkpoint]:
    current = listing.current
    regular = [checkpoint for checkpoint in current if not checkpoint.manifest.ephemeral]
    wanted_ids = as_keep(keep).kept([checkpoint.manifest for checkpoint in regular], now)
    of_policy = [checkpoint for checkpoint in regular if checkpoint.ckpt_id in wanted_ids]
    of_steps = [checkpoint for checkpoint in regular if layout.step_of_id(checkpoint.ckpt_id, step_prefix) is not None]
    kept = [*current[-1:], *of_steps[-1:], *of_policy, *(c for c in current if c.ckpt_id in pinned)]
    if len(of_policy) > 1 and regular[-1].below:  # so that a flipped bit in the newest full one does not lose all
        newest_full = regular[-1].links[-1].directory
        kept += [c for c in regular if c.links[-1].directory != newest_full][-1:]
    return kept


def _is_replaced(damaged: Checkpoint, listing: Listing) -> bool:
    """Return whether a damaged checkpoint has an intact replacement of its name, and one of the two is compacted."""
    there = listing.named(damaged.manifest.name)
    is_ours = layout.is_attempt(damaged.directory, damaged.ckpt_id)
    return is_ours and there is not None and (damaged.manifest.is_compacted or there.manifest.is_compacted)


def in_order(gone: Sequence[Checkpoint], listing: Listing) -> list[Checkpoint]:
    """Return checkpoints in the order of removal: no remaining checkpoint is ever based on a removed one.

    Checkpoints that readers do not use go first, then the earliest, so that after a crash no superseded one is read.
    """
    taken = {c.directory for c in listing.current}
    ages = {c.directory: (c.directory in taken, age(c.directory, c.manifest)) for c in gone}
    needed_by = Counter(c.below[0].directory for c in gone if c.below)
    by_name = {c.directory: c for c in gone}
    free = [(ages[name], name) for name in by_name if not needed_by[name]]
    heapify(free)
    order = []
    while free:
        order.append(by_name[heappop(free)[1]])
        for below in order[-1].below[:1]:
            needed_by[below.directory] -= 1
            if below.directory in by_name and not needed_by[below.directory]:
                heappush(free, (ages[below.directory], below.directory))
    return order


def sync_superseders(storage: Storage, listing: Listing, gone: Sequence[Checkpoint]) -> None:
    """Make superseding checkpoints durable before any removal, even if they go, too: others are based on them."""
    superseders = [c.directory for c in listing.committed if c.manifest.supersedes]
    for directory in [*superseders, ""] if superseders and gone else []:
        storage.sync_dir(directory)


def pin(storage: Storage, ckpt_id: str) -> None:
    """Keep a checkpoint, whatever the policy says. Raises CheckpointNotFoundError if the checkpoint does not exist."""
    locate(storage, ckpt_id)
    make_own_dir(storage, layout.PINS_DIR)
    with suppress(FileExistsError):
        storage.put_if_absent(layout.pin(ckpt_id), b"{}\n")
    locate(storage, ckpt_id)


def unpin(storage: Storage, ckpt_id: str) -> None:
    storage.remove(layout.pin(ckpt_id))


def pinned_ids(storage: Storage) -> set[str]:
    names = map(layout.parse_pin, storage.list_files(layout.PINS_DIR))
    return {ckpt_id for ckpt_id in names if ckpt_id is not None}


def leftovers(storage: Storage, listing: Listing, epoch: int, passed_over: set[str] | None = None) -> list[Intent]:
    """Return the attempts of writers up to ``epoch`` that were never committed, or are partly removed.

    These writers must be dead, or be the caller between two saves. A directory with an unreadable ``INTENT`` is not a
    valid checkpoint. It is logged, skipped, and added to ``passed_over``: directories that are not checked again.
    """
    passed_over = set() if passed_over is None else passed_over
    leftovers = []
    for directory in listing.uncommitted:
        if directory in passed_over:
            continue
        try:
            intent = read_intent(storage, directory)
            if intent is None and layout.is_offer_dir(directory):  # its compactor continues to write after a removal
                intent = Intent(directory, 0, "", None, is_offer=True)
            if intent is not None and intent.epoch <= epoch and not has_manifest(storage, directory):
                leftovers.append(intent)
        except (OSError, CorruptCheckpointError) as error:
            passed_over.add(directory)
            log.warning(
                "%s/%s was never finished, and is skipped, because its %s cannot be read (%s); "
                "`recckpt repair --clean` removes it once its writer is dead",
                storage.url,
                directory,
                layout.INTENT,
                error,
            )
    return leftovers


def remove(storage: Storage, checkpoint: Checkpoint, concurrency: int) -> bool:
    """Remove recckpt's files of a checkpoint; return whether the manifest is gone. Failures are logged."""
    is_gone = False
    try:
        storage.remove(layout.join(checkpoint.directory, layout.MANIFEST))  # first: readers require it
        is_gone = True
        storage.sync_dir(checkpoint.directory)
        _remove_files(storage, checkpoint.directory, {file.name for file in checkpoint.manifest.files}, concurrency)
    except OSError as error:
        log.warning("could not remove all of %s/%s: %s", storage.url, checkpoint.directory, error)
    return is_gone


def remove_leftover(storage: Storage, directory: str, concurrency: int) -> None:
    """Remove the files of an attempt without a manifest. A failure is logged, and retried at the next save."""
    try:
        _remove_files(storage, directory, (), concurrency)
        log.info("removed %s/%s, which was never finished", storage.url, directory)
    except OSError as error:
        log.warning("could not remove all of the leftover %s/%s: %s", storage.url, directory, error)


def abandon(storage: Storage, directory: str) -> None:
    """Remove the files of a failed attempt to free their space. A failure is logged.

    INTENT stays until the next save, because the name must not be free before all ranks have left the directory.
    """
    try:
        names = storage.list_files(directory)
        for name in names if layout.MANIFEST not in names else ():
            if layout.is_ours(name) and name != layout.INTENT:
                storage.remove(layout.join(directory, name))
    except OSError as error:
        log.warning("could not remove all of the failed attempt %s/%s: %s", storage.url, directory, error)


def _remove_files(storage: Storage, directory: str, listed: Collection[str], concurrency: int) -> None:
    """Remove our files, INTENT last, because it identifies the leftover. Then remove the directory if it is empty."""
    names = [name for name in storage.list_files(directory) if name in listed or layout.is_ours(name)]
    paths = [layout.join(directory, name) for name in names if name != layout.INTENT]
    run_all(storage.remove, paths, storage.threads(concurrency))  # 1,024 ranks need 11,000 requests
    if layout.INTENT in names:
        storage.remove(layout.join(directory, layout.INTENT))
    storage.remove_empty_dirs(directory)


def deletable(
    listing: Listing, ckpt_id: str, pinned: Collection[str], place: str, near_bases: Collection[str] = ()
) -> list[Checkpoint]:
    """Return all committed checkpoints of an id, in the order of removal, because a superseded one must not reappear.

    Raises CheckpointInUseError if the id must stay; ``near_bases`` as in :func:`expired`.
    """
    victims = [checkpoint for checkpoint in listing.committed if checkpoint.ckpt_id == ckpt_id]
    reason = _reason(listing, victims, ckpt_id, pinned)
    if reason is None and not {victim.manifest.name for victim in victims}.isdisjoint(near_bases):
        reason = "near saves are based on it; save once more, and delete it then"
    if reason is not None:
        raise CheckpointInUseError(f"{place}: {ckpt_id!r} is not deleted: {reason}")
    return in_order(victims, listing)


def _reason(listing: Listing, victims: Collection[Checkpoint], ckpt_id: str, pinned: Collection[str]) -> str | None:
    """Return why an id must stay, and what to do; None if the id may be removed."""
    directories = {victim.directory for victim in victims}
    others = [checkpoint for checkpoint in listing.committed if checkpoint.ckpt_id != ckpt_id]
    standing = [c.ckpt_id for c in others if directories & {link.directory for link in c.below}]
    if standing:
        first, n_more = repr(standing[-1]), len(set(standing)) - 1
        deltas = f"{first} is a delta that is" if not n_more else f"{first} and {n_more} more are deltas that are"
        return (
            f"{deltas} read from it; first delete the deltas based on it, newest first, or leave it to max_keep, which "
            "removes a chain once none of it is kept"
        )
    if ckpt_id in pinned:
        return "it is pinned; manager.unpin(step) first, or remove its file in .recckpt/pins"
    if not others:
        return "it is the only checkpoint; save another one first"
    copied = [victim.directory for victim in victims if not layout.is_attempt(victim.directory, ckpt_id)]
    if copied:
        return f"it is in {copied[0]}/, a directory that recckpt did not name; remove that directory by hand"
    return None
