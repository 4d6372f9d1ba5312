"""``recckpt.rewrite.compact``: makes a full checkpoint from a delta's chain, as an offer or in another output dir.

An offer changes nothing else: it is written to its own directory, and is not committed (docs/format.md, 12.6).
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from recckpt.checkpoint.attempt import Attempt, commit_new
from recckpt.checkpoint.read_again import remove_checked
from recckpt.errors import CheckpointRemovedError, RecckptError
from recckpt.format import layout
from recckpt.format.manifest import Content
from recckpt.output_dir import rotation
from recckpt.output_dir.at_path import locate_id, locate_path
from recckpt.output_dir.claims import claimed_epochs
from recckpt.output_dir.fence import PASSED_ON, Fence
from recckpt.output_dir.forget_requests import FORGET_FIRST, check_none_pending, check_none_since
from recckpt.output_dir.listing import Checkpoint, Listing, list_checkpoints
from recckpt.output_dir.offers import adopt_offers, offers_in, why_not
from recckpt.output_dir.open_files import first_whole
from recckpt.parallel.threads import Latch, StoppedError, Worker
from recckpt.rewrite.whole import Means, write_whole
from recckpt.storage import Storage, open_storage
from recckpt.storage.transfers import VISIBLE
from recckpt.types import positive_int

log = logging.getLogger("recckpt")
BUDGET_BYTES = 256 << 20
_THREADS = 4
_BUDGET_BESIDE_A_TRAINER = 64 << 20  # small, because the trainer needs the memory


@dataclass(frozen=True)
class Compacted:
    """The outcome of :func:`compact`.

    Attributes:
        ckpt_id: name of the checkpoint.
        url: the output dir that was written to.
        directory: directory of the full checkpoint there, an offer or a committed one; None if nothing was written.
        n_links: length of the chain.
        n_rows: rows of all tables.
        n_bytes: bytes of all files; 0 if nothing was written.
        reason: why nothing was written; "" if something was.
        is_committed: whether the result is a committed checkpoint, not an offer.
        removed: directories of the deltas that were removed after compaction.
    """

    ckpt_id: str
    url: str
    directory: str | None
    n_links: int
    n_rows: int
    n_bytes: int
    reason: str = ""
    is_committed: bool = False
    removed: tuple[str, ...] = ()


def compact(
    path: str | os.PathLike[str],
    ckpt_id: str | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    adopt: bool = False,
    executor: Executor | None = None,
    budget_bytes: int = BUDGET_BYTES,
    threads: int = _THREADS,
) -> Compacted:
    """Merge the chain of a delta into a full checkpoint, beside a trainer or without one.

    The result is an offer in the output dir, which the trainer adopts at its next save, unless it restarts before.
    Nothing else there is changed. With ``out`` the result is a committed checkpoint of another output dir. Every byte
    that is read is checked, and what was written is read back and compared with the chain.

    Args:
        path: an output dir, or a checkpoint itself; any fsspec URL.
        ckpt_id: a checkpoint of the output dir, also in the form ``latest~1``; None for the newest.
        out: an output dir to write the checkpoint to, even if it is not a delta; another writer there is fenced.
        adopt: whether to take over the output dir, adopt the offer, and remove the deltas that were compacted; for runs
            without a trainer. A trainer that still writes there gets WriterFencedError at its next save.
        executor: does the work: threads, processes, or workers of a cluster, which must have recckpt and reach ``path``
            and ``out`` by the same names. None for threads of this process.
        budget_bytes: memory, without the interpreter's: of this process, or of each worker of the executor.
        threads: threads that copy files and, without an executor, write; on local disks at most one per core.

    Raises:
        ValueError: an argument is invalid.
        CheckpointNotFoundError: there is no such checkpoint.
        CheckpointExistsError: ``out`` has the checkpoint already.
        CheckpointRemovedError: links were removed while they were read, four times in a row.
        CorruptCheckpointError: a link is damaged, or the result cannot be read back; nothing is offered.
        OSError: a storage failed; nothing is offered.
        RecckptError: a request to forget ids is pending in one of the output dirs.
        WriterFencedError: with ``adopt`` or ``out``: another writer took over the output dir.
    """
    if adopt and out is not None:
        raise ValueError("adopt applies to an offer in the output dir; with out the checkpoint is committed already")
    positive_int("budget_bytes", budget_bytes)
    positive_int("threads", threads)
    means = Means(executor, threads, budget_bytes)
    url, to = os.fspath(path), None if out is None else os.fspath(out)

    def find() -> tuple[Storage, Checkpoint]:
        if ckpt_id is None:
            return locate_path(url)
        storage = open_storage(url)
        return storage, locate_id(storage, ckpt_id)

    def write(located: tuple[Storage, Checkpoint]) -> Compacted:
        if to is not None:
            return write_to(*located, to, means)
        return _make_and_adopt(*located, means) if adopt else make_offer(*located, means)

    return first_whole(find, write)


def make_offer(storage: Storage, checkpoint: Checkpoint, means: Means) -> Compacted:
    """Offer a replacement for a delta. Raises the errors of :func:`compact`; StoppedError if ``means`` asks to stop."""
    epoch = max(claimed_epochs(storage), default=0)  # read first, so that changes of a later owner void the offer
    known, listing = check_none_pending(storage, FORGET_FIRST), list_checkpoints(storage)
    there = listing.named(checkpoint.manifest.name)
    if there is None:
        at = checkpoint.directory
        raise listing.damaged.get(at) or CheckpointRemovedError(storage.url_of(at))
    checkpoint, record = there, there.manifest
    if record.kind == "full":
        of = f", compacted from the delta of save {record.name}" if record.is_compacted else ""
        return _nothing(storage, checkpoint, f"it is full already{of}")
    own = (offer for offer in offers_in(storage, listing) if layout.is_attempt(offer.directory, record.ckpt_id))
    waiting = next((offer.directory for offer in own if why_not(offer, epoch, listing) is None), None)
    if waiting is not None:
        return _nothing(storage, checkpoint, f"{waiting} is an offer of it, which waits for the next save")
    to = Attempt.begin_offer(storage, record, epoch)
    try:
        whole = write_whole(storage, checkpoint, to, replace(means, threads=storage.threads(means.threads)))
        check_none_since(storage, known)
        to.offer(checkpoint, whole)
    except BaseException:
        with suppress(RecckptError):
            rotation.remove_leftover(storage, to.directory, rotation.THREADS)  # removes its first file last
        raise
    log.info("%s/%s is offered as a replacement of %r", storage.url, to.directory, record.ckpt_id)
    return Compacted(record.ckpt_id, storage.url, to.directory, len(checkpoint.links), whole.rows, whole.n_bytes)


def _make_and_adopt(storage: Storage, checkpoint: Checkpoint, means: Means) -> Compacted:
    """Take over the output dir, offer a replacement for a delta, adopt it, and remove the superseded checkpoints."""
    check_none_pending(storage, FORGET_FIRST)
    fence = Fence(storage, near=PASSED_ON)
    fence.hold()
    done = make_offer(storage, checkpoint, means)
    fence.look_again()
    adopted = adopt_offers(storage, fence, VISIBLE)
    committed = fence.listing.committed
    compacted = {c.manifest.name for c in committed if c.manifest.is_compacted}
    ours = (c for c in reversed(committed) if layout.is_attempt(c.directory, c.ckpt_id))
    superseded = [c for c in ours if c.manifest.kind == "delta" and c.manifest.save_id in compacted]
    removed = remove_checked(storage, fence, superseded, rotation.THREADS)
    fence.check()
    fence.write_index()
    return replace(done, is_committed=bool(adopted), removed=tuple(removed))


def write_to(storage: Storage, checkpoint: Checkpoint, out: str, means: Means) -> Compacted:
    """Commit a full checkpoint in another output dir. Raises the errors of :func:`compact`."""
    record, there = checkpoint.manifest, open_storage(out)
    known = check_none_pending(storage, FORGET_FIRST)

    def write(to: Attempt) -> Content:
        whole = write_whole(storage, checkpoint, to, replace(means, threads=there.threads(means.threads)))
        check_none_since(storage, known)
        return replace(whole, ephemeral=False)

    directory, full = commit_new(there, record.ckpt_id, record.step, write)
    of = record.ckpt_id, there.url, directory, len(checkpoint.links), full.rows, full.n_bytes
    return Compacted(*of, is_committed=True)


def _nothing(storage: Storage, checkpoint: Checkpoint, reason: str) -> Compacted:
    links, rows = len(checkpoint.links), checkpoint.manifest.rows
    return Compacted(checkpoint.ckpt_id, storage.url, None, links, rows, 0, reason)


class BackgroundCompactor:
    """Makes offers beside the trainer that adopts them, one at a time, in a thread. Not thread-safe.

    An error is only logged; if the chain has become too long, a later save is full.
    """

    def __init__(self) -> None:
        # A daemon thread: the interpreter does not wait for it at exit, and an unfinished offer is ignored.
        self._worker = Worker[Latch]("recckpt-compact", is_daemon=True)
        self._offered: str | None = None

    def begin(self, storage: Storage, listing: Listing, checkpoint: Checkpoint, reason: str) -> None:
        """Begin an offer of a checkpoint, unless an offer is being made, or waits to be adopted."""
        if self._worker.is_at_work or self._offered in listing.uncommitted:
            return
        log.info("%s: compacting in the background: %s", storage.url, reason)
        stop = Latch()
        self._worker.begin(stop, partial(self._make, storage, checkpoint, stop))

    def close(self) -> None:
        """Stop running work, which leaves nothing behind; an offer may be begun again later."""
        if self._worker.task is not None:
            self._worker.task.set()
        self._worker.wait()

    def _make(self, storage: Storage, checkpoint: Checkpoint, stop: Latch) -> None:
        try:
            means = Means(None, 1, _BUDGET_BESIDE_A_TRAINER, stop.is_set, has_bar=False)
            self._offered = make_offer(storage, checkpoint, means).directory or self._offered
        except StoppedError:
            log.info("%s: the compaction of %r was stopped", storage.url, checkpoint.ckpt_id)
        except Exception as error:
            log.warning("%s: %r could not be compacted: %s", storage.url, checkpoint.ckpt_id, error)
