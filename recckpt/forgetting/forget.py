"""``recckpt.forget``: the rows of some ids go from all checkpoints of an output dir."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from recckpt.errors import CheckpointNotFoundError
from recckpt.forgetting.forgetting import Forgotten, check_readable, finish_pending, forget_as_owner, scan
from recckpt.forgetting.ids_in_files import Ids
from recckpt.format.distinct import distinct
from recckpt.format.forget_request import MAX_IDS
from recckpt.mirroring.reach import reach_mirrors
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.forget_requests import audit
from recckpt.output_dir.known_mirrors import known_mirrors
from recckpt.output_dir.listing import Listing, list_checkpoints
from recckpt.output_dir.why_nothing import why_nothing
from recckpt.storage import Storage, open_storage
from recckpt.text import instead_of

_PURPOSE = "recckpt forget"


def forget(
    path: str | os.PathLike[str], table: str, ids: Iterable[int], *, by: str = "recckpt.forget"
) -> list[Forgotten]:
    """Remove ids from a table in all that lies in an output dir, and note that in ``forgotten.jsonl``.

    The output dir is taken over: the next save of a trainer that still writes there raises WriterFencedError, and it
    saves no more. What an earlier call has begun and not ended is ended first. All rows of other ids keep their bytes.
    Mirrors that the output dir knows get a pass; one that cannot be reached is logged, and forgets with its next pass.
    Near saves stay on their hosts until they are removed there: :attr:`Forgotten.near_hosts`.

    Args:
        path: an output dir; a path or any fsspec URL.
        table: name of the table.
        ids: int64, in any order; at most 67 million.
        by: what the audit says asked for it.

    Returns:
        What was done, for each request that was carried out; that of this call is the last.

    Raises:
        CheckpointNotFoundError: it is not an output dir.
        TypeError, ValueError: there is no such table, or no id was passed; nothing was changed.
        CorruptCheckpointError: a checkpoint or the note of a mirror is damaged, so that it is not known what they hold.
        WriterFencedError: another writer took the output dir over meanwhile; it ends what was begun.
        OSError: the storage failed; call it again.
    """
    checked, storage = checked_ids(ids), open_storage(os.fspath(path))
    listing = readable_listing(storage)
    check_table(listing, table, storage.url)
    scan(storage, listing, table, checked)  # so that damage is found before anything is changed
    audit(storage)
    known_mirrors(storage)
    fence = Fence(storage, purpose=_PURPOSE)
    fence.hold()
    done = forget_as_owner(storage, fence, table, checked, by, has_bar=True)
    reach_mirrors(storage)
    return done


def finish(path: str | os.PathLike[str]) -> list[Forgotten]:
    """End what earlier calls of :func:`forget` have begun; errors as there."""
    storage = open_storage(os.fspath(path))
    readable_listing(storage)
    known_mirrors(storage)
    fence = Fence(storage, purpose=_PURPOSE)
    fence.hold()
    done = finish_pending(storage, fence, has_bar=True)
    reach_mirrors(storage)
    return done


def checked_ids(ids: Any) -> Ids:
    """Return ids in order, each once; TypeError or ValueError where they are not int64, none, or too many."""
    values = list(ids) if not isinstance(ids, np.ndarray) and isinstance(ids, Iterable) else ids
    if isinstance(values, list) and bool in set(map(type, values)):  # which numpy takes for 1 beside other numbers
        raise TypeError("expected ids that are int64, found bool")
    found = np.asarray(values)
    if found.ndim != 1 or not found.size:
        raise ValueError(f"expected ids to forget, one at least, found {'none' if not found.size else found.shape}")
    if found.dtype == np.dtype(object) or (found.dtype.kind == "u" and int(found.max()) >= 2**63):
        raise ValueError("expected ids that are int64, found one that is beyond it or no number")
    if found.dtype.kind not in "iu":
        raise TypeError(f"expected ids that are int64, found {found.dtype}")
    if found.size > MAX_IDS:
        raise ValueError(f"expected at most {MAX_IDS} ids at once, found {found.size}: forget them in several calls")
    return distinct(found.astype(np.int64))


def check_table(listing: Listing, table: str, url: str) -> None:
    """Raise ValueError where no checkpoint has such a table."""
    names: Collection[str] = {entry.name for c in listing.committed for entry in c.manifest.tables}
    if table not in names:
        raise ValueError(f"{url}: found no table {table!r} in any checkpoint{instead_of(table, sorted(names))}")


def readable_listing(storage: Storage) -> Listing:
    """Return the checkpoints of an output dir.

    Raises CheckpointNotFoundError where it is not one, CorruptCheckpointError where a checkpoint is damaged.
    """
    listing = list_checkpoints(storage)
    if listing.is_empty:
        raise CheckpointNotFoundError(f"{storage.url}: {why_nothing(storage)}")
    check_readable(listing)
    return listing
