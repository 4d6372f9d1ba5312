"""``recckpt.rewrite.compact``: a full checkpoint made of a delta's chain, offered to the output dir, or elsewhere.

The compactor owns nothing: it writes in the directory of its offer alone, and commits nothing (docs/format.md, 12.6).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from recckpt.checkpoint.attempt import Attempt, commit_new
from recckpt.checkpoint.read_again import remove_checked
from recckpt.errors import CheckpointNotFoundError
from recckpt.format import layout
from recckpt.format.manifest import Content
from recckpt.output_dir import rotation
from recckpt.output_dir.at_path import locate_id, locate_path
from recckpt.output_dir.fence import PASSED_ON, Fence
from recckpt.output_dir.forget_requests import FORGET_FIRST, check_none_pending, check_none_since
from recckpt.output_dir.index_file import why_nothing
from recckpt.output_dir.listing import Checkpoint, list_checkpoints
from recckpt.output_dir.offers import adopt_offers, adoptable, look_at
from recckpt.output_dir.open_files import first_whole
from recckpt.rewrite.whole import Means, write_whole
from recckpt.storage import Storage, open_storage
from recckpt.storage.transfers import VISIBLE
from recckpt.types import positive_int

log = logging.getLogger("recckpt")
BUDGET_BYTES = 256 << 20
_THREADS = 4


@dataclass(frozen=True)
class Compacted:
    """What :func:`compact` did.

    Attributes:
        ckpt_id: the checkpoint.
        url: the output dir that was written to.
        directory: of the full checkpoint in it, an offer or a committed one; None where nothing was written.
        n_links: how many the chain has.
        n_rows: of all tables.
        n_bytes: of all files; 0 where nothing was written.
        reason: why nothing was written; "" where it was.
    """

    ckpt_id: str
    url: str
    directory: str | None
    n_links: int
    n_rows: int
    n_bytes: int
    reason: str = ""


def compact(
    path: str | os.PathLike[str],
    ckpt_id: str | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    executor: Executor | None = None,
    budget_bytes: int = BUDGET_BYTES,
    threads: int = _THREADS,
) -> Compacted:
    """Merge the chain of a delta into a full checkpoint, beside a trainer or without one.

    The result is an offer in the output dir: the trainer adopts it at its next save, or ``recckpt compact --adopt``
    does where there is none. Nothing else there is changed. With ``out`` it is a committed checkpoint of another output
    dir. Every byte that is read is checked, and what was written is read back and compared with the chain.

    Args:
        path: an output dir, or a checkpoint itself; any fsspec URL.
        ckpt_id: which checkpoint of the output dir, ``latest~1`` too; None for the newest.
        out: an output dir that the checkpoint is written to, full or not; it is taken over from whoever writes there.
        executor: does the work: threads, processes, or those of a cluster, which reach ``path`` and ``out`` by the same
            names and have recckpt. None for threads of this process.
        budget_bytes: memory beside what the interpreter takes: of this process, or of each worker of the executor.
        threads: how many threads write where there is no executor, and copy; locally at most one a core.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        CheckpointExistsError: ``out`` has it already.
        CheckpointRemovedError: links were removed while they were read, four times in a row.
        CorruptCheckpointError: a link is damaged, or what was written cannot be read back; nothing is offered.
        OSError: a storage failed; nothing is offered.
        RecckptError: ids are yet to be forgotten in one of the output dirs.
    """
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
        return make_offer(*located, means) if to is None else write_to(*located, to, means)

    return first_whole(find, write)


def make_offer(storage: Storage, checkpoint: Checkpoint, means: Means) -> Compacted:
    """Offer a form of a delta; errors as of :func:`compact`, StoppedError where the means say so."""
    record = checkpoint.manifest
    if record.kind == "full":
        form = f", a form of the delta of save {record.origin}" if record.form_of else ""
        return _nothing(storage, checkpoint, f"it is full already{form}")
    known = check_none_pending(storage, FORGET_FIRST)
    to = Attempt.begin_offer(storage, record)
    try:
        now = to.mark_offer(record)
        listing = list_checkpoints(storage)
        offers = (name for name in listing.uncommitted if layout.is_offer_dir(name))
        states = (look_at(storage, name, now) for name in offers if layout.is_attempt(name, record.ckpt_id))
        waiting = next((each.directory for each in states if each.offer and adoptable(each, listing) is None), None)
        if waiting is not None:
            to.withdraw()
            return _nothing(storage, checkpoint, f"{waiting} is an offer of it, which waits for the next save")
        whole = write_whole(storage, checkpoint, to, _for(storage, means))
        check_none_since(storage, known)
        to.offer(record, whole)
    except BaseException:
        to.withdraw()
        raise
    log.info("%s/%s is offered as a form of %r", storage.url, to.directory, record.ckpt_id)
    return Compacted(record.ckpt_id, storage.url, to.directory, len(checkpoint.links), whole.rows, whole.n_bytes)


def write_to(storage: Storage, checkpoint: Checkpoint, out: str, means: Means) -> Compacted:
    """Commit a whole checkpoint in another output dir; errors as of :func:`compact`."""
    record, there = checkpoint.manifest, open_storage(out)
    known = check_none_pending(storage, FORGET_FIRST)

    def write(to: Attempt) -> Content:
        whole = write_whole(storage, checkpoint, to, _for(there, means))
        check_none_since(storage, known)
        return replace(whole, ephemeral=False)

    directory, full = commit_new(there, record.ckpt_id, record.step, write)
    return Compacted(record.ckpt_id, there.url, directory, len(checkpoint.links), full.rows, full.n_bytes)


def _for(storage: Storage, means: Means) -> Means:
    return replace(means, threads=storage.threads(means.threads))


def _nothing(storage: Storage, checkpoint: Checkpoint, reason: str) -> Compacted:
    links, rows = len(checkpoint.links), checkpoint.manifest.rows
    return Compacted(checkpoint.ckpt_id, storage.url, None, links, rows, 0, reason)


@dataclass(frozen=True)
class Adopted:
    """What :func:`adopt` did: directories of the forms that it committed, and of the deltas that it removed."""

    forms: tuple[str, ...]
    removed: tuple[str, ...]


def adopt(path: str | os.PathLike[str]) -> Adopted:
    """Take an output dir over, adopt the offers in it, and remove the deltas that a form replaces.

    The next save of a trainer that still writes there raises WriterFencedError, and it saves no more.

    Raises:
        CheckpointNotFoundError: it is not an output dir.
        WriterFencedError: another writer took it over meanwhile.
        OSError: the storage failed.
        RecckptError: ids are yet to be forgotten there.
    """
    storage = open_storage(os.fspath(path))
    if list_checkpoints(storage).is_empty:
        raise CheckpointNotFoundError(f"{storage.url}: {why_nothing(storage)}")
    check_none_pending(storage, FORGET_FIRST)
    fence = Fence(storage, near=PASSED_ON)
    fence.hold()
    forms = adopt_offers(storage, fence, VISIBLE, rotation.THREADS)
    going = _replaced(fence.listing.committed)
    removed = remove_checked(storage, fence, going, rotation.THREADS)
    fence.check()
    fence.write_index()
    return Adopted(tuple(form.directory for form in forms), tuple(removed))


def _replaced(committed: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the deltas that have a whole form, newest first, but for copies that a person made."""
    of = {c.manifest.form_of.save_id for c in committed if c.manifest.form_of}
    ours = (c for c in reversed(committed) if layout.is_attempt(c.directory, c.ckpt_id))
    return [c for c in ours if c.manifest.kind == "delta" and c.manifest.save_id in of]
