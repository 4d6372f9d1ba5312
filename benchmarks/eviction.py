"""What it costs to let rows go: a skewed stream whose ids drift, with and without a capacity, and a tenth of a table.

Prints one JSON line a case. The steps of the contestants alternate, and times are those of the processor, so that other
work on the machine disturbs little. At the sizes of the default, half an hour and 8 GiB: a table without eviction keeps
every id. In the long run it adds fewer rows than one with a capacity, to which ids come back that it let go. So a third
one, without eviction, gets a new id in place of each that the evicting one has no row of: it adds as many rows at each
step. TorchRec's ZCH takes part in look-ups where it can be imported.

    python benchmarks/eviction.py --look-ups 100000000 --capacity 1000000
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib import import_module
from statistics import median
from typing import Any

import numpy as np
import torch
from machine import describe_machine
from measuring import report
from torch import Tensor

from recckpt.policies.evict import Capacity, Unseen
from recckpt.sparse import Constant, HashTable, SparseSGD

DIM = 8
NEW = 0.02  # of the ids of a batch that were never seen before: how fast the stream drifts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--look-ups", type=int, default=100_000_000)
    parser.add_argument("--capacity", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=16_384)
    parser.add_argument("--every", type=int, default=200, help="steps in which all rows are looked at once")
    parser.add_argument("--rows", type=int, default=4_000_000, help="of which a tenth is evicted")
    parser.add_argument("--budget-ms", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    machine = describe_machine()
    report({"case": "stream", **stream(args), "machine": machine})
    report({"case": "a tenth", **a_tenth(args), "machine": machine})
    report({"case": "look-ups beside ZCH", **beside_zch(args), "machine": machine})


def batch_of(step: int, args: argparse.Namespace) -> Tensor:
    """Return ids of which the newest are asked for most, and which move on by some new ones a step."""
    draw = np.random.default_rng(step)
    newest = (step + 1) * max(1, int(args.batch * NEW)) + args.capacity
    back = np.exp(draw.random(args.batch) * np.log(4 * args.capacity)).astype(np.int64)
    return torch.from_numpy((newest - back) * 2_654_435_761)  # anywhere among the int64


def n_steps(args: argparse.Namespace) -> int:
    return max(40, int(args.look_ups) // int(args.batch))


def stream(args: argparse.Namespace) -> dict[str, Any]:
    """Train a table with a capacity and one without by the same batches, and one that adds as many rows."""
    evict = {"evict": Capacity(args.capacity, room=0.2), "evict_every": args.every}
    kinds: dict[str, dict[str, Any]] = {"evicting": evict, "growing": {}, "growing_as_fast": {}}
    tables = {kind: made(kind, **options) for kind, options in kinds.items()}
    optims = {kind: SparseSGD([table], lr=0.1) for kind, table in tables.items()}
    seconds: dict[str, list[float]] = {kind: [] for kind in tables}
    rows, n_bytes = [], []
    for step in range(n_steps(args)):
        ids = batch_of(step, args)
        batches = {"growing_as_fast": with_new(ids, tables["evicting"].lookup(ids)[1], step, args)}
        for kind, table in tables.items():
            batch = batches.get(kind, ids)
            begin = time.process_time()
            table.step = step
            table(batch).sum().backward()
            optims[kind].step()
            seconds[kind].append(time.process_time() - begin)
        rows.append(len(tables["evicting"]))
        n_bytes.append(tables["evicting"].nbytes)
    settled = slice(n_steps(args) // 2, None)
    medians = {kind: median(some[settled]) for kind, some in seconds.items()}
    slowest = {kind: float(np.quantile(some[settled], 0.99)) for kind, some in seconds.items()}
    return {
        "look_ups": n_steps(args) * args.batch,
        "capacity": args.capacity,
        "evict_every": args.every,
        "most_rows": max(rows),
        "rows_of_the_others": [len(tables["growing"]), len(tables["growing_as_fast"])],
        "n_evicted": tables["evicting"].n_evicted,
        "memory_max_over_min": round(max(n_bytes[settled]) / min(n_bytes[settled]), 3),
        "rows_max_over_min": round(max(rows[settled]) / min(rows[settled]), 3),
        "median_ms": {kind: round(1e3 * value, 3) for kind, value in medians.items()},
        "p99_ms": {kind: round(1e3 * value, 3) for kind, value in slowest.items()},
        "median_over_growing": round(medians["evicting"] / medians["growing"], 3),
        "p99_over_growing": round(slowest["evicting"] / slowest["growing"], 3),
        "median_over_growing_as_fast": round(medians["evicting"] / medians["growing_as_fast"], 3),
    }


def with_new(ids: Tensor, is_there: Tensor, step: int, args: argparse.Namespace) -> Tensor:
    """Return a batch with an id that was never seen in place of each that is not there; equal ones stay equal."""
    different, groups = np.unique(ids[~is_there].numpy(), return_inverse=True)
    fresh = -1 - (step * int(args.batch) + np.arange(len(different)))
    out = ids.clone()
    out[~is_there] = torch.from_numpy((fresh * 2_654_435_761)[groups])
    return out


def made(name: str, **options: Any) -> HashTable:
    return HashTable(DIM, name=name, initializer=Constant(0), track="step", **options)


def filled(args: argparse.Namespace, **options: Any) -> HashTable:
    """Return a table of which every tenth id was seen at step 0 last, and all others just now."""
    table = made("filled", **options)
    table.reserve(args.rows)
    ids = torch.arange(args.rows) * 2_654_435_761
    is_old = torch.arange(args.rows) % 10 == 0
    steps = torch.where(is_old, 0, 10_000)
    for part in torch.split(torch.arange(args.rows), 1 << 18):
        table.insert(ids[part], torch.zeros(len(part), DIM), {"last_step": steps[part]})
    return table


def a_tenth(args: argparse.Namespace) -> dict[str, Any]:
    """Evict a tenth of the rows at once, and in parts, of which each is to take no longer than the budget."""
    at_once, in_parts, longest = [], [], []
    every = max(1, int(300 / args.budget_ms))
    for _ in range(args.rounds):
        table = filled(args)
        table.step = 10_001
        begin = time.process_time()
        n_evicted = table.evict(Unseen(steps=5_000))
        at_once.append(time.process_time() - begin)
        assert n_evicted == -(-args.rows // 10)
        table = filled(args, evict=Unseen(steps=5_000), evict_every=every)
        table.step, nothing = 10_001, torch.empty(0, dtype=torch.int64)
        parts = []
        with torch.no_grad():
            for step in range(10_001, 10_001 + every):
                table.step = step
                begin = time.process_time()
                table(nothing)
                parts.append(time.process_time() - begin)
        assert table.n_evicted == n_evicted
        in_parts.append(sum(parts))
        longest.append(max(parts))
    return {
        "rows": args.rows,
        "evicted": n_evicted,
        "at_once_ms": round(1e3 * median(at_once), 1),
        "in_parts_ms": round(1e3 * median(in_parts), 1),
        "parts": every,
        "longest_part_ms": round(1e3 * median(longest), 2),
        "budget_ms": args.budget_ms,
    }


def beside_zch(args: argparse.Namespace) -> dict[str, Any]:
    """Look the stream up, without training: where the rows of a full table make room for new ones."""
    look_ups: dict[str, Callable[[int, Tensor], object]] = {}
    table = made("t", evict=Capacity(args.capacity, room=0.2), evict_every=args.every)

    def look_up(step: int, ids: Tensor) -> None:
        table.step = step
        table(ids)

    look_ups["recckpt"] = look_up
    zch = zch_look_up(args)
    if zch is not None:
        look_ups["torchrec_zch_lru"] = zch
    seconds: dict[str, list[float]] = {name: [] for name in look_ups}
    steps = min(n_steps(args), 400)
    with torch.no_grad():
        for step in range(steps):
            ids = batch_of(step, args)
            for name, one in look_ups.items():
                begin = time.process_time()
                one(step, ids)
                seconds[name].append(time.process_time() - begin)
    half = steps // 2
    return {
        "batch": args.batch,
        "mean_ms": {name: round(1e3 * float(np.mean(some[half:])), 3) for name, some in seconds.items()},
        "p99_ms": {name: round(1e3 * float(np.quantile(some[half:], 0.99)), 3) for name, some in seconds.items()},
        "absent": [] if zch else ["torchrec is not installed"],
    }


def zch_look_up(args: argparse.Namespace) -> Callable[[int, Tensor], object] | None:
    """Return what TorchRec does: ids to places of a fixed table, by when they were seen last; None without it."""
    try:
        torchrec, modules = import_module("torchrec"), import_module("torchrec.modules.mc_modules")
    except ImportError:
        return None
    places = modules.MCHManagedCollisionModule(
        zch_size=args.capacity,
        device=torch.device("cpu"),
        eviction_policy=modules.LRU_EvictionPolicy(),
        eviction_interval=args.every,
        input_hash_size=2**62,
    )
    rows = torch.nn.Embedding(args.capacity, DIM)

    def look_up(step: int, ids: Tensor) -> object:
        features = {"f": torchrec.JaggedTensor(values=ids, lengths=torch.ones(len(ids), dtype=torch.int64))}
        features = places.profile(features)
        return rows(places.remap(features)["f"].values())

    return look_up


if __name__ == "__main__":
    main()
