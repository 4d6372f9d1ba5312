"""``recckpt.history``: rows of a table over the checkpoints of a run, read from what has changed (no torch here)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from recckpt.errors import CorruptCheckpointError
from recckpt.format.distinct import distinct
from recckpt.inspect.over_time.kept import kept, unusable
from recckpt.inspect.over_time.named_rows import named_rows
from recckpt.inspect.over_time.printed import PrintedHistory
from recckpt.inspect.over_time.row_history import RowHistory, history_of_row
from recckpt.output_dir.first_whole import first_whole
from recckpt.output_dir.forget_requests import forgotten_among
from recckpt.output_dir.listing import Listing, look_around
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.aligned_rows import as_ids
from recckpt.sparse.files.once import Int64s
from recckpt.storage import Storage, open_storage
from recckpt.text import nearest

_THREADS = 8


def history(
    path: str | os.PathLike[str], table: str, ids: Iterable[int] | npt.NDArray[np.integer[Any]]
) -> PrintedHistory:
    """Return what became of rows over all checkpoints of a run that are kept: their norms, changes, counts and moments.

    Of each checkpoint only its own files are read, of a delta what has changed, and of these only the catalogs and
    batches that may have the ids, each once. Every byte that is read is checked; what is damaged is said, and hides
    only the checkpoints that need it. Imports no torch. Prints as the text of ``recckpt history``.

    Args:
        path: an output dir; any fsspec URL.
        table: name of the table.
        ids: int64 numbers; one that is there several times is looked up once.

    Raises:
        TypeError: ``ids`` are not int64 numbers.
        CheckpointNotFoundError: there is no checkpoint that can be used, or the path is that of a checkpoint itself.
        KeyError: no checkpoint has such a table.
        CheckpointRemovedError: its writer removed a checkpoint while it was read, again and again.
    """
    asked, storage = as_ids(ids), open_storage(os.fspath(path))
    return first_whole(lambda: look_around(storage), partial(_history, storage, table, asked))


def _history(storage: Storage, table: str, asked: Int64s, listing: Listing) -> PrintedHistory:
    checkpoints = kept(storage, listing)
    names = {entry.name for checkpoint in checkpoints for entry in checkpoint.manifest.tables}
    if table not in names:
        raise KeyError(f"{storage.url}: found no table {table!r} in any checkpoint{nearest(table, sorted(names))}")
    ids, links = distinct(asked), {link.directory: link for each in checkpoints for link in each.links}
    read = partial(named_rows, storage, table=table, ids=ids)
    of_links = dict(zip(links, run_all(read, links.values(), storage.threads(_THREADS)), strict=True))
    damage = {directory: of_link.damage for directory, of_link in of_links.items() if of_link.damage}
    damage |= unusable(listing)
    try:
        forgotten = forgotten_among(storage, table, ids)
    except CorruptCheckpointError as error:
        forgotten, damage = set(), damage | {error.path: str(error)}
    rows = (
        RowHistory(id_, history_of_row(id_, checkpoints, table, of_links), id_ in forgotten)
        for id_ in dict.fromkeys(asked.tolist())
    )
    return PrintedHistory(storage.url, table, tuple(rows), damage)
