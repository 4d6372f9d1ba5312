"""Takes the state that a save writes. All of it is checked first, so a state that cannot be saved writes nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from recckpt.dense.data_loaders import dump_rng
from recckpt.dense.optimizers import lineage_of
from recckpt.dense.sharded import ShardedState, ShardedTensors
from recckpt.dense.state_copy import Copy, DenseBuffers, RankDigest, as_it_is, portable, without_values
from recckpt.format.layout import SPARSE_LR, SPARSE_OPTIM
from recckpt.format.manifest import StateValue, Training
from recckpt.format.tables import ClockDates, LiveLayout
from recckpt.format.tensor_index import NUMPY_DTYPES
from recckpt.live.attached import AttachedTable
from recckpt.live.boxes import layout_of
from recckpt.live.tables import RowOptimizers, row_optimizers
from recckpt.parallel.ranks import Meetings
from recckpt.save.arguments import as_state_values
from recckpt.save.choice import Choice, slots_of_table
from recckpt.save.deltas import FULL, Kind
from recckpt.save.job import Live
from recckpt.sparse.files.reduced_rows import ReducedSource, TableChoice
from recckpt.sparse.files.table_rows import RowsInParts, TableSource, source_to_save
from recckpt.sparse.table.marks import FrozenRows
from recckpt.sparse.table.snapshot import Snapshot
from recckpt.sparse.table.store import is_stored
from recckpt.sparse.table.table import HashTable
from recckpt.sparse.table.tracker import Freeze
from recckpt.types import SavableTable


@dataclass(frozen=True)
class Staged:
    tables: list[TableSource]  # rows that this rank writes
    dense: dict[str, Any]  # tensor name -> tensor; written by rank 0, empty elsewhere
    extra: dict[str, Any]  # registered name -> state; written by rank 0, empty elsewhere
    io_state: dict[str, Any]  # registered name -> state of this shard
    rng: dict[str, Any]  # generator -> state of this rank
    state: Mapping[str, StateValue]  # values for readers without torch
    sharded: ShardedState = field(default_factory=ShardedState)  # this rank's shards of sharded tensors
    own_extra: dict[str, Any] = field(default_factory=dict)  # registered name -> state of this rank
    digest: RankDigest | None = None  # compared with the digests of other ranks; None with one rank
    frozen: dict[str, FrozenRows] = field(default_factory=dict)  # table -> marks of its changed rows
    kind: Kind = FULL  # full save or delta
    choices: dict[str, TableChoice] = field(default_factory=dict)  # table not saved whole -> its choice
    training: Training = field(default_factory=Training)  # the optimizers, and what is trained but not saved
    n_evicted: int = 0  # rows that our tables have evicted so far
    evicted_to: dict[str, int | None] = field(default_factory=dict)  # our table -> step up to which it has evicted
    clock: dict[str, ClockDates | None] = field(default_factory=dict)  # our table -> range of its rows' dates
    live: list[tuple[AttachedTable, Snapshot]] = field(default_factory=list)  # live tables and their snapshots
    layouts: dict[str, LiveLayout] = field(default_factory=dict)  # live table -> its layout
    # Function that joins rows split over ranks -> the sources it joins.
    joins: Mapping[Callable[[Sequence[Any], Meetings], None], list[RowsInParts]] = field(default_factory=dict)

    @property
    def sparse_bytes(self) -> int:
        return sum(t.n_rows * (8 + sum(slot.row_bytes for slot in t.slots)) for t in self.tables)

    def take_tables(
        self, tables: Mapping[str, SavableTable], freeze: Freeze | None, choice: Choice, *, detached: bool
    ) -> None:
        """Take the rows as they are now; with ``freeze``, also take the marks of changed rows in our tables."""
        for table in tables.values():
            if isinstance(table, AttachedTable):
                table.prepare()
            with table.store.lock if is_stored(table) else nullcontext():  # slots and rows of the same moment
                chosen = None
                if not choice.is_everything:
                    chosen = choice.of_table(table).of(table.name, slots_of_table(table))
                slots = None if chosen is None else chosen.read
                if isinstance(table, HashTable):
                    self.evicted_to[table.name] = table.eviction.evicted_to(table.store)
                    self.clock[table.name] = table.tracking.clock_dates
                if freeze is not None and is_stored(table):
                    self.frozen[table.name] = freeze(table, slots)
                    self.tables.append(self.frozen[table.name].snapshot)
                else:
                    self.tables.append(source_to_save(table, slots, detached=detached))
            if isinstance(table, AttachedTable):
                self._take_live(table)
            if chosen is not None:
                self.choices[table.name] = chosen

    def _take_live(self, table: AttachedTable) -> None:
        """Note the layout of a live table whose rows were just taken."""
        rows, box = self.tables[-1], table.rows.box
        assert isinstance(rows, Snapshot)
        self.live.append((table, rows))
        if self.digest is not None and box.n_replicas > 1 and box.rows[0] < box.rows[1]:
            self.digest.note_rows(table.name, box.rows[0], table.live.tensors(), audit=table.rows.audit or 0)
        self.layouts[table.name] = layout_of(table.live.n_rows, rows.slots, box)
        self.tables[-1] = table.source(rows)

    def check_live(self) -> None:
        """Check that the rows read from live tables are the staged rows.

        Raises LiveTableError if some code has changed a live table since staging without announcing the change.
        """
        for table, snapshot in self.live:
            table.look()
            snapshot.check()

    def written_as(self, kind: Kind) -> Staged:
        """Return the state to write. For a delta, keep only changed rows, and release the other rows."""
        sources = [self._source(table, kind) for table in self.tables]
        chosen = [(source, self.choices.get(source.name)) for source in sources]
        joins = defaultdict[Callable[[Sequence[Any], Meetings], None], list[RowsInParts]](list)
        for source in sources:
            if isinstance(source, RowsInParts):
                joins[source.join].append(source)
        return replace(
            self,
            kind=kind,
            tables=[source if choice is None else ReducedSource(source, choice) for source, choice in chosen],
            joins=joins,
        )

    def _source(self, table: TableSource, kind: Kind) -> TableSource:
        if kind.base is None or table.name in kind.replaced:
            return table
        frozen, chosen = self.frozen[table.name], self.choices.get(table.name)
        if isinstance(table, RowsInParts):
            return table.since(partial(frozen.changed_since, kind.base))
        is_filtered = chosen is not None and chosen.where is not None  # then all rows are counted first
        return frozen.delta(kind.base, narrows=not is_filtered)

    def release(self) -> None:
        """Release the tables: training no longer has to copy rows aside for them."""
        for table in self.tables:
            table.close()

    def committed(self, save_id: str) -> None:
        for frozen in self.frozen.values():
            frozen.committed(save_id)

    def close(self) -> None:
        """Release the tables; unless :meth:`committed` was called, the next delta has these changes too."""
        self.release()
        for frozen in self.frozen.values():
            frozen.failed()


def stage(
    live: Live,
    tables: Mapping[str, SavableTable],
    dense: Mapping[str, Any],
    *,
    state: Mapping[str, StateValue] | None,
    buffers: DenseBuffers | None,
    rank: int,
    digest: RankDigest | None,
    freeze: Freeze | None,
) -> Staged:
    """Take the state of a model, its optimizers and registered objects. Our tables are taken as constant snapshots.

    Dense tensors are copied to ``buffers``; None if nothing changes before all is written. Each rank checks the state
    that all ranks share; rank 0 takes it, and ``digest`` compares it (None if there is one rank). ``freeze`` takes our
    tables with their marks of changed rows; None saves whole tables. ``state`` is for readers without torch.

    Raises:
        ValueError, TypeError: some state could not be loaded back safely.
        StateMismatchError: a foreign table does not fit the protocol, or has an id twice.
    """
    optim = row_optimizers(live.sparse_optim, live.live_tables)
    groups = () if optim is None else optim.param_groups
    rates = as_state_values({f"{SPARSE_LR}{i}": float(group["lr"]) for i, group in enumerate(groups)})
    values = {**rates, **as_state_values(state)}
    sharded = ShardedTensors()
    dense = sharded.take_from_model(dense)
    with buffers.copying() if buffers else nullcontext(as_it_is) as copy:
        copy_common = copy if rank == 0 else without_values
        common = _common(live, optim, dense, sharded, digest.noting(copy_common) if digest else copy_common)
        own_extra = live.extra.dump(sharded.from_extra(copy), of_ranks=True)
        tensors, extras = common if rank == 0 else ({}, {})
        registered = live.extra.objects.items()
        classes = {name: lineage_of(obj) for name, obj in registered if isinstance(obj, Optimizer)}
        unsaved = live.trainers.unsaved(tables, {**extras, **own_extra}, is_logged=rank == 0)
        staged = Staged(
            tables=[],
            dense=tensors,
            extra=extras,
            io_state=live.io_state.dump(copy),
            rng=dump_rng(),
            state=values,
            own_extra=own_extra,
            sharded=sharded.staged(copy),  # after all objects that may hold sharded tensors
            digest=digest,
            training=Training(classes, unsaved),
            n_evicted=sum(table.n_evicted for table in tables.values() if isinstance(table, HashTable)),
        )
    staged.take_tables(tables, freeze, live.choice, detached=buffers is not None)
    return staged


def _common(
    live: Live,
    optim: Optimizer | RowOptimizers | None,
    dense: Mapping[str, Any],
    sharded: ShardedTensors,
    copy: Copy,
) -> tuple[dict[str, Any], dict[str, Any]]:
    extras = live.extra.dump(sharded.from_extra(copy))
    if optim is not None:
        extras[SPARSE_OPTIM] = portable("the sparse optimizer", copy(("sparse optimizer",), optim.state_dict()))
    for name, value in dense.items():
        if isinstance(value, Tensor) and str(value.dtype).removeprefix("torch.") not in NUMPY_DTYPES:
            raise ValueError(f"{name}: a tensor of {value.dtype} cannot be saved; cast it")
    return {name: portable(name, copy(("dense", name), value)) for name, value in dense.items()}, extras
