"""What `recckpt diff` costs beside `recckpt verify` of both checkpoints, in processor time and memory of its own.

Each checkpoint is a table of `rows` x `dim` float32 and one slot of the same size: one, the same with one row in a
hundred changed and as many added, and one with every row changed. They are written in a process of their own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from measuring import peak_mib, report, scratch

import recckpt
from recckpt.inspect.verify import verify

_PIECE = 1 << 18


def write_checkpoints(output_dir: str, rows: int, dim: int) -> None:
    """Write ``base``, ``few`` and ``all``."""
    import torch
    from torch import nn

    from recckpt import Saver
    from recckpt.sparse import Constant, HashTable

    table = HashTable(dim, name="item", initializer=Constant(0.0))
    table.add_slot("sparse_adam_exp_avg", (dim,), torch.float32)
    table.reserve(rows + rows // 100)

    def insert(ids: torch.Tensor) -> None:
        for some in torch.split(ids, _PIECE):
            table.insert(some, torch.randn(len(some), dim), {"sparse_adam_exp_avg": torch.randn(len(some), dim)})

    saver = Saver(nn.ModuleDict({"item": table}), None, output_dir, max_keep=None)
    insert(torch.randperm(rows))
    saver.save("base")
    insert(torch.cat([torch.randperm(rows)[: rows // 100], torch.arange(rows, rows + rows // 100)]))
    saver.save("few")
    insert(torch.arange(rows))
    saver.save("all")


def measure(output_dir: Path, rows: int, rounds: int) -> None:
    for other in ("few", "all"):
        diff_sec, verify_sec, mib = [], [], []
        before, after = str(output_dir / "base"), str(output_dir / other)
        for _ in range(rounds + 1):
            begin = time.process_time()
            assert not verify(before)
            assert not verify(after)
            verify_sec.append(time.process_time() - begin)
            begin = time.process_time()
            with peak_mib("RssAnon") as peak:
                found = recckpt.diff(before, after).table("item")
            diff_sec.append(time.process_time() - begin)
            mib.append(peak[0])
            assert found.changed == (rows if other == "all" else rows // 100)
        medians = statistics.median(diff_sec[1:]), statistics.median(verify_sec[1:])
        rate = sum(recckpt.CheckpointReader(path).manifest.n_bytes for path in (before, after)) / 1e9 / medians[1]
        report({"case": f"verify, base and {other}", "gb_a_processor_sec": round(rate, 2)})
        report(
            {
                "case": f"diff, {other} changed",
                "rows": rows,
                "rounds": rounds,
                "diff_processor_sec": round(medians[0], 2),
                "verify_both_processor_sec": round(medians[1], 2),
                "diff_over_verify": round(medians[0] / max(medians[1], 1e-9), 2),
                "own_memory_mib": round(max(mib)),
                "torch_imported": "torch" in sys.modules,
            }
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--write", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write_checkpoints(args.write, args.rows, args.dim)
        return
    with scratch(args.scratch) as directory:
        sizes = ["--rows", str(args.rows), "--dim", str(args.dim)]
        subprocess.run([sys.executable, __file__, "--write", str(directory / "runs"), *sizes], check=True)
        measure(directory / "runs", args.rows, args.rounds)


if __name__ == "__main__":
    main()
