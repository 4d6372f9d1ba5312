"""Loads Arrow parts into tables: reads and checks the needed columns, looks ids up once, copies slots."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from recckpt.errors import CheckpointRemovedError, PartlyLoadedError
from recckpt.parallel.ranks import Meetings
from recckpt.sparse.files.arrow_format import ID
from recckpt.sparse.files.filler import BatchRows, Filler, OtherRows
from recckpt.sparse.files.link_pass import LinkLoad, LinkPass, Rounds, Take, Windows
from recckpt.sparse.files.owners import LinkRequests, TableRequest, agreed_rounds

log = logging.getLogger("recckpt")
RECEIVED_BYTES = 64 << 20  # about how much a rank receives in a round, unless a single window is larger


@dataclass(frozen=True)
class Loaded:  # counts by table of the model
    rows_taken: Mapping[str, int]
    rows_filtered: Mapping[str, int]  # rows that a filter has left out
    slot_rows: Mapping[tuple[str, str], int]  # (table, slot) -> rows in which the slot was loaded; ids are a slot, too
    bytes_read: int  # bytes of column values, all checked


def load_tables(
    links: Sequence[LinkLoad],
    *,
    concurrency: int,
    advance: Callable[[int], object],
    when_checked: Callable[[], object],
    meetings: Meetings,
    others: Sequence[OtherRows] = (),
) -> Loaded:
    """Fill tables with the rows of checkpoints that they own, each chain newest link first. Collective.

    Rows are loaded first, then slots that other checkpoints give for rows that are there. Each table gets its room
    before several threads fill it, and is never copied. If a table of any rank has rows to lose, everything is read and
    checked before any table changes. A batch with rows of several ranks is read by one of them, which sends rows to the
    others.

    Args:
        links: which links to read, and which tables each fills.
        concurrency: number of reading threads.
        advance: called by several threads with the number of bytes that a table has taken from a batch.
        when_checked: called when everything has been read, while the load can still be undone.
        meetings: how the ranks exchange rows.
        others: rows that are not in links.

    Raises:
        Exception: whatever ``when_checked`` raised. The tables are as before.
        LiveTableError: a table cannot have a row of some id. The tables are as before.
        CorruptCheckpointError: a file is damaged. The tables are as before.
        CheckpointRemovedError: a file was removed during the load. Tables that the load empties may be empty.
        PartlyLoadedError: reading failed after tables with rows had changed; the error names those tables.
    """

    def fill(filler: Filler, rows: BatchRows) -> None:
        advance(filler.fill(rows) * filler.row_bytes)

    for link in links:
        link.check_ids()
    for filler in (other.filler for other in others if other.filler.entry.rows):
        filler.check_ids(0, filler.entry.rows - 1)
    every = [*(filler for link in links for filler in link.fillers), *(other.filler for other in others)]
    fillers = list(dict.fromkeys(every))
    for target in dict.fromkeys(filler.target for filler in fillers):
        target.begin()
    passes = AgreedPasses(links, fillers, meetings)
    for other in others:
        other.filler.expect("", other.filler.entry.rows)
    bytes_read = 0
    if passes.has_rows:
        bytes_read += passes.run(Filler.check, concurrency, fills=False)
        for other in others:
            _read(other, Filler.check)
        when_checked()
        meetings.wait()
    try:
        with _undone_on_error(fillers), meetings.ended_by_errors():
            bytes_read += passes.run(fill, concurrency, fills=True)
            for other in others:
                other.filler.start()
                _read(other, fill)
            if not passes.has_rows:
                when_checked()
                meetings.wait()  # an error of another rank is raised here, before any table is completed
            dropped = _finished(fillers, meetings)
    finally:
        for filler in reversed(fillers):
            filler.end()
    for filler in fillers:
        filler.take_history()
    return _counted(fillers, dropped, bytes_read)


class AgreedPasses:
    """Passes over the links, equal in number and order on all ranks. Collective.

    Attributes:
        has_rows: whether a table of any rank has rows to lose.
    """

    def __init__(self, links: Sequence[LinkLoad], fillers: Sequence[Filler], meetings: Meetings) -> None:
        self._meetings = meetings
        by_pass: dict[tuple[bool, int, int], dict[str, list[Filler]]] = {}
        for with_rows in (True, False):
            for link in links:
                of_link = by_pass.setdefault((not with_rows, *link.number), {})
                for filler in (filler for filler in link.fillers if filler.with_rows == with_rows):
                    of_link.setdefault(filler.entry.name, []).append(filler)
        own: dict[tuple[bool, int, int], dict[str, TableRequest]] = {key: {} for key in by_pass}
        for key, tables in by_pass.items():
            for table, some in tables.items():
                columns = frozenset[str]().union(*(filler.columns for filler in some))
                owned = tuple(dict.fromkeys(filler.target.owned_ids for filler in some))
                own[key][table] = TableRequest(columns, max(filler.row_bytes for filler in some), owned)
        of_ranks = meetings.gather((own, any(len(filler.target.table) for filler in fillers)))
        self.has_rows = any(has_rows for _, has_rows in of_ranks)
        by_number = {link.number: link for link in links}
        self._passes: list[LinkPass | None] = []  # None: this rank takes no rows, but attends the other ranks' rounds
        for key in sorted({key for of_rank, _ in of_ranks for key in of_rank}):
            one = None
            if key in own:
                all_requests = LinkRequests([of_rank.get(key, {}) for of_rank, _ in of_ranks])
                one = LinkPass(by_number[key[1:]], by_pass[key], all_requests, meetings)
            self._passes.append(one)
        for one in filter(None, self._passes):
            one.fetch()
        nothing: Windows = {"deletes": (), "rows": ()}
        of_passes = zip(*meetings.gather([one.windows if one else nothing for one in self._passes]), strict=True)
        self._rounds: list[Rounds] = [
            {kind: agreed_rounds([each[kind] for each in windows], RECEIVED_BYTES) for kind in nothing}
            for windows in of_passes
        ]

    def run(self, take: Take, concurrency: int, *, fills: bool) -> int:
        n_bytes = 0
        for one, rounds in zip(self._passes, self._rounds, strict=True):
            if one is None:
                for _ in range(sum(map(len, rounds.values()))):
                    self._meetings.wait()
                continue
            n_bytes += one.run(take, concurrency, rounds, fills=fills)
        return n_bytes


def _finished(fillers: Sequence[Filler], meetings: Meetings) -> dict[str, int]:
    """Complete the tables. Return, by table, how many rows had no room. Collective."""
    targets = dict.fromkeys(filler.target for filler in fillers)
    dropping = {filler.target for filler in fillers if filler.drops}
    if any(target.has_limited_room for target in targets):  # equal on all ranks
        for target in targets:
            target.check_room(drops=target in dropping)
        meetings.wait()  # before a table changes, all ranks learn whether each rank has room for the rows it owns
    in_order = sorted(targets, key=lambda target: target.finishes_last)
    return {target.table.name: target.finish(drops=target in dropping) for target in in_order}


def _read(other: OtherRows, take: Take) -> None:
    other.filler.begin_link()
    for rows in other.read():
        take(other.filler, rows)
    other.filler.end_link(np.empty(0, np.int64))


@contextmanager
def _undone_on_error(fillers: Iterable[Filler]) -> Iterator[None]:
    """After an error, empty the tables that were empty when filling began; the error names all changed tables."""
    try:
        yield
    except BaseException as error:
        changed = [filler.target.table for filler in fillers if filler.undo()]
        emptied = sorted({table.name for table in changed if not len(table)})
        mixed = sorted({table.name for table in changed if len(table)})
        if not changed:
            raise
        if isinstance(error, CheckpointRemovedError) and not mixed:
            raise CheckpointRemovedError(error.path, emptied=emptied) from error
        partly = PartlyLoadedError(f"{type(error).__name__}: {error}", emptied=emptied, mixed=mixed)
        if isinstance(error, Exception):
            raise partly from error
        log.error("%s", partly)  # logged, because an interrupt is raised as it is
        raise


def _counted(fillers: Iterable[Filler], dropped: Mapping[str, int], bytes_read: int) -> Loaded:
    taken, filtered = Counter[str](), Counter[str]()
    slot_rows: dict[tuple[str, str], int] = {}
    for filler in fillers:  # a row whose slots come from several checkpoints counts once
        name = filler.target.table.name
        taken[name] = max(taken[name], filler.n_rows)
        filtered[name] = max(filtered[name], filler.n_filtered)
        slots = (*filler.slots, *([ID] if filler.with_rows else []))
        slot_rows |= {(name, slot): filler.n_rows for slot in slots}
    for name, n_rows in dropped.items():
        taken[name] -= n_rows
        filtered[name] += n_rows
    return Loaded(dict(taken), dict(filtered), slot_rows, bytes_read)
