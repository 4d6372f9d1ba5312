"""Whether the ranks have read as many rows as a checkpoint says, each those of its slice; one alone cannot check it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise

from recckpt.errors import CorruptCheckpointError
from recckpt.format.buckets import Slice
from recckpt.format.names import ID
from recckpt.load.live_state import LiveState
from recckpt.load.report import LoadReport
from recckpt.output_dir.listing import Checkpoint
from recckpt.sparse.files.catalogs import count_error

Counts = Mapping[tuple[str, str], tuple[Slice, int]]  # table there and here -> ids of a rank, rows of them


def rows_read(live: LiveState, report: LoadReport, number: int) -> Counts:
    """Return how many rows of the source of this number were read for each table that it alone has filled."""
    filled = {item.name.table for item in report.items if item.name.is_slot and item.offer == number}
    filled -= {item.name.table for item in report.items if item.name.is_slot and item.offer not in (None, number)}
    counts = {}
    for item in report.items:
        here, there = item.name.table, item.source.rpartition("@")[0]
        owned = live.targets[here].slice if here in filled else None
        if item.name.slot == ID and item.offer == number and owned is not None:
            counts[there, here] = owned, report.rows_taken.get(here, 0) + report.rows_filtered.get(here, 0)
    return counts


def row_errors(checkpoint: Checkpoint, of_ranks: Sequence[Counts]) -> Iterator[CorruptCheckpointError]:
    """Yield an error for each table of which the ranks, whose slices make up all ids, have read more or fewer rows."""
    for key in dict.fromkeys(key for counts in of_ranks for key in counts):
        rows = dict(counts[key] for counts in of_ranks if key in counts)
        entry = checkpoint.manifest.named_table(key[0])
        if _tile(rows) and sum(rows.values()) != entry.rows:
            yield count_error(checkpoint.directory, entry.name, entry.rows, sum(rows.values()))


def _tile(slices: Mapping[Slice, int]) -> bool:
    """Say whether slices make up all ids, each of them once."""
    spans = sorted((Fraction(one.begin, one.size), Fraction(one.end, one.size)) for one in slices)
    meets = all(before[1] == after[0] for before, after in pairwise(spans))
    return meets and spans[0][0] == 0 and spans[-1][1] == 1
