"""Whether the ranks have read as many rows as a checkpoint says, each those that it owns; one alone cannot check it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise

from recckpt.errors import CorruptCheckpointError
from recckpt.format.buckets import Slice
from recckpt.format.names import ID
from recckpt.load.live_state import LiveState
from recckpt.load.report import LoadReport
from recckpt.output_dir.listing import Checkpoint
from recckpt.sparse.files.catalogs import count_error
from recckpt.sparse.files.owners import IdBlock, OwnedIds

Counts = Mapping[tuple[str, str], tuple[OwnedIds, int]]  # table there and here -> ids of a rank, rows of them


def rows_read(live: LiveState, report: LoadReport, number: int) -> Counts:
    """Return how many rows of the source of this number were read for each table that it alone has filled."""
    filled = {item.name.table for item in report.items if item.name.is_slot and item.offer == number}
    filled -= {item.name.table for item in report.items if item.name.is_slot and item.offer not in (None, number)}
    counts = {}
    for item in report.items:
        here, there = item.name.table, item.source.rpartition("@")[0]
        if item.name.slot != ID or item.offer != number or here not in filled or item.thing.tensor:
            continue
        n_rows = report.rows_taken.get(here, 0) + report.rows_filtered.get(here, 0)
        counts[there, here] = live.targets[here].owned_ids, n_rows
    return counts


def row_errors(checkpoint: Checkpoint, of_ranks: Sequence[Counts]) -> Iterator[CorruptCheckpointError]:
    """Yield an error for each table of which the ranks, whose ids make up all ids, have read more or fewer rows."""
    for key in dict.fromkeys(key for counts in of_ranks for key in counts):
        rows = dict(counts[key] for counts in of_ranks if key in counts)
        entry = checkpoint.manifest.named_table(key[0])
        if _tile(rows) and sum(rows.values()) != entry.rows:
            yield count_error(checkpoint.directory, entry.name, entry.rows, sum(rows.values()))


def _tile(owned: Collection[OwnedIds]) -> bool:
    """Say whether the ids that ranks own make up all ids, each of them once; those of copies are there once."""
    spans = sorted(span for one in owned for span in _spans(one) if span[0] < span[1])
    meets = all(before[1] == after[0] for before, after in pairwise(spans))
    is_of_one_kind = len({type(one) for one in owned}) == 1
    return is_of_one_kind and meets and bool(spans) and spans[0][0] == 0 and spans[-1][1] == 1


def _spans(owned: OwnedIds) -> Iterator[tuple[Fraction, Fraction]]:
    """Yield what parts of all buckets, or of all ids, it is."""
    if isinstance(owned, Slice):
        yield Fraction(owned.begin, owned.size), Fraction(owned.end, owned.size)
    elif isinstance(owned, IdBlock):
        yield Fraction(owned.number, owned.size), Fraction(owned.number + 1, owned.size)
    else:
        for begin, end, _ in owned.spans:
            yield Fraction(begin + (1 << 63), 1 << 64), Fraction(end + (1 << 63), 1 << 64)
