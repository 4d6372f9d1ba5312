"""One pass over a link: each batch is read by one rank that needs it, which sends rows to the other owning ranks."""

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
from recckpt.format.catalog import PartKind, id_ranges
from recckpt.parallel.ranks import Meetings
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.arrow_format import ID
from recckpt.sparse.files.filler import BatchRows, Filler, packed, unpacked
from recckpt.sparse.files.owners import DealtBatch, LinkRequests, Window
from recckpt.sparse.files.part_reader import READ_BYTES, LinkBatches, PartReader, runs_of
from recckpt.sparse.files.pieces import Int64s, check_range, named_twice
from recckpt.sparse.table.kernels import first_outside

WINDOW_BYTES = 16 << 20  # about how much a rank sends in a round, unless one batch is larger
Take = Callable[[Filler, BatchRows], object]
Windows = Mapping[PartKind, Sequence[Window]]  # the windows that a rank has to send
Rounds = Mapping[PartKind, Sequence[Collection[int]]]  # the ranks that send a window in each round
Run = Sequence[DealtBatch]  # batches of one part with equal columns, which one thread reads


@dataclass(frozen=True)
class LinkLoad:
    """The rows that a load reads from a link; one table of the link may fill several tables.

    Links of a chain share one :class:`Filler` per table. Links older than a whole one are not read.

    Attributes:
        number: (number of the checkpoint among those loaded, number of the link in its chain); equal on all ranks.
        fetch: copies files, by path, to this host before they are read; None to read the files where they are.
    """

    number: tuple[int, int]
    fillers: Sequence[Filler]
    batches: LinkBatches
    fetch: Callable[[Iterable[str]], object] | None = None

    @property
    def n_bytes(self) -> int:
        fillers, n_bytes = defaultdict[str, list[Filler]](list), 0
        for filler in self.fillers:
            fillers[filler.entry.name].append(filler)
        for part in (part for part in self.batches.every_part if part.holds == "rows"):
            for batch in part.batches:
                takers = fillers.get(batch.table, ())
                n_bytes += sum(round(batch.rows * filler.share(batch)) * filler.row_bytes for filler in takers)
        return n_bytes

    def check_ids(self) -> None:
        """Raise LiveTableError for ids that a table cannot have; decided from the catalogs, so all ranks agree."""
        ranges = id_ranges(self.batches.every_part)
        for filler in self.fillers:
            if filler.entry.name in ranges:
                filler.check_ids(*ranges[filler.entry.name])


class LinkDeletes:
    """Deleted ids of a link, by table and shard; within a shard no id is a row and a delete. ``add`` is thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[tuple[str, int], Int64s] = {}

    def add(self, table: str, shard: int, ids: Int64s) -> Int64s:  # returns ids that are now deleted twice
        with self._lock:
            known = self._found.get((table, shard), np.empty(0, np.int64))
            both = self._found[table, shard] = np.sort(np.concatenate([known, ids]))
        return repeated(both)

    def among(self, table: str, shard: int, ids: Int64s) -> Int64s:
        deleted = self._found.get((table, shard))
        return ids[:0] if deleted is None else ids[is_among(ids, deleted)]

    def of(self, table: str) -> Int64s:
        some = [ids for (name, _), ids in self._found.items() if name == table]
        return np.concatenate([np.empty(0, np.int64), *some])


class LinkPass:
    """Fills tables from one link. Collective. ``windows`` are the rows that this rank sends to other ranks."""

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
        self._own_files: list[str] = []  # files that only this rank reads
        self._whole_parts: list[DealtBatch] = []  # the first batch of each part that only this rank reads, in full
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
            for each in part.batches:
                if any(filler.share(each) > 0 for filler in fillers.get(each.table, ())):
                    rows[each.table] += each.rows
        for filler in self._every:
            filler.expect(link.batches.directory, rows[filler.entry.name])

    def fetch(self) -> None:
        if self._fetch is not None:
            self._fetch(layout.join(self._batches.directory, file) for file in self._own_files)

    def run(self, take: Take, concurrency: int, rounds: Rounds, *, fills: bool) -> int:
        """Pass each filler the rows that its table owns, through ``take``. Return the bytes that this rank has read.

        Several threads call ``take``. With ``fills`` tables are filled and whole rows sent; without it rows are only
        checked, and only ids sent.
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
        # Check the bytes between values of parts read in full last: such an error names the damage less exactly.
        run_all(lambda batch: self._reader(batch).check_frame(), self._whole_parts, threads)
        for table, fillers in self._fillers.items():
            for filler in fillers:
                filler.end_link(deletes.of(table))
        return n_bytes

    def _read_kind(
        self, kind: PartKind, take: Callable[[BatchRows], None], rounds: Rounds, threads: int, *, with_values: bool
    ) -> int:
        """In each round, read and send rows of other ranks, and take received rows. Then read own batches."""
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
        table = dealt.part.batches[dealt.number].table
        slots = self._fillers[table][0].entry.slots if dealt.part.holds == "rows" else ()
        return self._batches.reader(dealt.part, slots, dealt.columns)


def _runs(dealt: Iterable[DealtBatch]) -> Iterator[Run]:
    """Yield batches of one part with equal columns, in groups that are read at once.

    A part that a catalog lists twice counts as two parts, so its rows are read twice and refused.
    """
    for _, of_part in groupby(dealt, key=lambda batch: id(batch.part)):
        by_columns: dict[frozenset[str], list[DealtBatch]] = {}
        for batch in of_part:
            by_columns.setdefault(batch.columns, []).append(batch)
        for some in by_columns.values():
            yield from runs_of(some, READ_BYTES, lambda batch: batch.n_bytes)


def _sent(window: Iterable[DealtBatch]) -> Window:
    sent = Counter[int]()
    for batch in window:
        sent.update(batch.sent)
    return sent


def _refuse(twice: Int64s, rows: BatchRows) -> None:
    if len(twice):
        found, expected = named_twice(twice)
        raise CorruptCheckpointError(rows.path, f"table {rows.table!r}", found=found, expected=expected)


def _check_ids(ids: Int64s, reader: PartReader, number: int) -> None:
    """Check that ids lie in the batch's buckets and id range, by which readers select batches."""
    buckets = reader.part.batches[number].buckets
    at = first_outside(ids, *buckets)
    if at >= 0:
        stray = f"id {ids[at]} of bucket {bucket_of(ids[at : at + 1])[0]}"
        raise reader.damage(number, stray, f"ids of buckets {list(buckets)}")
    for found, expected in check_range(ids, reader.part.batches[number]):
        raise reader.damage(number, found, expected)
