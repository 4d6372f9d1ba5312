"""What checking costs a query of a full checkpoint: checked against ``--unchecked``, both in the same run.

The table has `rows` x `dim` float32 and a counter. A query is run by a new connection, which checks what it reads; once
more by the same one, which has checked it by then; without checks; and as a command, with and without ``--unchecked``.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from measuring import report, scratch, timed

import recckpt

_PIECE = 1 << 18
_QUERIES = {
    "a counter": "select max(count) from item",
    "all values": "select avg(list_sum(embedding)) from item",
    "one value of each row": "select sum(embedding[1]) from item",
    "some rows": "select max(embedding[1]) from item where count > 1 and id < 1000",
}


def write_checkpoint(output_dir: str, rows: int, dim: int) -> None:
    """Write a full checkpoint of one table."""
    import torch
    from torch import nn

    from recckpt import Saver
    from recckpt.sparse import Constant, HashTable

    table = HashTable(dim, name="item", initializer=Constant(0.0), track=("count",))
    table.reserve(rows)
    for ids in torch.split(torch.randperm(rows), _PIECE):
        table.insert(ids, torch.randn(len(ids), dim))
    Saver(nn.ModuleDict({"item": table}), None, output_dir).save("base")


def measure(path: str, case: str, query: str, rows: int, rounds: int) -> None:
    seconds: dict[str, list[float]] = {}

    def note(side: str, work: Callable[[], object]) -> None:
        seconds.setdefault(side, []).append(timed(work))

    command = [sys.executable, "-m", "recckpt", "sql", path, query]
    for _ in range(rounds + 1):
        for side, checked in (("unchecked", False), ("checked", True)):
            with recckpt.inspect.connect(path, checked=checked) as connection:
                note(side, connection.sql(query).fetchall)
                if checked:
                    note("checked_again", connection.sql(query).fetchall)
        note("command_unchecked", lambda: subprocess.run([*command, "--unchecked"], check=True, capture_output=True))
        note("command", lambda: subprocess.run(command, check=True, capture_output=True))
    medians = {side: statistics.median(values[1:]) for side, values in seconds.items()}
    report(
        {
            "case": f"sql, {case}",
            "rows": rows,
            "rounds": rounds,
            "median_sec": {side: round(median, 4) for side, median in medians.items()},
            "best_sec": {side: round(min(values[1:]), 4) for side, values in seconds.items()},
            "checked_over_unchecked": round(medians["checked"] / medians["unchecked"], 2),
            "again_over_unchecked": round(medians["checked_again"] / medians["unchecked"], 2),
            "command_over_unchecked": round(medians["command"] / medians["command_unchecked"], 2),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--write", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write_checkpoint(args.write, args.rows, args.dim)
        return
    with scratch(args.scratch) as directory:
        sizes = ["--rows", str(args.rows), "--dim", str(args.dim)]
        subprocess.run([sys.executable, __file__, "--write", str(directory / "runs"), *sizes], check=True)
        for case, query in _QUERIES.items():
            measure(str(directory / "runs"), case, query, args.rows, args.rounds)


if __name__ == "__main__":
    main()
