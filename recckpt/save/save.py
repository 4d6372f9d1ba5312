"""The hallway of a save: begin, write, agree, commit, rotate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version

from recckpt.errors import (
    CommitNotDurableError,
    RecckptError,
    StateMismatchError,
    WriterFencedError,
)
from recckpt.format import layout
from recckpt.format.manifest import Manifest, Names, TableEntry
from recckpt.output_dir import rotation
from recckpt.output_dir.checkpoint_dir import Intent
from recckpt.output_dir.commit import begin, commit
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import Checkpoint, Listing
from recckpt.output_dir.rotation import pinned_ids
from recckpt.parallel.ranks import Ranks
from recckpt.policies.keep import Keep
from recckpt.save import save_info
from recckpt.save.rank_files import ShardRecord, ShardWriter
from recckpt.save.rank_states import compared
from recckpt.save.save_info import SaveInfo
from recckpt.save.stage import Staged
from recckpt.sparse.files.saver import SparseSaver
from recckpt.storage import Storage
from recckpt.storage.transfers import Transfers
from recckpt.text import Progress
from recckpt.types import SlotSpec

log = logging.getLogger("recckpt")


@dataclass(frozen=True)
class Destination:
    """Where saves of one output dir go, and who takes part.

    Attributes:
        storage: the output dir.
        fence: this writer's hold on it.
        ranks: that take part.
        sparse_saver: writes the tables of this rank.
        concurrency: threads that write; with one, a save makes none.
        max_keep: which checkpoints stay.
        transfers: how files go up.
    """

    storage: Storage
    fence: Fence
    ranks: Ranks
    sparse_saver: SparseSaver
    concurrency: int
    max_keep: int | Keep | None
    transfers: Transfers


def save(staged: Staged, info: SaveInfo, to: Destination, *, overwrite: bool = False) -> Manifest:
    """Write and commit a checkpoint. Collective: all ranks return its manifest, or all raise alike.

    Raises:
        CheckpointExistsError: the id is committed already and ``overwrite`` is false.
        SaveFailedError: a rank failed, and nothing was committed; or one is missing: the message says what is known.
        CommitNotDurableError: committed, but the storage failed before that was surely durable.
        WriterFencedError: another writer has taken the output dir over.
    """
    storage, fence, ranks = to.storage, to.fence, to.ranks

    def begin_attempt() -> tuple[Intent, int]:
        return begin(storage, fence, info.ckpt_id, step=staged.step, overwrite=overwrite)

    intent, seq = ranks.on_first(begin_attempt)
    try:
        info.outcome.is_open = ranks.rank != 0
        records, names = _write(staged, info, to, intent)

        def commit_all() -> Manifest:
            manifest = replace(_manifest(info, intent, seq, staged, records), names=names)
            record = commit(storage, fence, intent.directory, manifest, to.transfers.visible)
            info.outcome.is_committed = True
            return record

        with info.timed("commit"):
            record = ranks.on_first(commit_all)
    except (WriterFencedError, CommitNotDurableError):
        raise  # the directory is the new owner's to judge, or holds a checkpoint
    except RecckptError:
        if ranks.rank == 0 and not ranks.has_lost:  # one that is lost may write there; all others know that they failed
            rotation.abandon(storage, intent.directory)
        raise
    info.time, info.n_bytes = record.time, record.n_bytes
    if ranks.rank == 0:
        _tidy(to, info)
    return record


def _write(staged: Staged, info: SaveInfo, to: Destination, intent: Intent) -> tuple[list[ShardRecord], Names]:
    """Write the files of all ranks; return what each wrote, and on rank 0 the names of what all of them have."""
    ranks = to.ranks
    with Progress(f"saving {info.ckpt_id}", staged.sparse_bytes) as progress:
        progress.n_rows = staged.n_rows
        writer = ShardWriter(intent, to.storage, to.sparse_saver, to.concurrency, ranks, transfers=to.transfers)
        names = compared(staged, ranks)
        records = ranks.on_all(lambda: writer.write(staged, progress))
        seconds = [record.seconds for record in records]
        info.write_sec, info.slowest_shard = max(seconds), seconds.index(max(seconds))
        info.agree_sec = max(0.0, progress.seconds - seconds[ranks.rank])
    info.n_rows = sum(table.rows for record in records for table in record.tables)
    info.kept_rows = sum(record.n_kept for record in records)
    return records, names


def stage_on_all(take: Callable[[], Staged], info: SaveInfo, ranks: Ranks) -> Staged:
    """Return what ``take`` staged, once every rank has staged its own. Collective.

    Raises:
        Exception: whatever ``take`` raised here.
        SaveFailedError: that was an OSError, or it raised on another rank, or one is missing, or the ranks are not at
            the same save; nothing was written.
    """
    failure: Exception | None = None
    with ExitStack() as closed_on_error:
        try:
            staged = take()
            closed_on_error.callback(staged.close)
        except Exception as error:
            failure = error
        reason = failure and f"{type(failure).__name__}: {failure}"
        told = ranks.gather((reason, info.ckpt_id, info.step))
        _check_told(told, failure, info, ranks.rank)
        closed_on_error.pop_all()
    return staged


def _check_told(
    told: Sequence[tuple[str | None, str, int | None]], failure: Exception | None, info: SaveInfo, own: int
) -> None:
    """Raise the failure of this rank, else of the first, else that ranks are not at the same save."""
    reasons = [reason for reason, _, _ in told]
    if isinstance(failure, OSError) and not isinstance(failure, RecckptError):  # of the storage, such as a full one
        raise info.failure(own, str(reasons[own])) from failure
    if failure is not None:
        raise failure
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise info.failure(rank, reason)
    for rank, (_, ckpt_id, step) in enumerate(told):
        if (ckpt_id, step) != told[0][1:]:
            cause = f"it saves {ckpt_id!r} of step {step}, rank 0 {told[0][1]!r} of step {told[0][2]}"
            raise info.failure(rank, f"{cause}: all ranks save the same")


def _manifest(info: SaveInfo, intent: Intent, seq: int, staged: Staged, records: list[ShardRecord]) -> Manifest:
    for rank, shard in enumerate(records):
        if shard.save_id != intent.save_id:
            cause = f"it wrote for save {shard.save_id}, expected {intent.save_id}"
            raise info.failure(rank, cause)
    return Manifest(
        ckpt_id=info.ckpt_id,
        save_id=intent.save_id,
        epoch=intent.epoch,
        seq=seq,
        step=staged.step,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z"),
        shards=tuple(record.shard for record in records),
        tables=_tables_of_all(records),
        files=tuple(sorted((file for record in records for file in record.files), key=lambda file: file.name)),
        state=staged.state,
        writer=_VERSIONS,
        ephemeral=info.ephemeral,
    )


def _tables_of_all(records: list[ShardRecord]) -> tuple[TableEntry, ...]:
    """Add up the rows of the ranks; a table is one thing, so its slots are the same on all."""
    rows: dict[str, int] = {}
    slots: dict[str, tuple[SlotSpec, ...]] = {}
    for rank, record in enumerate(records):
        for table in record.tables:
            known = slots.setdefault(table.name, table.slots)
            if known != table.slots:
                raise StateMismatchError(
                    f"table {table.name!r} of rank {rank}",
                    mismatched={"slots": (table.slots, known)},
                    remedy="give the table the same shape, dtype and optimizer on every rank",
                )
            rows[table.name] = rows.get(table.name, 0) + table.rows
    return tuple(TableEntry(name, count, slots[name]) for name, count in rows.items())


def _tidy(to: Destination, info: SaveInfo) -> None:
    """Bring index file and directory up to date; the checkpoint is safe already, so a failure is a warning."""
    storage, fence = to.storage, to.fence
    try:
        with info.timed("rotate"):
            listing = fence.listing
            for directory, error in listing.damaged.items():
                log.error("%s/%s is damaged and left alone: %s", storage.url, directory, error)
            for victim in _expired(listing, to.max_keep, pinned_ids(storage)):
                if not layout.is_attempt(victim.directory, victim.ckpt_id):
                    continue  # what somebody has moved or copied to another name is that one's
                fence.check()
                if rotation.remove(storage, victim, to.concurrency):
                    fence.listing = fence.listing.minus([victim.directory])
            for left in rotation.leftovers(storage, listing, fence.epoch):
                if left.epoch == fence.epoch:  # what older writers make now goes at the next takeover, which lists it
                    rotation.remove_leftover(storage, left.directory, to.concurrency)
            fence.check()
            fence.write_index()
        save_info.append(storage, info)
    except OSError as error:
        log.warning("%s: could not bring rotation, index file and timeline up to date: %s", storage.url, error)
    except WriterFencedError as error:  # the save itself counts; the next one will raise
        log.warning("%s", error)


def _expired(listing: Listing, max_keep: int | Keep | None, pinned: set[str]) -> list[Checkpoint]:
    """Return what goes; nothing does where a policy of the caller's own fails."""
    try:
        return rotation.expired(listing, max_keep, pinned)
    except Exception:
        log.exception("nothing is rotated: %r failed to say which checkpoints to keep", max_keep)
        return []


def _find_versions() -> dict[str, str]:
    versions = {}
    for package in ("recckpt", "torch", "numpy", "pyarrow"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


_VERSIONS = _find_versions()  # once: they are files, and a save does not depend on files of packages
