"""A benchmark of checkpoints of recommenders: pause, bytes, seconds and lost steps, of each way to save in turn.

    python benchmarks/recsys.py --rows 1000000 --width 64 --slots 1 --zipf 1.05 --changed 0.01 --failures-per-day 4

A table of ``--rows`` x ``--width`` float32 with ``--slots`` slots as wide is trained on ids by Zipf until a share of
its rows has changed; then one of the ways saves it, while training goes on where it may. docs/benchmark.md says what
each parameter and each figure means. What is not installed is skipped, and a line says so.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import statistics
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from measuring import report, scratch, timed, touch_memory, warm
from recsys_peers import OPTIMIZERS, WAYS, Workload, lacking
from useful_time import DAY

from recckpt.policies.schedule import best_interval, lost_share

_QUIET_STEPS = 20  # at least, before each save


@dataclass
class Measured:
    """What was measured of one way, a value a round."""

    pause_sec: list[float] = field(default_factory=list)
    cpu_sec: list[float] = field(default_factory=list)
    save_sec: list[float] = field(default_factory=list)
    training_lost_sec: list[float] = field(default_factory=list)
    restore_sec: list[float] = field(default_factory=list)
    restore_cpu_sec: list[float] = field(default_factory=list)
    n_bytes: list[float] = field(default_factory=list)
    changed: list[float] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        """Return the median of each."""
        return {name: statistics.median(values) for name, values in vars(self).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=64, help="float32 values of a row")
    parser.add_argument("--slots", type=int, default=1, choices=range(len(OPTIMIZERS)), help="of the optimizer")
    parser.add_argument("--zipf", type=float, default=1.05, help="exponent of the ids")
    parser.add_argument(
        "--changed", type=float, default=0.01, help="the share of the rows that changes from save to save"
    )
    parser.add_argument("--failures-per-day", type=float, default=4.0)
    parser.add_argument("--samples", type=int, default=256, help="of a step, of 8 ids each")
    parser.add_argument("--threads", type=int, help="of the training; torch's own default where it is not given")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--root", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    report({"case": "machine", "training_threads": torch.get_num_threads(), **describe_machine()})
    ways = [way for way in options.ways if lacking(way) is None]
    for way in options.ways:
        if (package := lacking(way)) is not None:
            report({"case": "recsys", "way": way, "SKIPPED": f"{package} is not installed here"})
    work = Workload(options.rows, options.width, options.slots, options.zipf, options.samples)
    found, step_sec = {way: Measured() for way in ways}, list[float]()
    for number in range(options.rounds):
        for way in ways if number % 2 else reversed(ways):
            with scratch(options.root) as directory:
                step_sec.append(measure(work, way, directory, options.changed, found[way]))
    describe(options, work, found, statistics.median(step_sec))


def measure(work: Workload, name: str, directory: Path, share: float, into: Measured) -> float:
    """Train until so many rows have changed, save, with training meanwhile, and restore; return seconds of a step."""
    way = WAYS[name](work, directory / "runs")
    way.prepare()
    n_bytes = 4 * work.width * (1 + work.slots) * work.rows
    warm(directory, n_bytes, sync=False)
    work.begin_to_count()
    quiet = list[float]()
    while work.changed < share or len(quiet) < _QUIET_STEPS:
        quiet.append(timed(work.step))
    into.changed.append(work.changed)
    there, cpu, begin = set(files_in(directory)), time.process_time(), time.perf_counter()
    future = way.save()
    pause, trained_cpu = time.perf_counter() - begin, time.thread_time()
    ended = list[float]()
    future.add_done_callback(lambda _: ended.append(time.perf_counter()))
    busy = list[float]()
    while not future.done():
        busy.append(timed(work.step))
    future.result()
    into.cpu_sec.append(time.process_time() - cpu - (time.thread_time() - trained_cpu))
    into.n_bytes.append(sum(path.stat().st_size for path in files_in(directory) if path not in there))
    into.pause_sec.append(pause)
    into.save_sec.append(ended[0] - begin)
    into.training_lost_sec.append(pause + max(0.0, sum(busy) - len(busy) * statistics.mean(quiet)))
    fill = way.restore()
    touch_memory(n_bytes)
    cpu = time.process_time()
    into.restore_sec.append(timed(fill))
    into.restore_cpu_sec.append(time.process_time() - cpu)
    del fill
    way.close()
    del way
    gc.collect()
    return statistics.median(quiet)


def files_in(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def describe(options: argparse.Namespace, work: Workload, found: dict[str, Measured], step_sec: float) -> None:
    """Report each way, by medians."""
    row_bytes = 8 + 4 * work.width * (1 + work.slots)
    for name, measured in found.items():
        medians = measured.medians()
        report(
            {
                "case": "recsys",
                "way": name,
                "rows": work.rows,
                "width": work.width,
                "slots": work.slots,
                "zipf": work.zipf,
                "changed": round(medians["changed"], 4),
                "failures_per_day": options.failures_per_day,
                "rounds": options.rounds,
                "gb": round(work.rows * row_bytes / 1e9, 3),
                "step_ms": round(1e3 * step_sec, 1),
                "pause_ms": round(1e3 * medians["pause_sec"], 1),
                "save_sec": round(medians["save_sec"], 3),
                "training_lost_sec": round(medians["training_lost_sec"], 3),
                "mb": round(medians["n_bytes"] / 1e6, 2),
                "save_cpu_sec": round(medians["cpu_sec"], 3),
                "restore_sec": round(medians["restore_sec"], 3),
                "restore_cpu_sec": round(medians["restore_cpu_sec"], 3),
                **at_best(medians, options.failures_per_day, step_sec),
                "load": round(os.getloadavg()[0], 1),
            }
        )


def at_best(medians: dict[str, float], failures_per_day: float, step_sec: float) -> dict[str, Any]:
    """Return how often it pays to save, the mean of the steps lost a failure then, and the share of the time lost."""
    failure_sec, cost = DAY / failures_per_day, medians["training_lost_sec"]
    late = max(0.0, medians["save_sec"] - medians["pause_sec"])  # trained beside the save, and lost with it
    every = max(medians["save_sec"], best_interval(cost, failure_sec))
    lost = lost_share(every, cost, late, failure_sec) + medians["restore_sec"] / failure_sec
    return {
        "best_interval_sec": round(every, 1),
        "steps_lost_a_failure": round((every / 2 + late) / step_sec),
        "time_lost_percent": round(100 * min(1.0, lost), 3),
    }


if __name__ == "__main__":
    main()
