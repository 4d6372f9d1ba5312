"""One pass over a link: each batch is read by one of the ranks that need it, and rows go to the owners of their ids."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.buckets import bucket_of, is_among, repeated
from recckpt.format.catalog import Batch, PartKind, id_ranges
from recckpt.parallel.ranks import Meetings
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.arrow_format import ID
from recckpt.sparse.files.filler import BatchRows, Filler, packed, unpacked
from recckpt.sparse.files.owners import DealtBatch, LinkRequests, Window
from recckpt.sparse.files.part_reader import READ_BYTES, LinkBatches, PartReader, runs_of
from recckpt.sparse.files.pieces import Int64s, check_range, named_twice
from recckpt.sparse.table.kernels import first_outside

WINDOW_BYTES = 16 << 20  # about what a rank sends in a round, if a batch has no more
Take = Callable[[Filler, BatchRows], object]
Windows = Mapping[PartKind, Sequence[Window]]  # what a rank has to send
Rounds = Mapping[PartKind, Sequence[Collection[int]]]  # the ranks that send in each
Run = Sequence[DealtBatch]  # of one part, of which the same columns are read, by one thread


@dataclass(frozen=True)
class LinkLoad:
    """What is taken of a link; a table of it may fill several.

    The links of a chain have the same :class:`Filler` for a table, as far as they count.

    Attributes:
        number: of the checkpoint among those that are loaded, and of the link in its chain: the same on all ranks.
        fillers: of the tables.
        batches: what it is filled with.
        fetch: copies files to this host, by their paths, before they are read; None to read them where they lie.
    """

    number: tuple[int, int]
    fillers: Sequence[Filler]
    batches: LinkBatches
    fetch: Callable[[Iterable[str]], object] | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of the rows that the tables own, about, in the columns that are read."""
        fillers, n_bytes = defaultdict[str, list[Filler]](list), 0
        for filler in self.fillers:
            fillers[filler.entry.name].append(filler)
        for part in (part for part in self.batches.every_part if part.holds == "rows"):
            for batch in part.batches:
                takers = fillers.get(batch.table, ())
                n_bytes += sum(round(batch.rows * filler.share(batch)) * filler.row_bytes for filler in takers)
        return n_bytes

    def check_ids(self) -> None:
        """Refuse ids that a table cannot have a row of: alike on all ranks, from the catalogs alone.

        Raises:
            LiveTableError: there are some.
        """
        ranges = id_ranges(self.batches.every_part)
        for filler in self.fillers:
            if filler.entry.name in ranges:
                filler.check_ids(*ranges[filler.entry.name])


