"""What all ranks wrote, added up from the record of each."""

from __future__ import annotations

from collections.abc import Sequence

from recckpt.format.tables import TableEntry
from recckpt.save.save_info import SaveTotals
from recckpt.save.write import RankRecord


def totals_of(records: Sequence[RankRecord], tables: Sequence[TableEntry]) -> SaveTotals:
    """Return what a save wrote in all; ``tables`` are those of all ranks."""
    times = [record.times for record in records]
    seconds = [each.write_sec for each in times]
    return SaveTotals(
        n_bytes=sum(each.n_bytes for each in times),
        n_rows=sum(table.rows for table in tables),
        n_upserts=sum(table.own_rows for table in tables),
        n_deletes=sum(table.delta.deletes for table in tables if table.delta),
        n_left_out=sum(table.reduced.rows for table in tables if table.reduced),
        n_evicted=sum(record.n_evicted for record in records),
        kept_rows=sum(record.n_kept for record in records),
        write_sec=max(seconds),
        slowest_shard=seconds.index(max(seconds)),
        max_stage_sec=max(each.stage_sec for each in times),
        max_rank_bytes=max(each.n_bytes for each in times),
        max_blocked_sec=max(each.blocked_sec for each in times),
    )
