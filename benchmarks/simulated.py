"""A save of many ranks without its rows: the real save on rank 0, told what the other ranks would have written.

Records come from the real shard writer, catalogs from the real encoder; parts are holes of the right size.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from recckpt.checkpoint.attempt import BATCH_BYTES, ShardWriter
from recckpt.dense.data_loaders import dump_rng
from recckpt.dense.sharded import Summary
from recckpt.format import layout
from recckpt.format.buckets import N_BUCKETS, Slice, gen_slice
from recckpt.format.catalog import Batch, Part
from recckpt.format.manifest import Manifest
from recckpt.output_dir.checkpoint_dir import Intent
from recckpt.output_dir.fence import Fence
from recckpt.parallel.process_group import Parcel, ReusedBuffer
from recckpt.parallel.ranks import Connection, Ranks
from recckpt.policies.deltas import Chain, Deltas
from recckpt.rewrite import requests
from recckpt.save.choice import Choice
from recckpt.save.decide import Owned, Proposal, Room, SavePlan
from recckpt.save.deltas import DeltaProposal, TableChanges
from recckpt.save.job import Destination, SparseSaver
from recckpt.save.job import Job as SaveJob
from recckpt.save.save import write_and_commit
from recckpt.save.save_info import SaveInfo
from recckpt.save.stage import Staged
from recckpt.save.write import RankRecord, write
from recckpt.sparse.files.part_writer import PartPlan, TableBytes, plan_parts, row_bytes
from recckpt.storage import Storage
from recckpt.storage.transfers import Transport
from recckpt.text import Progress
from recckpt.types import EMBEDDING, SlotSpec

DIMS = (8, 16, 32, 64)
MOMENTS = ("sparse_adam_exp_avg", "sparse_adam_exp_avg_sq")


@dataclass(frozen=True)
class Job:
    """What is saved.

    Attributes:
        ranks: how many save.
        tables: of the model, of four widths, with the slots of Adam.
        batches: of each table on each rank; batches that would have more than 8 MiB are more.
        n_bytes: of all rows on all ranks.
        threads: that write on each rank.
    """

    ranks: int
    tables: int = 200
    batches: int = 64
    n_bytes: int = 100 * 10**9
    threads: int = 8

    @property
    def table_bytes(self) -> int:
        """Bytes of one table on one rank."""
        return self.n_bytes // (self.ranks * self.tables)

    @property
    def batch_bytes(self) -> int:
        """The size at which a batch is full."""
        return min(BATCH_BYTES, self.table_bytes // self.batches)

    def hollow_tables(self) -> list[Any]:
        """Return the tables of one rank."""
        slots = [slots_of(DIMS[number % len(DIMS)]) for number in range(self.tables)]
        return [
            HollowTable(f"feature_{number:03d}", max(1, self.table_bytes // row_bytes(of_one)), of_one)
            for number, of_one in enumerate(slots)
        ]


def slots_of(dim: int) -> tuple[SlotSpec, ...]:
    """Return the slots of a table, which each table has for itself, as on a real rank."""
    return tuple(SlotSpec(name, "float32", (dim,)) for name in (EMBEDDING, *MOMENTS))


@dataclass(frozen=True)
class HollowTable:
    """A table of which nothing is known but its size."""

    name: str
    n_rows: int
    slots: tuple[SlotSpec, ...]
    n_kept = 0

    @property
    def n_all(self) -> int:
        """All rows, since each save is full."""
        return self.n_rows

    def close(self) -> None:
        """Do nothing."""


class HollowSaver(SparseSaver):
    """Leaves holes in place of parts, and gives the catalog what it would say of their rows."""

    def __init__(self, job: Job, url: str) -> None:
        super().__init__(job.threads, batch_bytes=job.batch_bytes)
        self._job, self._root = job, Path(url)

    def save(self, tables: Sequence[Any], shard: ShardWriter, advance: Callable[[int], object]) -> None:
        """Make the files, and say what there is to say of them."""
        rng, buckets = np.random.default_rng(shard.number), gen_slice(shard.number, shard.count)
        sizes = {table.name: _size_of(table, buckets) for table in tables}
        for plan in plan_parts(list(sizes.values()), self._job.threads, least_bytes=BATCH_BYTES):
            batches = tuple(self._batches_of(plan, sizes, rng))
            file = layout.part(shard.number, shard.count, plan.group, plan.number)
            n_bytes = _file_bytes(plan, sum(batch.rows for batch in batches), len(batches))
            _leave_hole(self._root / shard.directory / file, n_bytes)
            shard.add([Part(file, n_bytes, int(rng.integers(2**63)), tuple(plan.tables), batches)])

    def _batches_of(self, plan: PartPlan, sizes: Mapping[str, TableBytes], rng: Any) -> Iterator[Batch]:
        size, columns = row_bytes(plan.slots), ["table", "id", *(s.name for s in plan.slots)]
        rows = max(1, self._job.batch_bytes // size)
        for cut in plan.ranges:
            up_to = sizes[cut.table].up_to()
            first = int(up_to[cut.begin - 1]) // size if cut.begin else 0
            begins = range(first, int(up_to[cut.end - 1]) // size, rows)
            sums = rng.integers(2**64, size=(len(begins), len(columns)), dtype=np.uint64).tolist()
            for begin, values in zip(begins, sums, strict=True):
                end = min(begin + rows, begins.stop)
                met = np.searchsorted(up_to, [(begin + 1) * size, end * size])
                buckets, ids = (int(met[0]), int(met[1]) + 1), (-(2**63) + begin, 2**63 - end)
                yield Batch(cut.table, end - begin, buckets, ids, dict(zip(columns, values, strict=True)))


def _size_of(table: HollowTable, slice: Slice) -> TableBytes:
    """Return the size of a table whose rows are spread evenly over a slice."""
    size = row_bytes(table.slots)

    def up_to() -> Any:
        width, n_bytes = slice.end - slice.begin, np.zeros(N_BUCKETS, np.int64)
        n_bytes[slice.begin : slice.end] = np.arange(1, width + 1) * table.n_rows // width * size
        n_bytes[slice.end :] = table.n_rows * size
        return n_bytes

    return TableBytes(table.name, table.slots, table.n_rows * size, up_to)


def _file_bytes(plan: PartPlan, rows: int, n_batches: int) -> int:
    """Return about the size of an Arrow file: values, and of each batch its padding, header and place in the footer."""
    padding = n_batches * (64 * (2 + len(plan.slots)) + 600)
    return rows * row_bytes(plan.slots) + padding + 16 * len(plan.ranges) + 2000


def _leave_hole(path: Path, n_bytes: int) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("xb") as file:
        file.truncate(n_bytes)


def staged(job: Job) -> Staged:
    """Return what a rank has to write."""
    dense = {f"top.{number}.weight": torch.zeros(64, 64) for number in range(8)}
    positions = {"stream": {"epoch": 3, "position": 123_456}}
    return Staged(job.hollow_tables(), dense, {"dense_optim": {"state": {}}}, positions, dump_rng(), {"loss": 0.5})


class OneOfMany:
    """The group as rank 0 sees it: it does its own part, and the other ranks are made up.

    Args:
        job: what is saved.
        others: gives the records of the ranks from 1 on: whose directory they write into -> records.

    Attributes:
        n_bytes: of what the ranks sent each other.
    """

    rank = 0
    is_lost = is_over = False

    def __init__(self, job: Job, others: Callable[[Intent], Sequence[RankRecord]]) -> None:
        self.size, self._others = job.ranks, others
        self._intent: Intent | None = None
        self.n_bytes = 0

    def all_gather(self, value: Any) -> list[Any]:
        """Return the value of rank 0 as that of all."""
        self.n_bytes += self.size * (self.size - 1) * len(pickle.dumps(value))
        return [value] * self.size

    def gather_to_first(self, value: Any) -> list[Any]:
        """Return the value of rank 0, and the records that the others would send."""
        assert self._intent is not None
        sent = [(record, None) for record in self._others(self._intent)]
        self.n_bytes += sum(len(pickle.dumps(each)) for each in sent)
        return [value, *sent]

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0; the first that has one says where the others write."""
        self.n_bytes += (self.size - 1) * len(pickle.dumps(value))
        result = value[0] if isinstance(value, tuple) else None
        if isinstance(result, tuple) and isinstance(result[0], Intent):
            self._intent = result[0]
        return value

    def exchange(
        self, mark: int, parcels: Sequence[Parcel], into: ReusedBuffer | None = None
    ) -> tuple[list[int], list[Parcel]]:
        """Return the mark of rank 0 as that of all, and nothing else."""
        return [mark] * self.size, [np.empty(0, np.uint8)] * self.size

    def twin(self) -> OneOfMany:
        """Return itself: there is one thread."""
        return self


