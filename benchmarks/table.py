"""The hashtable: index insert and look-up, a training step against torch and with counters, memory while it grows.

Prints one JSON line a case. Rounds alternate between the contestants and the medians are compared, since the speed of a
shared machine drifts. About a minute.

    python benchmarks/table.py --ids 4000000 --steps 40
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from machine import describe_machine
from torch import Tensor, nn

from recckpt.policies.admit import Bloom, MinCount
from recckpt.sparse.optim import SparseAdam
from recckpt.sparse.table.id_index import IdIndex
from recckpt.sparse.table.initializers import Normal
from recckpt.sparse.table.table import HashTable
from recckpt.sparse.table.tracker import Tracker

BATCH_IDS = 65_536
FEATURES, BATCH, DIM, VOCABULARY = 4, 8_192, 32, 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=int, default=4_000_000)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--grow", type=int, help=argparse.SUPPRESS)  # a table of so many rows, in a process of its own
    args = parser.parse_args()
    if args.grow:
        print(json.dumps(grow(args.grow)))
        return
    machine = describe_machine()
    cases: dict[str, Callable[[], dict[str, object]]] = {
        "index_speed": lambda: index_speed(args.ids),
        "training_step": lambda: training_step(args.steps),
        "tracking": lambda: tracking(args.steps),
        "growth_memory": lambda: growth_memory(args.ids),
    }
    for case, figures in cases.items():
        print(json.dumps({"case": case, **figures(), "machine": machine}), flush=True)


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def index_speed(n_ids: int, rounds: int = 7) -> dict[str, object]:
    """Million ids a second on one core, in batches as a training loop brings them."""
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, n_ids)
    batches = [ids[i : i + BATCH_IDS] for i in range(0, n_ids, BATCH_IDS)]

    def insert(index: IdIndex) -> None:
        for batch in batches:
            index.find_or_add(batch)

    times: dict[str, list[float]] = {"insert_growing": [], "insert_presized": [], "look_up": []}
    for _ in range(rounds + 1):
        growing, presized = IdIndex(), IdIndex()
        times["insert_growing"].append(seconds(lambda: insert(growing)))  # noqa: B023  # called at once
        presized.reserve(n_ids)
        times["insert_presized"].append(seconds(lambda: insert(presized)))  # noqa: B023
        times["look_up"].append(seconds(lambda: [presized.find(batch) for batch in batches]))  # noqa: B023
    rates = {name: round(n_ids / median(taken[1:]) / 1e6, 1) for name, taken in times.items()}
    return {"ids": n_ids, "unit": "M ids/s", **rates, "target": {"insert": 10, "look_up": 15}}


def training_step(rounds: int, warm_up: int = 20) -> dict[str, object]:
    """Milliseconds of forward, backward, step and zero_grad over all features, on the same Zipf ids.

    Marked are tables that keep the marks for deltas, with a save under way, which keeps them twice.
    """
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    tables, marked = (
        [HashTable(DIM, name=f"f{i}", initializer=Normal(0, 0.01)) for i in range(FEATURES)] for _ in "ab"
    )
    modules = [nn.Embedding(VOCABULARY, DIM, sparse=True) for _ in range(FEATURES)]
    weights = torch.randn(FEATURES * DIM)
    ours, marking, tracker = SparseAdam(tables), SparseAdam(marked), Tracker()
    for table in marked:
        tracker.begin(table, "base")
        tracker.freeze(table).snapshot.close()
    theirs = torch.optim.SparseAdam([p for module in modules for p in module.parameters()])

    times: dict[str, list[float]] = {"recckpt": [], "marked": [], "torch": []}
    for _ in range(rounds + warm_up):
        ids = torch.from_numpy(zipf_ids(rng, (FEATURES, BATCH)))
        times["recckpt"].append(seconds(lambda: train(tables, ours, ids, weights)))  # noqa: B023
        times["marked"].append(seconds(lambda: train(marked, marking, ids, weights)))  # noqa: B023
        times["torch"].append(seconds(lambda: train(modules, theirs, ids, weights)))  # noqa: B023
    taken = {name: round(median(values[warm_up:]) * 1e3, 2) for name, values in times.items()}
    return {
        "unit": "ms",
        **taken,
        "ratio": round(taken["recckpt"] / taken["torch"], 3),
        "marks": round(taken["marked"] / taken["recckpt"], 3),
        "target": {"ratio": 1, "marks": 1.02},
    }


def train(
    layers: list[HashTable] | list[nn.Embedding], optimizer: torch.optim.Optimizer, ids: Tensor, weights: Tensor
) -> None:
    features = torch.cat([layer(column) for layer, column in zip(layers, ids, strict=True)], 1)
    loss = torch.sigmoid(features @ weights).mean()
    loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
    optimizer.step()
    optimizer.zero_grad()


def tracking(rounds: int, warm_up: int = 20) -> dict[str, object]:
    """Milliseconds of processor time of such a step, and medians of the ratio to one that neither tracks nor admits."""
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        **{name: {"track": name} for name in ("count", "step", "time")},
        "all": {"track": ("count", "step", "time")},
        "admit": {"admit": MinCount(2)},
        "bloom": {"admit": MinCount(2, Bloom(10_000_000, 0.01))},
    }
    runs: dict[str, tuple[list[HashTable], SparseAdam]] = {}
    for name, given in options.items():
        tables = [HashTable(DIM, name=f"f{i}", initializer=Normal(0, 0.01), **given) for i in range(FEATURES)]
        runs[name] = tables, SparseAdam(tables)
    rng, weights = np.random.default_rng(0), torch.randn(FEATURES * DIM)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + warm_up):
        ids = torch.from_numpy(zipf_ids(rng, (FEATURES, BATCH)))
        for name in rng.permutation(list(runs)):
            start = time.process_time()
            train(*runs[name], ids, weights)
            times[name].append(time.process_time() - start)
    taken = {name: np.array(values[warm_up:]) for name, values in times.items()}
    ratios = {name: round(float(np.median(values / taken["plain"])), 3) for name, values in taken.items()}
    return {"unit": "ms", "plain": round(float(np.median(taken["plain"])) * 1e3, 2), "ratios": ratios, "target": 1.03}


def zipf_ids(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    return rng.zipf(1.1, shape) % VOCABULARY


def growth_memory(n_ids: int) -> dict[str, object]:
    """Peak resident memory of a process that grows a table of rows of 64 float32, over what the rows need."""
    command = [sys.executable, __file__, "--grow", str(n_ids)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, object] = json.loads(result.stdout)
    return {**found, "target": {"ratio": 1.25}}


def grow(n_ids: int) -> dict[str, object]:
    """Grow the table in batches and return the peak (in the child of ``growth_memory``)."""
    table = HashTable(64, name="grown")
    with torch.no_grad():
        table(torch.arange(BATCH_IDS))  # compiled code and the buffers of a batch belong to the baseline
        table.clear()
        before = peak_bytes()
        start = time.perf_counter()
        for first in range(0, n_ids, BATCH_IDS):
            table(torch.arange(first, min(first + BATCH_IDS, n_ids)))
        taken = time.perf_counter() - start
    grown = peak_bytes() - before
    return {
        "rows": len(table),
        "table_mib": table.nbytes >> 20,
        "peak_mib": grown >> 20,
        "ratio": round(grown / table.nbytes, 3),
        "seconds": round(taken, 2),
    }


def peak_bytes() -> int:
    """Return the peak resident memory of this process, which unlike ru_maxrss knows nothing of its parent."""
    with open("/proc/self/status") as status:  # noqa: PTH123
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


if __name__ == "__main__":
    main()
