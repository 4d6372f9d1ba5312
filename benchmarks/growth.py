"""What a row costs in tables of different size: to save, to save as a delta, to load, to look up; one JSON line a size.

    python benchmarks/growth.py --rows 1000000 4000000 16000000 --root .
    python benchmarks/growth.py --cases tables dense links takeovers kept    # what grows beside rows

Rows of 16 float32 and a slot of as many, in a process of its own for each size. Files are written without fsync. A
delta holds the same number of rows whatever the size. Each line has its figures over those of the size ``--over``, and
names those past the goal; not by the clock, which says little where a disk makes writers wait for it.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from growth_cases import CASES, report_growth
from machine import describe_machine
from measuring import report, scratch, status_mib
from peers import unsynced
from torch import nn

from recckpt import Deltas, Saver
from recckpt.sparse import HashTable

DIM = 16
INSERTED = 100_000  # rows at a time
LOOKED_UP, LOOK_UPS = 65_536, 16
ONLY_DELTAS = Deltas(full_every=999, max_chain_bytes=999.0)
GOAL = 1.3
Seconds = tuple[float, float]  # of the processor, of the clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 4_000_000, 16_000_000])
    parser.add_argument("--cases", nargs="+", choices=("rows", *CASES), default=["rows", *CASES])
    parser.add_argument("--most", type=int, default=10_000, help="tables, parameters, links ... at most")
    parser.add_argument("--over", type=int, default=4_000_000, help="the size that the others are compared to")
    parser.add_argument("--changed", type=int, default=100_000, help="rows of a delta")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--root", type=Path, default=Path())
    parser.add_argument("--of", type=int, help=argparse.SUPPRESS)  # one size, in a process of its own
    args = parser.parse_args()
    if args.of:
        print(json.dumps(figures(args.of, args.changed, args.rounds, args.root)))
        return
    report({"case": "machine", **describe_machine()})
    for case in (case for case in args.cases if case in CASES):
        report_growth(case, args.most)
    if "rows" in args.cases:
        report_rows(args)


def report_rows(args: argparse.Namespace) -> None:
    base = in_a_process(args.over, args)
    for rows in args.rows:
        found = base if rows == args.over else in_a_process(rows, args)
        ratios = {name: round(value / base[name], 2) for name, value in found.items() if base[name]}
        over = [name for name, ratio in ratios.items() if ratio > GOAL and "clock" not in name]
        report({"case": "growth", "rows": rows, "changed": args.changed, **found, "ratios": ratios, "past_goal": over})


def in_a_process(rows: int, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--of", str(rows), "--changed", str(args.changed)]
    command += ["--rounds", str(args.rounds), "--root", str(args.root)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(result.stdout)
    return found


def figures(rows: int, n_changed: int, rounds: int, root: Path) -> dict[str, float]:
    """Return nanoseconds a row, by the processor and the clock; the pause in milliseconds; memory in MiB."""
    with scratch(root) as directory, unsynced():
        saved = Saves(rows, n_changed, rounds, directory)
        gc.collect()  # the table
        loads = [timed(lambda: load(directory / "full", rows)) for _ in range(rounds + 1)]
    counted = {
        "full": (saved.full, rows),
        "delta": (saved.delta, n_changed),
        "load": (loads, rows),
        "look_up": (saved.look_up, LOOKED_UP * LOOK_UPS),
    }
    found: dict[str, float] = {}
    for name, (seconds, n_rows) in counted.items():
        for suffix, values in zip(("ns", "clock_ns"), zip(*seconds[1:], strict=True), strict=True):
            found[f"{name}_{suffix}"] = round(median(values) / n_rows * 1e9, 1)
    found["pause_ms"] = round(median(saved.pauses[1:]) * 1e3, 2)
    found["beyond_mib"] = round(max(saved.beyond_mib), 1)
    return found


class Saves:
    """A table that is looked into, saved, changed and saved again; the first round compiles and touches buffers."""

    def __init__(self, rows: int, n_changed: int, rounds: int, directory: Path) -> None:
        self.full: list[Seconds] = []
        self.delta: list[Seconds] = []
        self.look_up: list[Seconds] = []
        self.pauses: list[float] = []
        self.beyond_mib: list[float] = []
        with Saver(table_of(INSERTED)[0], output_dir=str(directory / "small"), deltas=ONLY_DELTAS) as small:
            small.save("ckpt_0")  # what compiling and imports take is not of the table
        model, table = table_of(rows)
        with (
            Saver(model, output_dir=str(directory / "full"), max_keep=1) as full,
            Saver(model, output_dir=str(directory / "deltas"), max_keep=1, deltas=ONLY_DELTAS) as deltas,
        ):
            with growth_of_memory(self.beyond_mib):
                deltas.save("ckpt_0")
            for number in range(rounds + 1):
                self.look_up.append(timed(lambda: look_up(table, rows)))
                with growth_of_memory(self.beyond_mib):
                    self.full.append(timed(lambda: full.save(f"blocking_{number}")))  # noqa: B023  # called at once
                handle = full.save_async(f"background_{number}")
                self.pauses.append(handle.info.blocked_sec)
                handle.wait()
                change(table, rows, n_changed, number)
                self.delta.append(timed(lambda: deltas.save(f"ckpt_{number + 1}")))  # noqa: B023
        shutil.rmtree(directory / "deltas")


def timed(work: Callable[[], Any]) -> Seconds:
    """Return seconds of the processor in all threads, and of the clock."""
    cpu, clock = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - clock


@contextmanager
def growth_of_memory(found: list[float]) -> Iterator[None]:
    """Add to a list by how many MiB the memory of this process grew at most within the block."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = status_mib("VmRSS")
    yield
    found.append(status_mib("VmHWM") - before)


def table_of(rows: int) -> tuple[nn.Module, HashTable]:
    """Return a model of one table, empty where ``rows`` is 0, with an initial value in each row."""
    table = HashTable(DIM, name="item")
    table.add_slot("moment", (DIM,))
    table.reserve(rows)
    values = torch.rand(INSERTED, DIM)
    for first in range(0, rows, INSERTED):
        ids = torch.arange(first, min(rows, first + INSERTED))
        table.insert(ids, values[: len(ids)], {"moment": values[: len(ids)]})
    return nn.ModuleDict({"item": table}), table


def look_up(table: HashTable, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(LOOK_UPS):
            table(torch.randint(rows, (LOOKED_UP,), generator=generator))


def change(table: HashTable, rows: int, n_changed: int, number: int) -> None:
    """Change rows that lie anywhere."""
    ids = (torch.arange(n_changed) * rows // n_changed + number) % rows
    values = torch.rand(n_changed, DIM)
    table.insert(ids, values, {"moment": values})


def load(directory: Path, rows: int) -> None:
    model, table = table_of(0)
    with Saver(model, output_dir=str(directory)) as saver:
        saver.load()
    assert len(table) == rows


if __name__ == "__main__":
    main()
