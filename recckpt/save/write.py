"""Writes the files of a rank, and adds up what all ranks wrote."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from recckpt.checkpoint.attempt import ShardRecord, ShardWriter
from recckpt.errors import StateMismatchError
from recckpt.format import layout
from recckpt.format.catalog import Catalog
from recckpt.format.tables import ClockDates, DeltaRows, LiveLayout, Reduced, TableEntry
from recckpt.output_dir.checkpoint_dir import Intent
from recckpt.output_dir.commit import Lookout
from recckpt.output_dir.fence import check_epoch
from recckpt.parallel.threads import run_all
from recckpt.save.job import Destination, Job
from recckpt.save.stage import Staged
from recckpt.sparse.files.reduced_rows import ReducedSource
from recckpt.storage.retry import is_transient
from recckpt.storage.transfers import Outbox
from recckpt.text import Progress
from recckpt.types import SlotSpec

Slots = tuple[SlotSpec, ...]
_T = TypeVar("_T")


@dataclass(frozen=True)
class NamesAndSlots:
    """The names and slots of a rank's tables; usually the same on all ranks."""

    names: tuple[str, ...]
    kinds: tuple[Slots, ...]  # all distinct combinations of slots
    kind_of: tuple[int, ...]  # index into ``kinds`` for each table

    @classmethod
    def of(cls, slots: Mapping[str, Slots]) -> NamesAndSlots:
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(slots.values()))}
        return cls(tuple(slots), tuple(numbers), tuple(numbers[kind] for kind in slots.values()))


@dataclass(frozen=True, eq=False)
class WrittenTables:
    """The tables that one rank wrote, by columns. Rank 0 receives one such record per rank, and adds them up.

    Attributes:
        heads: names and slots of the tables.
        counts: number of rows per table; in a delta also upserts and deletes. Shape (1 or 3, tables).
        reduced: table -> what was left out; only tables that were not saved whole.
        evicted_to: table -> step up to which rows were evicted; only tables that evict by step.
        clock: table -> first and last date that the clock gave rows; only tables with such dates.
        live: live table -> its layout, the same on all ranks.
    """

    heads: NamesAndSlots
    counts: npt.NDArray[np.int64]
    reduced: Mapping[str, Reduced] = field(default_factory=dict)
    evicted_to: Mapping[str, int] = field(default_factory=dict)
    clock: Mapping[str, ClockDates] = field(default_factory=dict)
    live: Mapping[str, LiveLayout] = field(default_factory=dict)


def tables_of_all(ranks: Sequence[WrittenTables], replaced: Collection[str]) -> tuple[TableEntry, ...]:
    """Add up the tables of the ranks; ``replaced`` names those that a delta holds whole.

    Raises StateMismatchError if the slots of a table differ between ranks.
    """
    alike: defaultdict[NamesAndSlots, list[int]] = defaultdict(list)
    for rank, tables in enumerate(ranks):
        alike[tables.heads].append(rank)
    slots = _slots_of_all({heads: group[0] for heads, group in alike.items()})
    places = {name: place for place, name in enumerate(slots)}
    counts = np.zeros((len(ranks[0].counts), len(slots)), np.int64)
    n_ranks = np.zeros(len(slots), np.int64)  # number of ranks that have the table
    for heads, group in alike.items():
        at = [places[name] for name in heads.names]
        counts[:, at] += sum(ranks[rank].counts for rank in group)
        n_ranks[at] += len(group)
    reduced = _by_name(tables.reduced for tables in ranks)
    clock = _by_name(tables.clock for tables in ranks)
    evicted_to = _by_name(tables.evicted_to for tables in ranks)
    live = _by_name(tables.live for tables in ranks)

    def entry(name: str, n_rows: int, *changed: int) -> TableEntry:
        steps = evicted_to.get(name, [])
        is_even = len(steps) == n_ranks[places[name]] and len(set(steps)) == 1  # otherwise each slice has its own step
        return TableEntry(
            name,
            n_rows,
            slots[name],
            DeltaRows(changed[0], changed[1], name in replaced) if changed else None,
            reduce(Reduced.plus, reduced[name]) if name in reduced else None,
            steps[0] if is_even else None,
            reduce(ClockDates.joined, clock[name]) if name in clock else None,
            live[name][0] if name in live else None,
        )

    return tuple(entry(name, *of_table) for name, of_table in zip(slots, counts.T.tolist(), strict=True))


