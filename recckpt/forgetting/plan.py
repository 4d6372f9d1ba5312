"""What forgetting ids would write again and remove, before anything is changed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from recckpt.forgetting.forget import check_table, checked_ids, readable_listing
from recckpt.forgetting.forgetting import is_of_attempt, needed, scan, touched
from recckpt.forgetting.ids_in_files import Ids, rows_in_chain
from recckpt.format import layout
from recckpt.output_dir.forget_requests import meant_in, pending
from recckpt.output_dir.listing import Checkpoint, Listing
from recckpt.storage import Storage, open_storage


@dataclass(frozen=True)
class Rewriting:
    """A checkpoint that would be written again.

    Attributes:
        ckpt_id: its id.
        directory: where it lies.
        n_rows: how many of the ids have a row in it.
        n_bytes: of its files, all of which are read, and written again or copied.
    """

    ckpt_id: str
    directory: str
    n_rows: int
    n_bytes: int


@dataclass(frozen=True)
class ForgetPlan:
    """What one request would do.

    Attributes:
        table: the table.
        n_ids: how many ids are to be forgotten.
        is_pending: whether the request was made earlier, and not ended.
        rewritten: the checkpoints that would be written again, oldest first.
        removed: directories that would go beside those: superseded checkpoints, late commits and leftovers.
    """

    table: str
    n_ids: int
    is_pending: bool
    rewritten: tuple[Rewriting, ...]
    removed: tuple[str, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes that would be read and written."""
        return sum(each.n_bytes for each in self.rewritten)


def plan_forget(
    path: str | os.PathLike[str], table: str | None = None, ids: Iterable[int] | None = None
) -> list[ForgetPlan]:
    """Return what :func:`recckpt.forget` would do, request by request, and change nothing.

    Each request is looked at by itself; where one is pending, a later one rewrites what that leaves.

    Args:
        path: an output dir; a path or any fsspec URL.
        table: name of the table; None for the requests that are pending alone.
        ids: int64, in any order.

    Raises:
        CheckpointNotFoundError, TypeError, ValueError, CorruptCheckpointError: as of :func:`recckpt.forget`.
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
    removed = [c.directory for c in with_ids if c.directory not in read_from] + list(_leftovers(storage, listing))

    def n_rows(checkpoint: Checkpoint) -> int:
        name = meant_in(checkpoint.manifest, table)[0]
        return rows_in_chain([(link, contents[link.directory]) for link in checkpoint.links], name)

    each = (Rewriting(c.ckpt_id, c.directory, n_rows(c), c.manifest.n_bytes) for c in rewritten)
    return ForgetPlan(table, len(ids), is_pending, tuple(each), tuple(removed))


def _leftovers(storage: Storage, listing: Listing) -> Iterable[str]:
    """Yield the directories of late commits and of what crashes left, which go whether they hold the ids or not."""
    yield from listing.fenced
    for directory in listing.uncommitted:
        names = storage.list_files(directory)
        if layout.MANIFEST not in names and any(map(is_of_attempt, names)):
            yield directory
