"""How long looking up a thousand ids takes in the table of a checkpoint, without torch, after the first look-up.

The checkpoint is written in a process of its own. Beside it, in turn: numpy, which searches the same ids in a sorted
array in memory and takes the rows of a matrix in memory.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from measuring import report, scratch

from recckpt import CheckpointReader


def write_table(output_dir: str, rows: int, dim: int) -> None:
    """Write a checkpoint with one table; the ids are a permutation of 0 to rows - 1, the rows are their ids."""
    import torch
    from torch import nn

    from recckpt import Saver
    from recckpt.sparse import Constant, HashTable

    table = HashTable(dim, name="item", initializer=Constant(0.0))
    table.reserve(rows)
    ids = torch.randperm(rows)
    for some in torch.split(ids, 1 << 20):
        table.insert(some, some.float().view(-1, 1).expand(-1, dim).contiguous())
    Saver(nn.ModuleDict({"item": table}), None, output_dir).save("ckpt_1")


def measure(output_dir: Path, rows: int, dim: int, n_ids: int, rounds: int) -> None:
    reader, draw = CheckpointReader(output_dir), np.random.default_rng(0)
    seconds, processor, peer = [], [], []
    known, matrix = np.arange(rows), np.zeros((rows, dim), np.float32)
    for _ in range(rounds + 1):
        ids = draw.integers(0, rows, n_ids)
        begin, used = time.perf_counter(), time.process_time()
        values, found = reader.lookup("item", ids)
        seconds.append(time.perf_counter() - begin)
        processor.append(time.process_time() - used)
        assert found.all()
        assert (values == ids[:, None].astype(np.float32)).all()
        begin = time.perf_counter()
        assert matrix[np.searchsorted(known, ids)].shape == values.shape
        peer.append(time.perf_counter() - begin)
    ms = [round(1000 * value, 2) for value in processor[1:]]
    report(
        {
            "case": "look-up",
            "rows": rows,
            "ids": n_ids,
            "first_sec": round(seconds[0], 2),
            "second_ms": round(1000 * seconds[1], 2),
            "median_ms": round(1000 * statistics.median(seconds[1:]), 2),
            "median_processor_ms": statistics.median(ms),
            "worst_ms": round(1000 * max(seconds[1:]), 2),
            "numpy_in_memory_median_ms": round(1000 * statistics.median(peer[1:]), 2),
            "torch_imported": "torch" in sys.modules,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--ids", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--write", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write_table(args.write, args.rows, args.dim)
        return
    with scratch(args.scratch) as directory:
        sizes = ["--rows", str(args.rows), "--dim", str(args.dim)]
        subprocess.run([sys.executable, __file__, "--write", str(directory / "runs"), *sizes], check=True)
        measure(directory / "runs", args.rows, args.dim, args.ids, args.rounds)


if __name__ == "__main__":
    main()