class LinkDeletes:
    """The deleted ids of a link by table and shard; in one shard an id is there once, as a row or as a delete.

    ``add`` may be called from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[tuple[str, int], Int64s] = {}

    def add(self, table: str, shard: int, ids: Int64s) -> Int64s:
        """Know the ids of a batch; return those that are there twice now."""
        with self._lock:
            known = self._found.get((table, shard), np.empty(0, np.int64))
            both = self._found[table, shard] = np.sort(np.concatenate([known, ids]))
        return repeated(both)

    def among(self, table: str, shard: int, ids: Int64s) -> Int64s:
        """Return those of the ids, which have rows in a shard, that the same shard deletes."""
        deleted = self._found.get((table, shard))
        return ids[:0] if deleted is None else ids[is_among(ids, deleted)]

    def of(self, table: str) -> Int64s:
        """Return the ids that any shard deletes."""
        some = [ids for (name, _), ids in self._found.items() if name == table]
        return np.concatenate([np.empty(0, np.int64), *some])


class LinkPass:
    """The tables that one link fills at one go. Collective.

    Attributes:
        windows: what this rank sends to others of the rows and the deletes.

    Args:
        link: what is taken of it.
        fillers: name of a table in it -> what it fills.
        requests: what all ranks take of it.
        meetings: where they exchange rows.
    """

    def __init__(
        self,
        link: LinkLoad,
        fillers: Mapping[str, Sequence[Filler]],
        requests: LinkRequests,
        meetings: Meetings,
    ) -> None:
        self._fetch, self._batches, self._fillers = link.fetch, link.batches, fillers
        self._every = [filler for some in fillers.values() for filler in some]
        self._requests, self._meetings = requests, meetings
        self._own_files: list[str] = []  # of which no other rank reads a batch
        self._whole_parts: list[DealtBatch] = []  # the first batch of each part of which this rank reads all
        alone: dict[PartKind, list[DealtBatch]] = {"rows": [], "deletes": []}
        shared: dict[PartKind, list[DealtBatch]] = {"rows": [], "deletes": []}
        dealt = (batch for shard, parts in link.batches.parts.items() for batch in requests.deal(parts, shard))
        for _, of_part in groupby(dealt, key=lambda batch: id(batch.part)):
            every = list(of_part)
            part, own = every[0].part, [batch for batch in every if batch.reader == meetings.rank]
            if own and len(own) == len(every):
                self._own_files.append(part.file)
            if len(own) == len(part.batches):
                self._whole_parts.append(own[0])
            for batch in own:
                (shared if batch.sent else alone)[part.holds].append(batch)
        self._own = {kind: list(_runs(some)) for kind, some in alone.items()}
        windows = {
            kind: list(runs_of(some, WINDOW_BYTES, lambda batch: sum(batch.sent.values())))
            for kind, some in shared.items()
        }
        self.windows: Windows = {kind: [_sent(window) for window in some] for kind, some in windows.items()}
        self._shared = {kind: [list(_runs(window)) for window in some] for kind, some in windows.items()}
        rows = Counter[str]()
        for part in (part for part in link.batches.every_part if part.holds == "rows"):
            for each in filter(self._takers, part.batches):
                rows[each.table] += each.rows
        for filler in self._every:
            filler.expect(link.batches.directory, rows[filler.entry.name])

    def _takers(self, batch: Batch) -> list[Filler]:
        return [filler for filler in self._fillers.get(batch.table, ()) if filler.share(batch) > 0]

    def fetch(self) -> None:
        """Copy the files that this rank alone reads, where they are to be copied first."""
        if self._fetch is not None:
            self._fetch(layout.join(self._batches.directory, file) for file in self._own_files)

    def run(self, take: Take, concurrency: int, rounds: Rounds, *, fills: bool) -> int:
        """Have each filler take what its table owns; return the bytes that this rank has read.

        Args:
            take: gives a filler rows of a batch; from several threads.
            concurrency: number of threads.
            rounds: in which the ranks send rows and deletes to each other.
            fills: whether the tables make room, and ranks send rows as a whole; otherwise their ids.
        """
        for filler in self._every if fills else ():
            filler.start()
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
        n_bytes += self._read_kind("rows", take_rows, rounds, threads, with_values=fills)
        # Last, what lies between the values of parts that are read as a whole: it says less of what is wrong.
        run_all(lambda batch: self._reader(batch).check_frame(), self._whole_parts, threads)
        for table, fillers in self._fillers.items():
            for filler in fillers:
                filler.end_link(deletes.of(table))
        return n_bytes

    def _read_kind(
        self, kind: PartKind, take: Callable[[BatchRows], None], rounds: Rounds, threads: int, *, with_values: bool
    ) -> int:
        """Read what others need too, round by round, and take what they send; then read what this rank alone needs."""
        windows, n_bytes = iter(self._shared[kind]), 0
        read = partial(self._read, take=take, with_values=with_values)
        for senders in rounds[kind]:
            sent: list[list[BatchRows]] = [[] for _ in range(self._meetings.size)]
            window = next(windows) if self._meetings.rank in senders else ()
            for read_bytes, pieces in run_all(read, window, threads):
                n_bytes += read_bytes
                for rank, piece in pieces:
                    sent[rank].append(piece)
            received = self._meetings.exchange([packed(pieces) for pieces in sent])
            run_all(take, [rows for parcel in received for rows in unpacked(parcel)], threads)
        return n_bytes + sum(read_bytes for read_bytes, _ in run_all(read, self._own[kind], threads))

    def _read(
        self, run: Run, take: Callable[[BatchRows], None], *, with_values: bool
    ) -> tuple[int, list[tuple[int, BatchRows]]]:
        """Read batches, check them and take their rows; return the bytes, and what goes to which rank."""
        n_bytes, pieces, part = 0, [], run[0].part
        sent = {batch.number: batch.sent for batch in run}
        reader = self._reader(run[0])
        for number, columns in reader.batches(sent):
            table = part.batches[number].table
            values = {spec.name: np.frombuffer(columns[spec.name], np.uint8) for spec in reader.specs}
            rows = BatchRows(table, run[0].shard, reader.path, np.frombuffer(columns[ID], np.int64), values)
            _check_ids(rows.ids, reader, number)
            take(rows)
            n_bytes += rows.n_bytes
            for rank, positions in self._requests.owners[table].of(rows.ids, sent[number]) if sent[number] else ():
                if len(positions):
                    needed = self._requests.of_tables[table][rank].columns if with_values else frozenset[str]()
                    pieces.append((rank, rows.some(positions, needed)))
        return n_bytes, pieces

    def _reader(self, dealt: DealtBatch) -> PartReader:
        """Return the reader of the part that has a batch; all tables of a part have the same slots."""
        table = dealt.part.batches[dealt.number].table
        slots = self._fillers[table][0].entry.slots if dealt.part.holds == "rows" else ()
        return self._batches.reader(dealt.part, slots, dealt.columns)


def _runs(dealt: Iterable[DealtBatch]) -> Iterator[Run]:
    """Yield batches of one part that are read by the same columns, as many at a time as are read at once.

    A part that a catalog lists twice is two: its rows are read twice, and refused.
    """
    for _, of_part in groupby(dealt, key=lambda batch: id(batch.part)):
        by_columns: dict[frozenset[str], list[DealtBatch]] = {}
        for batch in of_part:
            by_columns.setdefault(batch.columns, []).append(batch)
        for some in by_columns.values():
            yield from runs_of(some, READ_BYTES, lambda batch: batch.n_bytes)


def _sent(window: Iterable[DealtBatch]) -> Window:
    """Return what is sent of a window to each rank, about."""
    sent = Counter[int]()
    for batch in window:
        sent.update(batch.sent)
    return sent


def _refuse(twice: Int64s, rows: BatchRows) -> None:
    """Refuse ids that are twice in one shard."""
    if len(twice):
        found, expected = named_twice(twice)
        raise CorruptCheckpointError(rows.path, f"table {rows.table!r}", found=found, expected=expected)


def _check_ids(ids: Int64s, reader: PartReader, number: int) -> None:
    """Check that the ids are of the buckets, and in the range, by which readers choose their batches."""
    buckets = reader.part.batches[number].buckets
    at = first_outside(ids, *buckets)
    if at >= 0:
        stray = f"id {ids[at]} of bucket {bucket_of(ids[at : at + 1])[0]}"
        raise reader.damage(number, stray, f"ids of buckets {list(buckets)}")
    for found, expected in check_range(ids, reader.part.batches[number]):
        raise reader.damage(number, found, expected)
