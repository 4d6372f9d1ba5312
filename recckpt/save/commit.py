"""Commits what all ranks wrote, as one manifest, and rotates."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from recckpt.checkpoint.attempt import Attempt
from recckpt.checkpoint.shard_writer import ShardRecord, with_shards
from recckpt.compaction.read_again import remove_checked
from recckpt.errors import CommitNotDurableError, WriterFencedError
from recckpt.format import layout
from recckpt.format.links import Link, Parent
from recckpt.format.manifest import Manifest
from recckpt.format.tables import TableEntry
from recckpt.output_dir import commit as committing
from recckpt.output_dir import rotation
from recckpt.output_dir.listing import Checkpoint, Listing
from recckpt.output_dir.offers import adopt_offers
from recckpt.output_dir.writer import WRITER
from recckpt.policies.keep import Keep, idle
from recckpt.save.job import Destination, Job
from recckpt.save.save_info import SaveInfo
from recckpt.save.stage import Staged
from recckpt.save.write import Written

log = logging.getLogger("recckpt")


def commit(staged: Staged, written: Written, seq: int, job: Job, to: Destination) -> Manifest:
    """Make visible what all ranks wrote, and return its manifest on all of them. Collective.

    Raises:
        SaveFailedError, CommitNotDurableError, WriterFencedError: as :func:`recckpt.save.save.write_and_commit`.
    """
    info = job.info

    def commit_all() -> Manifest:
        attempt = Attempt(to.storage, written.intent)
        manifest = with_shards(_head(staged, written, seq, info), _shards(written, info))
        if staged.kind.base is not None:
            manifest = _standing_on(committing.chain_of(to.fence.listing, staged.kind.base), manifest)
        record = attempt.commit(to.fence, manifest, to.transfers.visible)
        info.outcome.is_committed = True
        return record

    path = layout.join(to.storage.url.removesuffix("/"), written.intent.directory)
    with info.timed("commit"):
        try:
            record = job.ranks.on_first(commit_all)
        except CommitNotDurableError as error:
            info.path = path if error.is_in_place else ""
            raise
    info.time, info.n_bytes = record.time, record.n_bytes
    info.largest_errors = {
        f"{table.name}@{narrowed.slot}": narrowed.error
        for table in record.tables
        for narrowed in (table.reduced.narrowed if table.reduced else ())
    }
    info.metrics = {name: float(v) for name, v in record.state.items() if isinstance(v, int | float)}
    info.path = path
    return record


def _shards(written: Written, info: SaveInfo) -> list[ShardRecord]:
    for rank, record in enumerate(written.records):
        if record.shard.save_id != written.intent.save_id:
            cause = f"it wrote for save {record.shard.save_id}, expected {written.intent.save_id}"
            raise info.failure(rank, cause)
    return [record.shard for record in written.records]


def _head(staged: Staged, written: Written, seq: int, info: SaveInfo) -> Manifest:
    """Return the manifest but for what the shards hold."""
    return Manifest(
        (),
        (),
        (),
        ckpt_id=info.ckpt_id,
        save_id=written.intent.save_id,
        epoch=written.intent.epoch,
        seq=seq,
        step=info.step,
        time=committing.time_now(),
        training=staged.training,
        state=staged.state,
        writer=WRITER,
        ephemeral=info.ephemeral,
        names=written.names,
    )


def _standing_on(links: Sequence[Checkpoint], record: Manifest) -> Manifest:
    """Name in the manifest of a delta what it stands on: never a form of it, wherever that is read."""
    chain = tuple(Link(link.ckpt_id, link.manifest.origin, link.directory) for link in links)
    parent = Parent(chain[0].ckpt_id, chain[0].save_id, chain[0].directory, links[0].manifest.origin_xxh3)
    tables = tuple(_with_errors_below(table, links[0].manifest.table(table.name)) for table in record.tables)
    return replace(record, parent=parent, chain=chain, tables=tables)


def _with_errors_below(table: TableEntry, below: TableEntry | None) -> TableEntry:
    """Say of the narrowed slots of a table by how much any of its rows is off, those of the links below included."""
    if table.is_whole or table.reduced is None or below is None or below.reduced is None:
        return table
    return replace(table, reduced=table.reduced.no_better(below.reduced))


def rotate(job: Job, to: Destination) -> None:
    """Bring index file and directory up to date; the checkpoint is safe already, so a failure is a warning."""
    storage, fence, info = to.storage, to.fence, job.info
    try:
        with info.timed("rotate"):
            listing = fence.listing
            victims = _expired(listing, job.max_keep, rotation.pinned_ids(storage), _base_of(to))
            going = {victim.directory for victim in victims}
            for text in idle(job.max_keep, [c.manifest for c in listing.current]) if victims else ():
                if ("max_keep", text) not in to.told:
                    to.told.add(("max_keep", text))
                    log.warning("%s: max_keep: %s", storage.url, text)
            for directory, error in listing.damaged.items():
                if directory not in going and (directory, str(error)) not in to.told:
                    to.told.add((directory, str(error)))
                    log.error("%s/%s is damaged and left alone: %s", storage.url, directory, error)
            remove_checked(storage, fence, victims, to.concurrency)
            for left in fence.leftovers(listing, fence.epoch):
                if left.epoch == fence.epoch:  # what older writers make now goes at the next takeover, which lists it
                    rotation.remove_leftover(storage, left.directory, to.concurrency)
            adopt_offers(storage, fence, to.transfers.visible, to.concurrency)
            own = fence.listing.find(info.ckpt_id)
            info.n_links = info.n_links if own is None else len(own.links)  # fewer where an offer was adopted
            fence.check()
            fence.write_index()
        to.timeline.add(storage, info)
    except OSError as error:
        log.warning("%s: could not bring rotation, index file and timeline up to date: %s", storage.url, error)
    except WriterFencedError as error:  # the save itself counts; the next one will raise
        log.warning("%s", error)


def _base_of(to: Destination) -> str | None:
    """Return the save id of what the next delta would stand on."""
    return to.changes.base.save_id if to.changes and to.changes.base else None


def _expired(listing: Listing, max_keep: int | Keep | None, pinned: set[str], base: str | None) -> list[Checkpoint]:
    """Return what goes; nothing does where a policy of the caller's own fails."""
    try:
        return rotation.expired(listing, max_keep, pinned, base)
    except Exception:
        log.exception("nothing is rotated: %r failed to say which checkpoints to keep", max_keep)
        return []
