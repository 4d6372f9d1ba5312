"""Arrow parts to tables: read only what is wanted, check it, find the rows once, copy the slots."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from recckpt.errors import CheckpointRemovedError, PartlyLoadedError
from recckpt.parallel.meetings import Meetings
from recckpt.sparse.files.agreed_passes import AgreedPasses
from recckpt.sparse.files.arrow_format import ID
from recckpt.sparse.files.batch_rows import BatchRows
from recckpt.sparse.files.link_pass import Take
from recckpt.sparse.files.load_target import LinkLoad, OtherRows
from recckpt.sparse.files.table_fill import TableFiller
from recckpt.sparse.files.table_target import LoadTarget

log = logging.getLogger("recckpt")


@dataclass(frozen=True)
class Loaded:
    """What a load did, by table of the model."""

    rows_taken: Mapping[str, int]
    rows_filtered: Mapping[str, int]  # that a filter left out
    slot_rows: Mapping[tuple[str, str], int]  # by table and slot, the ids being one: rows of which it was loaded
    bytes_read: int  # of column values, all checked


def load_tables(
    links: Sequence[LinkLoad],
    *,
    concurrency: int,
    advance: Callable[[int], object],
    when_checked: Callable[[], object],
    meetings: Meetings,
    others: Sequence[OtherRows] = (),
) -> Loaded:
    """Fill tables with the rows of checkpoints that their slices own, each chain link by link, newest first.

    Rows come first, then slots that come from elsewhere for the rows that are there. Each table is made large enough
    before several threads fill it; there is never a second copy of it. Where a table of a rank has rows to lose,
    everything is read and checked before any table changes. Collective: a batch with rows of several ranks is read by
    one of them, which sends the others theirs.

    Args:
        links: what to read, and which tables it fills.
        concurrency: number of threads that read.
        advance: is called with the bytes of the rows that a table takes of each batch, from several threads.
        when_checked: is called once all bytes have been read, while all tables can still be as they were.
        meetings: where the ranks exchange rows.
        others: rows beside those of the links.

    Raises:
        Exception: what ``when_checked`` raised; the tables are as they were.
        LiveTableError: there are ids that a table cannot have a row of. The tables are as they were.
        CorruptCheckpointError: a file is damaged. The tables are as they were.
        CheckpointRemovedError: a file was removed meanwhile. Tables that were to be emptied may be empty.
        PartlyLoadedError: reading failed when tables with rows had been changed; says which.
    """

    def fill(filler: TableFiller, rows: BatchRows) -> None:
        advance(filler.fill(rows) * filler.load.row_bytes)

    loads = {id(load): load for link in links for load in link.tables} | {id(one.load): one.load for one in others}
    targets = {id(load.target): load.target for load in loads.values()}
    _check_ids(links, others)
    for target in targets.values():
        target.begin()
    by_load = {key: TableFiller(load) for key, load in loads.items()}
    fillers = list(by_load.values())
    passes = AgreedPasses(links, by_load, meetings)
    for other in others:
        by_load[id(other.load)].expect("", other.load.entry.rows)
    bytes_read = 0
    if passes.has_rows:
        bytes_read += passes.check(concurrency)
        for other in others:
            _read(other, by_load[id(other.load)], TableFiller.check)
        when_checked()
        meetings.wait()
    try:
        with _undone_on_error(fillers), meetings.ended_by_errors():
            bytes_read += passes.fill(fill, concurrency)
            for other in others:
                by_load[id(other.load)].start()
                _read(other, by_load[id(other.load)], fill)
            if not passes.has_rows:
                when_checked()
                meetings.wait()  # no table has rows of what is damaged for another rank
            dropped = _finished(targets, {id(load.target) for load in loads.values() if load.drops}, meetings)
    finally:
        for filler in reversed(fillers):
            filler.end()
    return _counted(fillers, dropped, bytes_read)


def _finished(targets: Mapping[int, LoadTarget], dropping: Collection[int], meetings: Meetings) -> dict[str, int]:
    """Give the tables what was gathered aside; return how many rows of each had no place. Collective.

    Args:
        targets: by their keys.
        dropping: keys of those that may drop rows.
        meetings: where all ranks learn that each has room for what it owns, before a table changes.
    """
    if any(target.has_limited_room for target in targets.values()):  # which is so on all ranks, or on none
        for key, target in targets.items():
            target.check_room(drops=key in dropping)
        meetings.wait()
    in_order = sorted(targets.items(), key=lambda item: item[1].finishes_last)
    return {target.table.name: target.finish(drops=key in dropping) for key, target in in_order}


def _check_ids(links: Sequence[LinkLoad], others: Sequence[OtherRows]) -> None:
    for link in links:
        link.check_ids()
    for other in others:
        if other.load.entry.rows:
            other.load.check_ids(0, other.load.entry.rows - 1)


def _read(other: OtherRows, filler: TableFiller, take: Take) -> None:
    filler.begin_link()
    for rows in other.read():
        take(filler, rows)
    filler.end_link(np.empty(0, np.int64))


@contextmanager
def _undone_on_error(fillers: Sequence[TableFiller]) -> Iterator[None]:
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


def _counted(fillers: Sequence[TableFiller], dropped: Mapping[str, int], bytes_read: int) -> Loaded:
    taken, filtered = Counter[str](), Counter[str]()
    slot_rows: dict[tuple[str, str], int] = {}
    for filler in fillers:  # rows whose slots come from several checkpoints count once
        name = filler.load.table.name
        taken[name] = max(taken[name], filler.n_rows)
        filtered[name] = max(filtered[name], filler.n_filtered)
        slots = (*filler.load.slots, *([ID] if filler.load.with_rows else []))
        slot_rows |= {(name, slot): filler.n_rows for slot in slots}
    for name, n_rows in dropped.items():
        taken[name] -= n_rows
        filtered[name] += n_rows
    return Loaded(dict(taken), dict(filtered), slot_rows, bytes_read)
