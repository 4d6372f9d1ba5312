"""Commits what all ranks wrote, as one manifest, and rotates."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from recckpt.checkpoint.attempt import Attempt
from recckpt.checkpoint.shard_writer import with_shards
from recckpt.compaction.read_again import remove_checked
from recckpt.dense.sharded import Share, check_shares, model_names
from recckpt.errors import WriterFencedError
from recckpt.format.links import Link, Parent
from recckpt.format.manifest import Manifest, Names
from recckpt.format.moments import time_now
from recckpt.format.tables import TableEntry
from recckpt.output_dir import commit as committing
from recckpt.output_dir import rotation
from recckpt.output_dir.listing import Checkpoint, Listing
from recckpt.output_dir.offers import adopt_offers
from recckpt.output_dir.writer import WRITER
from recckpt.parallel.ranks import Ranks
from recckpt.policies.best import idle
from recckpt.save.decide import SavePlan
from recckpt.save.full_or_delta import Kind
from recckpt.save.job import Destination, Job
from recckpt.save.save_info import SaveInfo, SaveTotals
from recckpt.save.stage import Staged
from recckpt.save.totals import totals_of
from recckpt.save.write import RankRecord
from recckpt.save.written_tables import tables_of_all

log = logging.getLogger("recckpt")


@dataclass(frozen=True)
class Commit:
    """A checkpoint that was committed, and what its save wrote in all."""

    manifest: Manifest
    totals: SaveTotals
    seconds: float

    @property
    def for_others(self) -> Commit:
        """What the other ranks get: as much whatever their number, so without the files of all."""
        return replace(self, manifest=replace(self.manifest, shards=(), files=()))

    def with_files_of(self, own: RankRecord) -> Commit:
        """Return what another rank makes of that: the manifest lists its own shard and files."""
        return replace(self, manifest=replace(self.manifest, shards=(own.shard.shard,), files=own.shard.files))


def compared_names(staged: Staged, plan: SavePlan, ranks: Ranks) -> Names:
    """Return, on rank 0, the names of what all ranks have; compare in detail what the plan says. Collective.

    Raises:
        SaveFailedError: the ranks do not have the parts of one state. Where they differ in what rank 0 saves for all,
            a warning says so.
    """
    shares: Sequence[Mapping[str, Share]] = [staged.sharded.shares]
    if not plan.is_whole:
        shares = ranks.on_all(lambda: staged.sharded.shares)
        ranks.on_first(lambda: check_shares(shares))
    digest = staged.digest
    if digest is not None and plan.has_differences:
        digest.warn(ranks.on_all(lambda: digest.by_name), ranks.rank)
    return Names(
        dense=(*staged.dense, *model_names(shares)),
        extra=tuple(staged.extra),
        io_state=plan.io_state,
        extra_of_ranks=plan.own_extra,
        dense_opt=staged.dense_opt,
    )


def head_of(staged: Staged, names: Names, attempt: Attempt, info: SaveInfo) -> Manifest:
    """Return what a manifest says whatever the ranks write; rank 0 knows all of it."""
    return Manifest(
        ckpt_id=info.ckpt_id,
        save_id=attempt.save_id,
        epoch=attempt.intent.epoch,
        seq=attempt.seq,
        step=info.step,
        time="",
        shards=(),
        tables=(),
        files=(),
        training=staged.training,
        state=staged.state,
        writer=WRITER,
        ephemeral=info.ephemeral,
        names=names,
    )


def commit(
    records: Sequence[RankRecord], head: Manifest, job: Job, to: Destination, *, attempt: Attempt, kind: Kind
) -> Commit:
    """Make visible, as rank 0, what all ranks wrote.

    Args:
        records: what each rank wrote.
        head: the rest of the manifest.
        job: the save.
        to: where it goes.
        attempt: what the ranks wrote for.
        kind: what the save is.

    Raises:
        SaveFailedError: a rank wrote for another attempt.
        StateMismatchError: the ranks do not have the same slots of a table.
        Exception: as :func:`recckpt.output_dir.commit.commit`.
    """
    info = job.info
    with info.timed("commit"):
        for rank, record in enumerate(records):
            if record.shard.save_id != head.save_id:
                raise info.failure(rank, f"it wrote for save {record.shard.save_id}, expected {head.save_id}")
        tables = tables_of_all([record.tables for record in records], kind.replaced)
        head = replace(head, time=time_now(), tables=tables)
        manifest = with_shards(head, [record.shard for record in records])
        totals = totals_of(records, tables)
        info.note_written(totals)
        if kind.base is not None:
            manifest = standing_on(committing.chain_of(to.fence.listing, kind.base), manifest)
        manifest = attempt.commit(to.fence, manifest, to.transfers.visible)
        info.outcome.note_committed()
    return Commit(manifest, totals, info.commit_sec)


def standing_on(links: Sequence[Checkpoint], record: Manifest) -> Manifest:
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
                if left.epoch == fence.epoch:  # what older writers make now goes at the next takeover, which lists it
                    rotation.remove_leftover(storage, left.directory, to.concurrency)
            adopt_offers(storage, fence, to.transfers.visible, to.concurrency)
            own = fence.listing.find(info.ckpt_id)
            if own is not None:
                info.note_links(len(own.links))
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


def _expired(listing: Listing, job: Job, pinned: set[str], to: Destination) -> list[Checkpoint]:
    """Return what goes; nothing does where a policy of the caller's own fails."""
    try:
        newest = max((checkpoint.manifest.order for checkpoint in listing.committed), default=(0, 0))
        near_bases = to.near.bases(newest) if to.near else ()
        keep, prefix = job.max_keep, job.step_prefix
        return rotation.expired(listing, keep, pinned, _base_of(to), step_prefix=prefix, near_bases=near_bases)
    except Exception:
        log.exception("nothing is rotated: %r failed to say which checkpoints to keep", job.max_keep)
        return []
