"""``recckpt.rewrite.forget``: removes the rows of ids from all checkpoints of an output dir, and from its mirrors."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from recckpt.errors import CheckpointNotFoundError, RecckptError
from recckpt.format.forgetting import Ids, checked_ids
from recckpt.format.manifest import Manifest
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.forget_requests import Forgotten, meant_in, pending
from recckpt.output_dir.index_file import why_nothing
from recckpt.output_dir.listing import Checkpoint, Listing, list_checkpoints
from recckpt.output_dir.notes import mirror_note
from recckpt.policies.keep import Keep
from recckpt.rewrite.mirroring import Mirror, mirror
from recckpt.rewrite.requests import (
    check,
    check_readable,
    check_table,
    finish_pending,
    forget_as_owner,
    leftovers,
    needed,
    scan,
    touched,
)
from recckpt.rewrite.without_ids import rows_in_chain
from recckpt.storage import Storage, open_storage

log = logging.getLogger("recckpt")
_PURPOSE = "recckpt forget"


@dataclass(frozen=True)
class _Present(Keep):
    """Keeps what a mirror has, because the mirror's own policy is unknown here."""

    ckpt_ids: frozenset[str]

    def kept(self, checkpoints: Sequence[Manifest], now: datetime) -> set[str]:
        return {checkpoint.ckpt_id for checkpoint in checkpoints if checkpoint.ckpt_id in self.ckpt_ids}