def proposals(job: Job) -> list[Proposal]:
    """Return what the ranks of a job that writes deltas propose, each as it arrives at rank 0."""
    tables = job.hollow_tables()
    changes = TableChanges.of(
        {table.name: (table.n_rows // 20, table.n_rows, 8 + row_bytes(table.slots), False, False) for table in tables}
    )
    room, names = Room("/runs", 1 << 60, 0, None), changes.names
    of_all = []
    for rank in range(job.ranks):
        delta = DeltaProposal(Deltas(), "5" * 32, Chain(3, 1 << 30, 1 << 34) if rank == 0 else None, changes)
        owned: Owned = {gen_slice(rank, job.ranks): names}
        own = Proposal(
            "ckpt_1",
            1,
            Choice(),
            True,
            owned=owned,
            n_bytes=1 << 24,
            room=room,
            delta=delta,
            sharded=Summary(0, 0, 0),
            io_state=("stream",),
        )
        of_all.append(pickle.loads(pickle.dumps(own)))
    return of_all


def write_shard(job: Job, rank: int, storage: Storage, intent: Intent) -> RankRecord:
    """Write what a rank writes, its rows aside, and return what it would send."""
    with Progress("", 0) as progress:
        info, ranks = SaveInfo("simulated"), Ranks(rank, job.ranks)
        one = SaveJob(info, ranks, None, overwrite=False, is_resumed=True, max_keep=None)
        return write(staged(job), intent, one, _destination(job, storage, Fence(storage)), progress)


def _destination(job: Job, storage: Storage, fence: Fence) -> Destination:
    saver = HollowSaver(job, storage.url)
    return Destination(storage, fence, Transport(), saver, 1, 0, on_save=None, changes=None, forgets=requests)


def save_as_rank_0(
    job: Job,
    storage: Storage,
    fence: Fence,
    info: SaveInfo,
    group: OneOfMany,
    max_keep: int | None,
) -> Manifest:
    """Save, as rank 0 of many."""
    ranks = Ranks(0, job.ranks, Connection(lambda: cast(Any, group)))
    one = SaveJob(info, ranks, None, overwrite=False, is_resumed=True, max_keep=max_keep)
    return write_and_commit(staged(job), SavePlan(io_state=("stream",)), one, _destination(job, storage, fence))