def _slots_of_all(first_ranks: Mapping[NamesAndSlots, int]) -> dict[str, Slots]:
    slots: dict[str, Slots] = {}
    for heads, rank in first_ranks.items():
        for name, kind in zip(heads.names, heads.kind_of, strict=True):
            own = heads.kinds[kind]
            if slots.setdefault(name, own) != own:
                raise StateMismatchError(
                    f"table {name!r} of rank {rank}",
                    mismatched={"slots": (own, slots[name])},
                    remedy="give the table the same shape, dtype and optimizer on every rank",
                )
    return slots


def _by_name(of_ranks: Iterable[Mapping[str, _T]]) -> dict[str, list[_T]]:
    lists: defaultdict[str, list[_T]] = defaultdict(list)
    for own in of_ranks:
        for name, value in own.items():
            lists[name].append(value)
    return lists


@dataclass(frozen=True)
class RankRecord:
    """The outcome of writing on one rank. In a blocking save, ``blocked_sec`` ends when the rank has written."""

    shard: ShardRecord
    tables: WrittenTables
    stage_sec: float
    blocked_sec: float
    write_sec: float
    n_kept: int  # rows copied aside because training changed them meanwhile
    n_evicted: int  # rows evicted by the tables of this rank


def write(staged: Staged, intent: Intent, job: Job, to: Destination, progress: Progress) -> RankRecord:
    """Write the files of this rank into the directory of an attempt: dense beside sparse, the catalog last.

    Raises WriterFencedError if another writer has taken over: that writer may have removed these files.
    """
    rank, begin = job.ranks.rank, time.perf_counter()
    check_owner = partial(check_epoch, to.storage, intent.epoch)
    try:
        if rank:
            Lookout(to.storage, to.transport.visible, check_owner).check_intent(intent)
        with Outbox(to.storage, to.transport) as outbox:
            shard = ShardWriter(to.storage, intent, rank, job.ranks.size, outbox)
            states: dict[str, Mapping[str, Any]] = {
                layout.of_rank("io_state", rank): staged.io_state,
                layout.of_rank("rng", rank): staged.rng,
            }
            if staged.own_extra:
                states[layout.of_rank("extra", rank)] = staged.own_extra
            if rank == 0:
                states[layout.EXTRA] = staged.extra
            pieces: list[Callable[[], None]] = [
                lambda: shard.states(states),
                lambda: shard.tensors(staged.dense if rank == 0 else None, staged.sharded.chunks),
                lambda: to.sparse_saver.save(staged.tables, shard, progress.advance),
            ]
            run_all(lambda piece: piece(), pieces, to.concurrency)
            record, tables = shard.record(), _written_tables(staged, shard.catalog)
            staged.check_live()
            staged.release()  # before slow work: until this call, training has to copy the rows it changes
            outbox.publish(to.concurrency)
    except OSError as error:
        if not is_transient(error):  # the network has failed for minutes: do not retry
            check_owner()
        raise
    seconds = job.info.stage_sec, job.info.blocked_sec, time.perf_counter() - begin
    return RankRecord(record, tables, *seconds, sum(table.n_kept for table in staged.tables), staged.n_evicted)


def _written_tables(staged: Staged, catalog: Catalog) -> WrittenTables:
    tables, deletes = staged.tables, catalog.counts("deletes")
    counts = [[table.n_all for table in tables]]
    if staged.kind.base is not None:
        counts += [[table.n_rows for table in tables], [deletes.get(table.name, 0) for table in tables]]
    return WrittenTables(
        NamesAndSlots.of({table.name: table.slots for table in tables}),
        np.array(counts, np.int64),
        {table.name: table.reduced for table in tables if isinstance(table, ReducedSource)},
        {name: step for name, step in staged.evicted_to.items() if step is not None},
        {name: dates for name, dates in staged.clock.items() if dates is not None},
        staged.layouts,
    )


def totals_of(records: Sequence[RankRecord], tables: Sequence[TableEntry]) -> dict[str, Any]:
    seconds = [each.write_sec for each in records]
    n_bytes = [sum(file.n_bytes for file in each.shard.files) for each in records]
    return {
        "n_bytes": sum(n_bytes),
        "n_rows": sum(table.rows for table in tables),
        "n_upserts": sum(table.own_rows for table in tables),
        "n_deletes": sum(table.delta.deletes for table in tables if table.delta),
        "n_left_out": sum(table.reduced.rows for table in tables if table.reduced),
        "n_evicted": sum(each.n_evicted for each in records),
        "kept_rows": sum(each.n_kept for each in records),
        "write_sec": max(seconds),
        "slowest_shard": seconds.index(max(seconds)),
        "max_stage_sec": max(each.stage_sec for each in records),
        "max_rank_bytes": max(n_bytes),
        "_others_blocked_sec": max(each.blocked_sec for each in records),
    }
