"""Commits the files of all ranks by one manifest, and rotates."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from recckpt.checkpoint.attempt import Attempt, with_shards
from recckpt.checkpoint.read_again import remove_checked
from recckpt.dense.optimizers import state_names
from recckpt.dense.sharded import Share, check_shares, model_names
from recckpt.errors import WriterFencedError
from recckpt.format.codec import time_now
from recckpt.format.manifest import Link, Manifest, Names, Parent
from recckpt.format.tables import TableEntry
from recckpt.output_dir import commit as committing
from recckpt.output_dir import rotation
from recckpt.output_dir.commit import WRITER
from recckpt.output_dir.listing import Checkpoint, Listing
from recckpt.output_dir.offers import adopt_offers
from recckpt.policies.keep import idle
from recckpt.save.decide import SavePlan
from recckpt.save.deltas import Kind
from recckpt.save.job import Destination, Job
from recckpt.save.stage import Staged
from recckpt.save.write import RankRecord, tables_of_all, totals_of

log = logging.getLogger("recckpt")


def head_of(staged: Staged, plan: SavePlan, attempt: Attempt, job: Job) -> Manifest:
    """Return the manifest without what the ranks write; only rank 0's manifest is complete. Collective.

    If the plan says that the ranks may differ, compare them in detail. A difference in the state that rank 0 saves for
    all ranks is a warning. Raises SaveFailedError if the ranks' parts do not form one state.
    """
    ranks, digest = job.ranks, staged.digest
    shares: Sequence[Mapping[str, Share]] = [staged.sharded.shares]
    if not plan.is_whole:
        shares = ranks.on_all(lambda: staged.sharded.shares)
        ranks.on_first(lambda: check_shares(shares))
    if digest is not None and plan.has_differences:
        digest.warn(ranks.on_all(lambda: digest.by_name), ranks.rank)
    return Manifest(
        ckpt_id=job.info.ckpt_id,
        save_id=attempt.save_id,
        epoch=attempt.intent.epoch,
        seq=attempt.seq,
        step=job.info.step,
        time="",
        shards=(),
        tables=(),
        files=(),
        training=staged.training,
        state=staged.state,
        writer=WRITER,
        ephemeral=job.info.ephemeral,
        names=Names(
            dense=(*staged.dense, *model_names(shares)),
            extra=tuple(staged.extra),
            io_state=plan.io_state,
            extra_of_ranks=plan.own_extra,
            dense_opt=state_names({**staged.extra, **staged.own_extra}),
        ),
        cut=job.cut,
    )


def commit(
    records: Sequence[RankRecord], head: Manifest, job: Job, to: Destination, *, attempt: Attempt, kind: Kind
) -> tuple[Manifest, dict[str, Any]]:
    """Commit, on rank 0, what all ranks wrote. Return the manifest and totals; the totals are fields of SaveInfo.

    Raises SaveFailedError if a rank wrote for another attempt; further errors as in
    :func:`recckpt.output_dir.commit.commit`.
    """
    info = job.info
    with info.timed("commit"):
        for rank, record in enumerate(records):
            if record.shard.save_id != head.save_id:
                raise info.failure(rank, f"the rank wrote for save {record.shard.save_id}, expected {head.save_id}")
        tables = tables_of_all([record.tables for record in records], kind.replaced)
        head = replace(head, time=time_now(), tables=tables)
        manifest = with_shards(head, [record.shard for record in records])
        totals = totals_of(records, tables)
        info.note(**{**totals, "n_bytes": 0})  # the bytes of this save are noted later
        if kind.base is not None:
            manifest = standing_on(committing.chain_of(to.fence.listing, kind.base), manifest)
        manifest = attempt.commit(to.fence, manifest, to.transport.visible)
        info.note(outcome=info.words.is_committed)
    return manifest, {**totals, "commit_sec": info.commit_sec}


def standing_on(links: Sequence[Checkpoint], record: Manifest) -> Manifest:
    """Return the manifest of a delta with its chain: the base, ``links[0]``, then the links below the base."""
    chain = tuple(Link(link.ckpt_id, link.manifest.name, link.directory) for link in links)
    parent = Parent(chain[0].ckpt_id, chain[0].save_id, chain[0].directory, links[0].manifest.name_xxh3)
    tables = tuple(_with_errors_below(table, links[0].manifest.table(table.name)) for table in record.tables)
    return replace(record, parent=parent, chain=chain, tables=tables)


def _with_errors_below(table: TableEntry, below: TableEntry | None) -> TableEntry:
    """Return the table with the largest rounding error of its narrowed slots over the whole chain."""
    if table.is_whole or table.reduced is None or below is None or below.reduced is None:
        return table
    return table.but(reduced=table.reduced.no_better(below.reduced))


def rotate(job: Job, to: Destination) -> None:
    """Rotate and update the index file. Only log failures, as warnings: the checkpoint is already durable."""
    storage, fence, info = to.storage, to.fence, job.info
    try:
        with info.timed("rotate"):
            listing = fence.listing
            victims = _expired(listing, job, rotation.pinned_ids(storage), to)
            going = {victim.directory for victim in victims}
            for text in idle(job.max_keep, [c.manifest for c in listing.current]) if victims else ():
                if ("max_keep", text) not in to.logged:
                    to.logged.add(("max_keep", text))
                    log.warning("%s: max_keep: %s", storage.url, text)
            for directory, error in listing.damaged.items():
                if directory not in going and (directory, str(error)) not in to.logged:
                    to.logged.add((directory, str(error)))
                    log.error("%s/%s is damaged and left alone: %s", storage.url, directory, error)
            remove_checked(storage, fence, victims, to.concurrency)
            for left in fence.leftovers(listing, fence.epoch):
                if left.epoch == fence.epoch and not left.is_offer:  # the next takeover lists and removes all others
                    rotation.remove_leftover(storage, left.directory, to.concurrency)
            adopt_offers(storage, fence, to.transport.visible)
            own = fence.listing.find(info.ckpt_id)
            if own is not None:
                info.note(n_links=len(own.links))
            fence.check()
            fence.write_index()
        to.timeline.add(storage, info)
    except OSError as error:
        log.warning("%s: could not bring rotation, index file and timeline up to date: %s", storage.url, error)
    except WriterFencedError as error:  # the save itself is valid; the next save will raise
        log.warning("%s", error)


def _expired(listing: Listing, job: Job, pinned: set[str], to: Destination) -> list[Checkpoint]:
    """Return the checkpoints that rotation removes; none if the caller's own policy fails."""
    base = to.changes.base.save_id if to.changes and to.changes.base else None
    try:
        bases, prefix = to.bases_of_guests(listing), job.step_prefix
        return rotation.expired(listing, job.max_keep, pinned, base, step_prefix=prefix, near_bases=bases)
    except Exception:
        log.exception("nothing is rotated: %r failed to say which checkpoints to keep", job.max_keep)
        return []
