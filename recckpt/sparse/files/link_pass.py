"""One pass over a link: each batch is read by one of the ranks that need it, and rows go to the owners of their ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.catalog import Batch, Part, PartKind
from recckpt.parallel.meetings import Meetings
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.batch_rows import BatchRows, packed, unpacked
from recckpt.sparse.files.deal import LinkRequests
from recckpt.sparse.files.known_ids import LinkDeletes
from recckpt.sparse.files.link_reads import BatchRun, LinkReads
from recckpt.sparse.files.load_target import LinkLoad, TableLoad
from recckpt.sparse.files.once import Int64s, named_twice
from recckpt.sparse.files.rounds import Window
from recckpt.sparse.files.table_fill import TableFiller
from recckpt.types import SlotSpec

Take = Callable[[TableFiller, BatchRows], object]
Windows = Mapping[PartKind, Sequence[Window]]  # what a rank has to send
Rounds = Mapping[PartKind, Sequence[Collection[int]]]  # the ranks that send in each


class LinkPass:
    """The tables that one link fills at one go. Collective, but for :meth:`start`.

    Args:
        link: what is taken of it.
        fillers: name of a table in it -> what it fills.
        requests: what all ranks take of it.
        meetings: where they exchange rows.
    """

    def __init__(
        self,
        link: LinkLoad,
        fillers: Mapping[str, Sequence[TableFiller]],
        requests: LinkRequests,
        meetings: Meetings,
    ) -> None:
        self._link, self._batches, self._fillers = link, link.batches, fillers
        self._requests, self._meetings = requests, meetings
        self._reads = LinkReads(link.batches, self._takers, requests, meetings.rank)
        rows = Counter[str]()
        for part in (part for parts in link.batches.parts.values() for part in parts if part.holds == "rows"):
            for batch in filter(self._takers, part.batches):
                rows[batch.table] += batch.rows
        for filler in self._every:
            filler.expect(link.batches.directory, rows[filler.load.entry.name])

    @property
    def _every(self) -> list[TableFiller]:
        return [filler for some in self._fillers.values() for filler in some]

    @property
    def windows(self) -> Windows:
        """What this rank sends to others of the rows and the deletes."""
        return {kind: [window.sent for window in windows] for kind, windows in self._reads.windows.items()}

    def fetch(self) -> None:
        """Copy the files that this rank alone reads, where they are to be copied first."""
        if self._link.fetch is not None:
            self._link.fetch(layout.join(self._batches.directory, file) for file in self._reads.own_files)

    def start(self) -> None:
        """Make room in the tables."""
        for filler in self._every:
            filler.start()

    def run(self, take: Take, concurrency: int, rounds: Rounds, *, with_values: bool) -> int:
        """Have each filler take what its table owns; return the bytes that this rank has read.

        Args:
            take: gives a filler rows of a batch; from several threads.
            concurrency: number of threads.
            rounds: in which the ranks send rows and deletes to each other.
            with_values: whether they send rows as a whole; otherwise their ids.
        """
        deletes, threads = LinkDeletes(), self._batches.files.threads(concurrency)
        for filler in self._every:
            filler.begin_link()

        def take_deletes(rows: BatchRows) -> None:
            _refuse(deletes.add(rows.table, rows.shard, rows.ids), rows)

        def take_rows(rows: BatchRows) -> None:
            _refuse(deletes.among(rows.table, rows.shard, rows.ids), rows)
            for filler in self._fillers[rows.table]:
                take(filler, rows)

        n_bytes = self._read_kind("deletes", take_deletes, rounds, threads, with_values=False)
        n_bytes += self._read_kind("rows", take_rows, rounds, threads, with_values=with_values)
        run_all(self._check_frame, self._reads.whole_parts, threads)  # last: it says less of what is wrong
        for table, fillers in self._fillers.items():
            for filler in fillers:
                filler.end_link(deletes.of(table))
        return n_bytes

    def _read_kind(
        self, kind: PartKind, take: Callable[[BatchRows], None], rounds: Rounds, threads: int, *, with_values: bool
    ) -> int:
        """Read what others need too, round by round, and take what they send; then read what this rank alone needs."""
        windows, n_bytes = iter(self._reads.windows[kind]), 0
        read = partial(self._read, take=take, with_values=with_values)
        for senders in rounds[kind]:
            sent: list[list[BatchRows]] = [[] for _ in range(self._meetings.size)]
            window = next(windows).runs if self._meetings.rank in senders else ()
            for read_bytes, pieces in run_all(read, window, threads):
                n_bytes += read_bytes
                for rank, piece in pieces:
                    sent[rank].append(piece)
            received = self._meetings.exchange([packed(pieces) for pieces in sent])
            run_all(take, [rows for parcel in received for rows in unpacked(parcel)], threads)
        return n_bytes + sum(read_bytes for read_bytes, _ in run_all(read, self._reads.own[kind], threads))

    def _read(
        self, run: BatchRun, take: Callable[[BatchRows], None], *, with_values: bool
    ) -> tuple[int, list[tuple[int, BatchRows]]]:
        """Read batches and take their rows; return the bytes, and what goes to which rank."""
        n_bytes, pieces = 0, []
        for batch, rows in run.read(self._batches, self._slots(run.part)):
            take(rows)
            n_bytes += rows.n_bytes
            for rank, positions in self._requests.owners(rows.table).of(rows.ids, batch.sent) if batch.sent else ():
                columns = self._requests.columns(rows.table, rank) if with_values else frozenset[str]()
                if len(positions):
                    pieces.append((rank, rows.some(positions, columns)))
        return n_bytes, pieces

    def _check_frame(self, part: Part) -> None:
        """Check what lies between the values of a part that is read as a whole."""
        self._batches.check_frame(part, self._slots(part))

    def _slots(self, part: Part) -> Sequence[SlotSpec]:
        """Return the slots of all tables in a part that has rows for any load."""
        if part.holds == "deletes":
            return ()
        return next(load for batch in part.batches for load in self._takers(batch)).entry.slots

    def _takers(self, batch: Batch) -> list[TableLoad]:
        return [filler.load for filler in self._fillers.get(batch.table, ()) if filler.load.wants(batch)]


class PassOfOthers:
    """A pass over a link of which this rank takes nothing, while others exchange rows."""

    def __init__(self, meetings: Meetings) -> None:
        self._meetings = meetings
        self.windows: Windows = {"deletes": (), "rows": ()}

    def fetch(self) -> None:
        """Copy nothing."""

    def start(self) -> None:
        """Make no room."""

    def run(self, take: Take, concurrency: int, rounds: Rounds, *, with_values: bool) -> int:
        """Come to the rounds of the others."""
        for _ in range(sum(map(len, rounds.values()))):
            self._meetings.wait()
        return 0


def _refuse(twice: Int64s, rows: BatchRows) -> None:
    """Refuse ids that are twice in one shard."""
    if len(twice):
        found, expected = named_twice(twice)
        raise CorruptCheckpointError(rows.path, f"table {rows.table!r}", found=found, expected=expected)
