"""Arrow parts to tables: read only what is wanted, check it, find the rows once, copy the slots."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from recckpt.background import run_all
from recckpt.errors import StateMismatchError
from recckpt.manifest import TableEntry
from recckpt.sparse.catalog import Batch, Part
from recckpt.sparse.codec import PartReader
from recckpt.sparse.filler import Filler, TableLoad
from recckpt.sparse.source import source_of
from recckpt.storage import Storage
from recckpt.types import HashTable as AnyTable
from recckpt.types import SlotSpec, is_optimizer_slot

log = logging.getLogger("recckpt")

_RUN_BATCHES = 16  # batches that one thread reads before it takes the next run


def plan_load(
    tables: Mapping[str, AnyTable],
    entries: Sequence[TableEntry],
    *,
    with_rows: bool,
    with_optimizer: bool,
    strict: bool,
) -> list[TableLoad]:
    """Match the tables of a model with those of a checkpoint.

    Args:
        tables: the model's, by name.
        entries: the checkpoint's.
        with_rows: whether to take ids, embeddings and slots that are no optimizer's.
        with_optimizer: whether to take the optimizer's slots.
        strict: whether a table that one side lacks is an error; otherwise it is left alone.

    Raises:
        StateMismatchError: a table that one side lacks, or a slot of another dtype or shape; all of them.
    """
    by_name = {entry.name: entry for entry in entries}
    missing = [name for name in tables if name not in by_name]
    unexpected = [name for name in by_name if name not in tables]
    loads: list[TableLoad] = []
    mismatched: dict[str, tuple[object, object]] = {}
    for name in (name for name in tables if name in by_name):
        live = {spec.name: spec for spec in source_of(tables[name]).slots}
        saved = {spec.name: spec for spec in by_name[name].slots}

        def wanted(slot: str) -> bool:
            return with_optimizer if is_optimizer_slot(slot) else with_rows

        both = frozenset(slot for slot in live.keys() & saved.keys() if wanted(slot))
        mismatched |= {
            f"{name}@{slot}": (_describe(saved[slot]), _describe(live[slot]))
            for slot in both
            if saved[slot] != live[slot]
        }
        _report_slots(name, {slot for slot in live.keys() ^ saved.keys() if wanted(slot)}, live.keys())
        if with_rows or both:
            loads.append(TableLoad(tables[name], by_name[name], both, with_rows))
    if mismatched or (strict and (missing or unexpected)):
        raise StateMismatchError(
            "the sparse state",
            missing=missing if strict else [],
            unexpected=unexpected if strict else [],
            mismatched=mismatched,
        )
    for name in unexpected:
        log.warning("table %r of the checkpoint is not in the model; it is left out", name)
    for name in missing:
        log.warning("table %r is not in the checkpoint and keeps its present rows", name)
    return loads


def load_tables(
    loads: Sequence[TableLoad],
    parts: Sequence[Part],
    storage: Storage,
    directory: str,
    *,
    concurrency: int,
    advance: Callable[[int], object],
) -> int:
    """Replace the rows of the tables by those of the checkpoint that their slices own.

    Each table is cleared and made large enough first, then filled by several threads; there is never a
    second copy of it. Where a table has rows to lose, everything is read and checked before it is cleared.

    Args:
        loads: what to fill.
        parts: the parts of all shards that may hold their rows.
        storage: where the checkpoint lies.
        directory: the checkpoint's directory in it.
        concurrency: number of reader threads.
        advance: called with the bytes of each batch; from several threads.

    Returns:
        The number of rows loaded.

    Raises:
        CorruptCheckpointError: a file is damaged. The tables are as they were.
    """
    fillers = {load.entry.name: Filler(load) for load in loads}
    runs = list(_runs(parts, fillers))

    def check(run: _Run) -> None:
        for batch, columns, path in run.read(storage, directory, fillers):
            fillers[batch.table].check(columns, path)

    def fill(run: _Run) -> None:
        for batch, columns, path in run.read(storage, directory, fillers):
            filler = fillers[batch.table]
            filler.fill(columns, path)
            advance(batch.rows * filler.load.entry.row_bytes)

    if any(len(load.table) for load in loads):
        run_all(check, runs, concurrency)
    rows = Counter[str]()
    for run in runs:
        for number in run.numbers:
            rows[run.part.batches[number].table] += run.part.batches[number].rows
    for name, filler in fillers.items():
        filler.start(rows[name])
    try:
        run_all(fill, runs, concurrency)
    except BaseException:
        for filler in fillers.values():
            filler.undo()
        raise
    return sum(filler.n_rows for filler in fillers.values())


@dataclass(frozen=True)
class _Run:
    """Some wanted batches of one part, read by one thread."""

    part: Part
    numbers: list[int]

    def read(
        self, storage: Storage, directory: str, fillers: Mapping[str, Filler]
    ) -> Iterator[tuple[Batch, Mapping[str, pa.Array], str]]:
        """Yield (batch, checked columns, path of the file)."""
        loads = [fillers[self.part.batches[number].table].load for number in self.numbers]
        columns = frozenset[str]().union(*(load.slots for load in loads))
        reader = PartReader(storage, directory, self.part, loads[0].entry.slots, columns)
        for number in self.numbers:
            yield self.part.batches[number], reader.read(number), reader.path


def _runs(parts: Sequence[Part], fillers: Mapping[str, Filler]) -> Iterator[_Run]:
    for part in parts:
        wanted = [
            number
            for number, batch in enumerate(part.batches)
            if batch.table in fillers and fillers[batch.table].wants(batch)
        ]
        for begin in range(0, len(wanted), _RUN_BATCHES):
            yield _Run(part, wanted[begin : begin + _RUN_BATCHES])


def _report_slots(table: str, one_sided: Collection[str], live: Collection[str]) -> None:
    for slot in sorted(one_sided):
        if slot in live:
            log.warning("table %r: the checkpoint has no slot %r; it starts at its initial value", table, slot)
        else:
            log.warning("table %r: slot %r of the checkpoint is not in the model; it is left out", table, slot)


def _describe(spec: SlotSpec) -> str:
    return f"{spec.dtype} {spec.shape}"
