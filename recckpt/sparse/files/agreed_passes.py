"""The passes that a load makes over the links of checkpoints: as many, and in the same order, on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_

from recckpt.parallel.meetings import Meetings
from recckpt.sparse.files.deal import LinkRequests, TableRequest
from recckpt.sparse.files.link_pass import LinkPass, PassOfOthers, Rounds, Take, Windows
from recckpt.sparse.files.load_target import LinkLoad
from recckpt.sparse.files.rounds import agreed_rounds
from recckpt.sparse.files.table_fill import TableFiller

RECEIVED_BYTES = 64 << 20  # about what a rank gets in a round, if no window alone has more for it


class AgreedPasses:
    """The passes over the links of some checkpoints, which all ranks go through together. Collective.

    Attributes:
        has_rows: whether a table of a rank has rows to lose.

    Args:
        links: what this rank takes.
        by_load: what it fills, by the identity of the :class:`TableLoad`.
        meetings: where ranks exchange rows.
    """

    def __init__(self, links: Sequence[LinkLoad], by_load: Mapping[int, TableFiller], meetings: Meetings) -> None:
        fillers = {(not rows, *link.number): _fillers(link, by_load, rows) for rows in (True, False) for link in links}
        own = {key: {table: _request(some) for table, some in tables.items()} for key, tables in fillers.items()}
        has_rows = any(len(filler.load.table) for filler in by_load.values())
        of_ranks = meetings.gather((own, has_rows))
        self.has_rows = any(has_rows for _, has_rows in of_ranks)
        by_number = {link.number: link for link in links}
        self._passes: list[LinkPass | PassOfOthers] = []
        for key in sorted({key for requests, _ in of_ranks for key in requests}):
            if key in own:
                requests = LinkRequests([requests.get(key, {}) for requests, _ in of_ranks])
                self._passes.append(LinkPass(by_number[key[1:]], fillers[key], requests, meetings))
            else:
                self._passes.append(PassOfOthers(meetings))
        for one in self._passes:
            one.fetch()
        of_ranks_windows = meetings.gather([one.windows for one in self._passes])
        self._rounds = [_rounds(windows) for windows in zip(*of_ranks_windows, strict=True)]

    def check(self, concurrency: int) -> int:
        """Have each filler check what its table owns; return the bytes that this rank has read."""
        return sum(
            one.run(TableFiller.check, concurrency, rounds, with_values=False)
            for one, rounds in zip(self._passes, self._rounds, strict=True)
        )

    def fill(self, take: Take, concurrency: int) -> int:
        """Have ``take`` give each filler what its table owns; return the bytes that this rank has read."""
        n_bytes = 0
        for one, rounds in zip(self._passes, self._rounds, strict=True):
            one.start()
            n_bytes += one.run(take, concurrency, rounds, with_values=True)
        return n_bytes


def _fillers(link: LinkLoad, by_load: Mapping[int, TableFiller], with_rows: bool) -> dict[str, list[TableFiller]]:
    fillers: dict[str, list[TableFiller]] = {}
    for load in link.tables:
        if load.with_rows == with_rows:
            fillers.setdefault(load.entry.name, []).append(by_load[id(load)])
    return fillers


def _request(fillers: Sequence[TableFiller]) -> TableRequest:
    return reduce(or_, (filler.load.request for filler in fillers))


def _rounds(windows: Sequence[Windows]) -> Rounds:
    return {kind: agreed_rounds([each[kind] for each in windows], RECEIVED_BYTES) for kind in windows[0]}
