"""Arrow parts to tables: read only what is wanted, check it, find the rows once, copy the slots."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from recckpt.errors import CheckpointRemovedError, PartlyLoadedError
from recckpt.sparse.files.arrow_format import ID
from recckpt.sparse.files.link_pass import LinkLoad, LinkPass
from recckpt.sparse.files.load_target import LoadTarget
from recckpt.sparse.files.table_fill import Filler

log = logging.getLogger("recckpt")


@dataclass(frozen=True)
class Loaded:
    """What a load did, by table of the model."""

    rows_taken: Mapping[str, int]
    rows_filtered: Mapping[str, int]  # that a filter left out
    bytes_read: int  # of column values, all checked


def load_tables(
    links: Sequence[LinkLoad],
    *,
    concurrency: int,
    advance: Callable[[int], object],
    when_checked: Callable[[], object],
) -> Loaded:
    """Fill tables with the rows of checkpoints that their slices own, each chain link by link, newest first.

    Rows come first, then slots that come from elsewhere for the rows that are there. Each table is made large enough
    before several threads fill it; there is never a second copy of it. Where a table has rows to lose, everything is
    read and checked before any table changes. ``when_checked`` is called once all bytes have been, while all tables can
    still be as they were; ``advance`` with the bytes of each batch and table, from several threads.

    Raises:
        Exception: what ``when_checked`` raised; the tables are as they were.
        CorruptCheckpointError: a file is damaged. The tables are as they were.
        CheckpointRemovedError: a file was removed meanwhile. Tables that were to be emptied may be empty.
        PartlyLoadedError: reading failed when tables with rows had been changed; says which.
    """

    def fill(filler: Filler, columns: Mapping[str, pa.Array], path: str) -> None:
        filler.fill(columns, path)
        advance(len(columns[ID]) * filler.load.row_bytes)

    loads = {id(load): load for link in links for load in link.tables}
    targets = {id(load.table): LoadTarget(load.table) for load in loads.values()}
    by_load = {key: Filler(load, targets[id(load.table)]) for key, load in loads.items()}
    passes = [LinkPass(link, with_rows, by_load) for with_rows in (True, False) for link in links]
    fillers = list(by_load.values())
    has_rows, bytes_read = any(len(filler.load.table) for filler in fillers), 0
    if has_rows:
        bytes_read += sum(one.run(Filler.check, concurrency) for one in passes)
        when_checked()
    with _undone_on_error(fillers):
        for one in passes:
            one.start()
            bytes_read += one.run(fill, concurrency)
        if not has_rows:
            when_checked()
        for target in targets.values():
            target.finish()
    return _counted(fillers, bytes_read)


@contextmanager
def _undone_on_error(fillers: Sequence[Filler]) -> Iterator[None]:
    """After an error, empty what was to be emptied, and say which tables are no longer what they were."""
    try:
        yield
    except BaseException as error:
        for filler in fillers:
            filler.undo()
        changed = [filler.load.table for filler in fillers if filler.is_changed]
        emptied = sorted({table.name for table in changed if not len(table)})
        mixed = sorted({table.name for table in changed if len(table)})
        if not changed:
            raise
        if isinstance(error, CheckpointRemovedError) and not mixed:
            raise CheckpointRemovedError(error.path, emptied=emptied) from error
        partly = PartlyLoadedError(f"{type(error).__name__}: {error}", emptied=emptied, mixed=mixed)
        if isinstance(error, Exception):
            raise partly from error
        log.error("%s", partly)  # an interrupt stays one
        raise


def _counted(fillers: Sequence[Filler], bytes_read: int) -> Loaded:
    taken, filtered = Counter[str](), Counter[str]()
    for filler in fillers:  # rows whose slots come from several checkpoints count once
        name = filler.load.table.name
        taken[name] = max(taken[name], filler.n_rows)
        filtered[name] = max(filtered[name], filler.n_filtered)
    return Loaded(dict(taken), dict(filtered), bytes_read)