def checked_mirrors(run: str, mirrors: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return the places of mirrors. Raises TypeError or ValueError if one cannot be a mirror."""
    if isinstance(mirrors, (str, os.PathLike)):
        raise TypeError(f"mirrors is a list of paths or URLs, found {mirrors!r}: write [{os.fspath(mirrors)!r}]")
    places = [os.fspath(each) for each in mirrors]
    for place in places:
        Mirror(run, place)
    return places


def forget_in_mirrors(run: str, mirrors: Iterable[str]) -> dict[str, str]:
    """Forget in its mirrors what was forgotten in a run; return the mirrors that may still have the ids -> reason.

    No mirror is created, and no mirror gets checkpoints that it did not have, except the newest.
    """
    left = {}
    for place in mirrors:
        try:
            there = open_storage(place)
            if mirror_note(there) is None:
                raise RecckptError(f"{there.url}: {there.why_empty() or 'found no mirror'}")
            mirror(run, place, keep=_Present(frozenset(list_checkpoints(there).ckpt_ids)))
        except (RecckptError, OSError, ValueError) as error:
            left[place] = str(error)
    return left


def forget(
    path: str | os.PathLike[str],
    table: str,
    ids: Iterable[int],
    *,
    mirrors: Iterable[str | os.PathLike[str]] = (),
    by: str = "recckpt.rewrite.forget",
) -> list[Forgotten]:
    """Remove the rows of ids from a table in everything in an output dir, and record that in ``forgotten.jsonl``.

    The output dir is taken over: a trainer that still writes there gets WriterFencedError at its next save, and saves
    no more. Unfinished earlier calls are completed first. All rows of other ids keep their bytes. Near saves stay on
    their hosts until they are removed there: :attr:`Forgotten.near_hosts`.

    Args:
        path: an output dir; a path or any fsspec URL.
        table: name of the table.
        ids: int64, in any order; at most 67 million.
        mirrors: all mirrors of the output dir, by path or URL, because they are recorded nowhere. Each gets a pass; an
            unreachable mirror is logged, and forgets in its next pass: :attr:`Forgotten.mirrors_left`.
        by: who requested it, for the audit.

    Returns:
        One item for each request that was carried out; the last is that of this call.

    Raises:
        CheckpointNotFoundError: ``path`` is not an output dir.
        TypeError, ValueError: there is no such table, no id, or a place cannot be a mirror; nothing was changed.
        CorruptCheckpointError: a checkpoint is damaged, so its contents are unknown.
        RecckptError: the output dir is itself a mirror.
        WriterFencedError: another writer took over the output dir in the meantime, and completes the request.
        OSError: the storage failed; call this function again.
    """
    checked, storage = checked_ids(ids), open_storage(os.fspath(path))
    places = checked_mirrors(os.fspath(path), mirrors)
    check(storage, readable_listing(storage), table, checked)
    fence = Fence(storage, purpose=_PURPOSE)
    fence.hold()
    done = forget_as_owner(storage, fence, table, checked, by, has_bar=True)
    left = forget_in_mirrors(os.fspath(path), places)
    for place, why in left.items():
        log.warning("%s: the mirror %s may still have the ids: %s; its next pass removes them", path, place, why)
    return [*done[:-1], replace(done[-1], mirrors_left=left)]


def finish(path: str | os.PathLike[str]) -> list[Forgotten]:
    """Complete earlier calls of :func:`forget` that were interrupted. Raises the same errors."""
    storage = open_storage(os.fspath(path))
    readable_listing(storage)
    fence = Fence(storage, purpose=_PURPOSE)
    fence.hold()
    return finish_pending(storage, fence, has_bar=True)


def readable_listing(storage: Storage) -> Listing:
    """Return the checkpoints of an output dir.

    Raises CheckpointNotFoundError if ``storage`` is not an output dir, CorruptCheckpointError for a damaged checkpoint.
    """
    listing = list_checkpoints(storage)
    if listing.is_empty:
        raise CheckpointNotFoundError(f"{storage.url}: {why_nothing(storage)}")
    check_readable(listing)
    return listing


@dataclass(frozen=True)
class Rewriting:
    """A checkpoint that would be rewritten."""

    ckpt_id: str
    directory: str
    n_rows: int  # number of its rows with one of the ids
    n_bytes: int  # of its files: all are read, and rewritten or copied


@dataclass(frozen=True)
class ForgetPlan:
    """What carrying out one request would do."""

    table: str
    n_ids: int
    is_pending: bool  # whether the request was made earlier and is unfinished
    rewritten: tuple[Rewriting, ...]  # checkpoints that would be rewritten, oldest first
    # further directories that would be removed: superseded checkpoints, late commits and leftovers
    removed: tuple[str, ...]

    @property
    def n_bytes(self) -> int:
        """Number of bytes to read and to write."""
        return sum(each.n_bytes for each in self.rewritten)


def plan_forget(
    path: str | os.PathLike[str], table: str | None = None, ids: Iterable[int] | None = None
) -> list[ForgetPlan]:
    """Return what :func:`recckpt.rewrite.forget` would do, request by request, without changing anything.

    Each request is planned on its own; if several are pending, a later one would rewrite what the earlier ones leave.
    Without ``table`` and ``ids``, only pending requests are planned.

    Raises:
        CheckpointNotFoundError, TypeError, ValueError, CorruptCheckpointError: as :func:`recckpt.rewrite.forget` does.
    """
    storage = open_storage(os.fspath(path))
    listing = readable_listing(storage)
    plans = [_plan(storage, listing, each.table, each.ids, is_pending=True) for each in pending(storage)]
    if table is not None and ids is not None:
        checked = checked_ids(ids)
        check_table(listing, table, storage.url)
        plans.append(_plan(storage, listing, table, checked, is_pending=False))
    return plans


def _plan(storage: Storage, listing: Listing, table: str, ids: Ids, *, is_pending: bool) -> ForgetPlan:
    contents = scan(storage, listing, table, ids)
    read_from, with_ids = needed(listing), touched(listing, contents)
    rewritten = [c for c in with_ids if c.directory in read_from]
    # Late commits and remains of crashes are removed, too, whether or not they have the ids.
    removed = [c.directory for c in with_ids if c.directory not in read_from]
    removed += [*listing.fenced, *leftovers(storage, listing)]

    def n_rows(checkpoint: Checkpoint) -> int:
        name = meant_in(checkpoint.manifest, table)[0]
        return rows_in_chain([(link, contents[link.directory]) for link in checkpoint.links], name)

    each = (Rewriting(c.ckpt_id, c.directory, n_rows(c), c.manifest.n_bytes) for c in rewritten)
    return ForgetPlan(table, len(ids), is_pending, tuple(each), tuple(removed))
