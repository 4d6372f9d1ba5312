"""What one rank reads of a link: for itself alone, and what other ranks need as well, in windows that bound memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from recckpt.format.buckets import bucket_of
from recckpt.format.catalog import Batch, Part, PartKind
from recckpt.sparse.files.batch_rows import BatchRows
from recckpt.sparse.files.deal import LinkRequests, Turn
from recckpt.sparse.files.id_check import check_range
from recckpt.sparse.files.link_batches import LinkBatches
from recckpt.sparse.files.load_target import TableLoad
from recckpt.sparse.files.part_reader import PartReader
from recckpt.sparse.files.rounds import Window
from recckpt.sparse.table.kernels import first_outside
from recckpt.types import SlotSpec

RUN_BATCHES = 16  # that one thread reads before it takes the next run
WINDOW_BYTES = 16 << 20  # about what a rank sends in a round, if a batch has no more


@dataclass(frozen=True)
class DealtBatch:
    """A batch that this rank reads.

    Attributes:
        number: in its part.
        columns: slots that ranks need of it.
        sent: other ranks that need rows of it, and about how many of its bytes.
    """

    number: int
    columns: frozenset[str]
    sent: Window


@dataclass(frozen=True)
class BatchRun:
    """Batches of one part, of which the same columns are read, by one thread."""

    shard: int
    part: Part
    batches: Sequence[DealtBatch]

    def read(self, link: LinkBatches, slots: Sequence[SlotSpec]) -> Iterator[tuple[DealtBatch, BatchRows]]:
        """Yield each batch and its rows, checked; ``slots`` are those of its tables."""
        by_number = {batch.number: batch for batch in self.batches}
        for number, columns, reader in link.read(self.part, by_number, slots, self.batches[0].columns):
            table = self.part.batches[number].table
            rows = BatchRows.of_columns(table, self.shard, reader.path, columns)
            _check_buckets(rows.ids, reader, number)
            yield by_number[number], rows


@dataclass(frozen=True)
class SharedRuns:
    """What is read before a round, and sent in it."""

    runs: Sequence[BatchRun]
    sent: Window


class LinkReads:
    """What this rank reads of a link.

    Attributes:
        own: kind of part -> batches that no other rank needs.
        windows: kind of part -> batches that others need too, as many at a time as are sent in a round.
        whole_parts: parts of which this rank reads all batches.
        own_files: parts of which no other rank reads a batch.

    Args:
        batches: of the link.
        takers: what fills tables of this rank by a batch.
        requests: what all ranks take of the link.
        rank: number of this one.
    """

    def __init__(
        self,
        batches: LinkBatches,
        takers: Callable[[Batch], Sequence[TableLoad]],
        requests: LinkRequests,
        rank: int,
    ) -> None:
        self._takers, self._requests, self._rank = takers, requests, rank
        self.own: dict[PartKind, list[BatchRun]] = {"rows": [], "deletes": []}
        self.whole_parts: list[Part] = []
        self.own_files: list[str] = []
        shared: dict[PartKind, list[tuple[int, Part, DealtBatch]]] = {"rows": [], "deletes": []}
        for shard, parts in batches.parts.items():
            turns = requests.deal(parts, shard)
            for part in parts:
                dealt = list(self._dealt(part, turns))
                self._note(part, len(dealt), turns)
                self.own[part.holds] += _runs(shard, part, [batch for batch in dealt if not batch.sent])
                shared[part.holds] += [(shard, part, batch) for batch in dealt if batch.sent]
        self.windows = {kind: list(_windows(some)) for kind, some in shared.items()}

    def _dealt(self, part: Part, turns: Mapping[tuple[str, int], Turn]) -> Iterator[DealtBatch]:
        """Yield the batches of a part that this rank reads."""
        for number, batch in enumerate(part.batches):
            turn = turns.get((part.file, number))
            if turn is None or turn.reader != self._rank:
                continue
            loads = self._takers(batch)
            n_bytes = batch.rows * (8 if part.holds == "deletes" else max(load.row_bytes for load in loads))
            sent = {rank: round(n_bytes * share) for rank, share in turn.shares.items() if rank != self._rank}
            columns = frozenset[str]().union(*(load.columns for load in loads))
            columns = columns.union(*(self._requests.columns(batch.table, rank) for rank in sent))
            yield DealtBatch(number, columns, sent)

    def _note(self, part: Part, n_dealt: int, turns: Mapping[tuple[str, int], Turn]) -> None:
        """Note whether this rank reads a part alone, and whether as a whole."""
        readers = {turns[at].reader for at in ((part.file, n) for n in range(len(part.batches))) if at in turns}
        if n_dealt and readers <= {self._rank}:
            self.own_files.append(part.file)
        if n_dealt and n_dealt == len(part.batches):
            self.whole_parts.append(part)


def _runs(shard: int, part: Part, batches: Sequence[DealtBatch]) -> Iterator[BatchRun]:
    """Yield batches that are read by the same columns, some at a time."""
    by_columns: dict[frozenset[str], list[DealtBatch]] = {}
    for batch in batches:
        by_columns.setdefault(batch.columns, []).append(batch)
    for some in by_columns.values():
        for begin in range(0, len(some), RUN_BATCHES):
            yield BatchRun(shard, part, some[begin : begin + RUN_BATCHES])


def _windows(shared: Sequence[tuple[int, Part, DealtBatch]]) -> Iterator[SharedRuns]:
    """Yield what is sent at once: at least one batch, and no more than a window has room for."""
    window: list[tuple[int, Part, DealtBatch]] = []
    sent = Counter[int]()
    for each in shared:
        if window and sent.total() + sum(each[2].sent.values()) > WINDOW_BYTES:
            yield SharedRuns(list(_runs_of(window)), sent)
            window, sent = [], Counter()
        window.append(each)
        sent.update(each[2].sent)
    if window:
        yield SharedRuns(list(_runs_of(window)), sent)


def _runs_of(window: Sequence[tuple[int, Part, DealtBatch]]) -> Iterator[BatchRun]:
    for _, some in groupby(window, key=lambda each: (each[0], each[1].file)):
        (shard, part, first), *others = some
        yield from _runs(shard, part, [first, *(batch for _, _, batch in others)])


def _check_buckets(ids: npt.NDArray[np.int64], reader: PartReader, number: int) -> None:
    """Check that the ids are of the buckets, and in the range, by which readers choose their batches."""
    buckets = reader.part.batches[number].buckets
    at = first_outside(ids, *buckets)
    if at >= 0:
        stray = f"id {ids[at]} of bucket {bucket_of(ids[at : at + 1])[0]}"
        raise reader.damage(number, stray, f"ids of buckets {list(buckets)}")
    for found, expected in check_range(ids, reader.part.batches[number]):
        raise reader.damage(number, found, expected)
