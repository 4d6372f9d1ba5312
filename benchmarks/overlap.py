"""What it costs readers where the buckets of shards overlap: with ranges of ids that are disjoint, and with others.

The same rows are written three times, by as many shards: each shard a slice of the buckets; each a range of ids, as
tables that are written as they lie; and each every so many ids, whose ranges overlap, so that readers compare the ids
of shards. Each measure is taken in turn of the three, and told as a ratio to that of the slices.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from measuring import report, scratch, timed

from recckpt import CheckpointReader
from recckpt.checkpoint.attempt import Attempt, with_shards
from recckpt.format.buckets import gen_slice
from recckpt.format.manifest import Manifest
from recckpt.format.tables import TableEntry
from recckpt.inspect.verify import verify
from recckpt.output_dir.fence import Fence
from recckpt.save.job import SparseSaver
from recckpt.sparse import Constant, HashTable
from recckpt.sparse.files.part_reader import PartReader
from recckpt.sparse.files.table_rows import source_of
from recckpt.storage import open_storage

Ids = npt.NDArray[np.int64]


def shards_of(kind: str, rows: int, count: int) -> Iterator[Ids]:
    """Yield the ids of each shard."""
    ids = np.arange(rows)
    for number in range(count):
        if kind == "slices":
            yield ids[gen_slice(number, count).owns(ids)]
        elif kind == "ranges":
            yield ids[rows * number // count : rows * (number + 1) // count]
        else:
            yield ids[number::count]


def write(output_dir: Path, shards: Iterator[Ids], count: int, dim: int) -> None:
    """Commit a checkpoint of one table, whose rows are their ids."""
    storage = open_storage(str(output_dir))
    storage.prepare()
    fence, records, n_rows = Fence(storage), [], 0
    attempt = Attempt.begin(storage, fence, "ckpt_1", step=None, overwrite=False)
    for number, ids in enumerate(shards):
        table = HashTable(dim, name="item", initializer=Constant(0.0))
        for some in torch.split(torch.from_numpy(ids.copy()), 1 << 20):
            table.insert(some, some.float().view(-1, 1).expand(-1, dim).contiguous())
        source, shard = source_of(table), attempt.shard(number, count)
        SparseSaver(1).save([source], shard, lambda n_bytes: None)
        records.append(shard.record())
        n_rows += source.n_rows
        slots = source.slots
    epoch, seq = attempt.intent.epoch, attempt.seq
    head = Manifest(
        (),
        (TableEntry("item", n_rows, slots),),
        (),
        ckpt_id="ckpt_1",
        save_id=attempt.save_id,
        seq=seq,
        time="",
        epoch=epoch,
    )
    attempt.commit(fence, with_shards(head, records))


def read_all(path: Path) -> None:
    """Read all rows."""
    with CheckpointReader(path) as reader:
        for batch in reader.table("item"):
            del batch


def parts_of_look_up(path: Path, ids: list[int]) -> int:
    """Return how many parts are opened for the rows of some ids."""
    opened, real = list[str](), PartReader.__init__

    def noting(self: PartReader, storage: Any, directory: str, part: Any, *args: Any, **options: Any) -> None:
        opened.append(part.file)
        real(self, storage, directory, part, *args, **options)

    PartReader.__init__ = noting  # type: ignore[method-assign]  # no hook says which parts are opened
    try:
        get(path, ids)
    finally:
        PartReader.__init__ = real  # type: ignore[method-assign]  # as it was
    return len(opened)


def get(path: Path, ids: list[int]) -> None:
    """Read the rows of some ids, once."""
    with CheckpointReader(path) as reader:
        assert sum(batch.num_rows for batch in reader.table("item", ids=ids)) == len(ids)


def measure(root: Path, rows: int, dim: int, count: int, rounds: int) -> None:
    kinds = ("slices", "ranges", "strides")
    for kind in kinds:
        write(root / kind, shards_of(kind, rows, count), count, dim)
    measures: dict[str, Callable[[Path], Any]] = {
        "all_rows": read_all,
        "verify": lambda path: verify(str(path), threads=1),
        "get": lambda path: get(path, [rows // 2]),
    }
    for name, work in measures.items():
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(rounds + 1):
            for kind in kinds:
                seconds[kind].append(timed(partial(work, root / kind)))
        median = {kind: statistics.median(of_kind[1:]) for kind, of_kind in seconds.items()}
        report(
            {
                "case": f"overlap, {name}",
                "rows": rows,
                "shards": count,
                "slices_ms": round(1000 * median["slices"], 2),
                "ranges_to_slices": round(median["ranges"] / median["slices"], 2),
                "strides_to_slices": round(median["strides"] / median["slices"], 2),
            }
        )
    opened = {kind: parts_of_look_up(root / kind, [rows // 2]) for kind in kinds}
    report({"case": "overlap, parts opened by a get", "shards": count, **opened})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--shards", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    with scratch(args.scratch) as directory:
        measure(directory, args.rows, args.dim, args.shards, args.rounds)


if __name__ == "__main__":
    main()
