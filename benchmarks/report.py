"""What `recckpt report` costs beside `recckpt verify` of the same output dir, in time and memory of its own.

The checkpoints are a table of `rows` x `dim` float32 with two slots of the same size and counts of look-ups: a full
one, and a delta on it of one row in a hundred. They are written in a process of their own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from measuring import peak_mib, report, scratch, timed

import recckpt
from recckpt.inspect.verify import verify

_PIECE = 1 << 18


def write_checkpoint(output_dir: str, rows: int, dim: int, *, with_delta: bool) -> None:
    """Write ``full`` and, where it is wanted, ``delta``."""
    import torch
    from torch import nn

    from recckpt import Saver
    from recckpt.sparse import HashTable

    table = HashTable(dim, name="item", track=("count",))
    for slot in ("sparse_adam_exp_avg", "sparse_adam_exp_avg_sq"):
        table.add_slot(slot, (dim,), torch.float32)
    table.reserve(rows)

    def insert(ids: torch.Tensor) -> None:
        for some in torch.split(ids, _PIECE):
            values = [torch.randn(len(some), dim) for _ in range(3)]
            slots = dict(zip(("sparse_adam_exp_avg", "sparse_adam_exp_avg_sq"), values[1:], strict=True))
            table.insert(some, values[0], {**slots, "count": torch.randint(1, 1000, (len(some),))})

    saver = Saver(nn.ModuleDict({"item": table}), None, output_dir, max_keep=None, deltas=with_delta)
    insert(torch.randperm(rows))
    saver.save("full")
    if with_delta:
        insert(torch.randperm(rows)[: max(1, rows // 100)])
        saver.save("delta")


def measure(case: str, output_dir: str, rows: int, rounds: int) -> None:
    seconds: dict[str, list[float]] = {"report": [], "verify": []}
    processor: dict[str, list[float]] = {"report": [], "verify": []}
    mib = []

    def look() -> None:
        found = recckpt.report(output_dir)
        assert found.is_healthy
        assert found.table("item").rows_read == rows

    def check() -> None:
        assert not verify(output_dir)

    for _ in range(rounds + 1):  # the first of them warms up
        for name, work in (("verify", check), ("report", look)):
            begin = time.process_time()
            with peak_mib("RssAnon") as peak:
                seconds[name].append(timed(work))
            processor[name].append(time.process_time() - begin)
        mib.append(peak[0])
    medians = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    used = {name: statistics.median(each[1:]) for name, each in processor.items()}
    report(
        {
            "case": case,
            "rows": rows,
            "rounds": rounds,
            "median_sec": {name: round(value, 2) for name, value in medians.items()},
            "report_over_verify": round(medians["report"] / max(medians["verify"], 1e-9), 2),
            "report_over_verify_processor": round(used["report"] / max(used["verify"], 1e-9), 2),
            "own_memory_mib": round(max(mib)),
            "torch_imported": "torch" in sys.modules,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--write", help=argparse.SUPPRESS)
    parser.add_argument("--delta", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write_checkpoint(args.write, args.rows, args.dim, with_delta=args.delta)
        return
    sizes = ["--rows", str(args.rows), "--dim", str(args.dim)]
    for case, options in (("report, a full checkpoint", []), ("report, a chain", ["--delta"])):
        with scratch(args.scratch) as directory:
            command = [sys.executable, __file__, "--write", str(directory / "runs"), *sizes, *options]
            subprocess.run(command, check=True)
            measure(case, str(directory / "runs"), args.rows, args.rounds)


if __name__ == "__main__":
    main()
