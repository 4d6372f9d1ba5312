"""Saving with two ranks against one with two writers, two ways to dense state, and what ranks read; a JSON line a case.

The ranks are processes of this machine, under gloo. Rounds alternate, so that both meet the same noise. ``restore``
counts what 1 to 8 ranks read of parts, over what there is, where as many ranks as ``--saved-by`` says have saved.

    python benchmarks/ranks.py --rows 1000000 --rounds 5 --root /dev/shm
    python benchmarks/ranks.py --cases restore --rows 400000 --saved-by 1 3
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import describe_machine
from measuring import on_ranks, report, scratch, warm
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.load.report import LoadReport
from recckpt.sparse import HashTable, Slice, SparseAdam, gen_slice
from recckpt.storage import open_storage

DIM = 32
RANKS = 2
MOST_RANKS = 8
CASES = ("save", "dense", "restore")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dense-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--root", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--saved-by", type=int, nargs="*", default=[1, 3], help="ranks that save for the case restore")
    parser.add_argument(
        "--cases", nargs="*", choices=["save", "dense", "restore"], default=["save", "dense", "restore"]
    )
    parser.add_argument("--rank", nargs=3, metavar=("RANK", "OF", "PORT"), type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank, size, port = args.rank
        be_rank(rank, size, port, args)
        return
    report({"case": "machine", **describe_machine()})
    with scratch(args.root) as root:
        options = ["--rows", args.rows, "--dense-mib", args.dense_mib, "--rounds", args.rounds, "--root", root]
        on_ranks(__file__, RANKS, [*options, "--cases", *(case for case in args.cases if case != "restore")])
        for saved_by in args.saved_by if "restore" in args.cases else ():
            for size in (saved_by, *range(1, MOST_RANKS + 1)):
                on_ranks(__file__, size, [*options, "--cases", "restore", "--saved-by", saved_by])


def be_rank(rank: int, size: int, port: int, args: argparse.Namespace) -> None:
    """Take part in the cases, and end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    if "save" in args.cases:
        compare_saves(rank, args)
    if "dense" in args.cases:
        compare_dense(rank, args)
    if "restore" in args.cases:
        count_reads(rank, size, args)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a thread of torch may still release tensors of the last gather: an interpreter that ends aborts there


def count_reads(rank: int, size: int, args: argparse.Namespace) -> None:
    """Save, where nothing is saved yet; else restore, and report what the ranks have read of what there is."""
    [saved_by] = args.saved_by
    url = args.root / f"saved-by-{saved_by}"
    own = gen_slice(rank, size)
    if not url.exists():
        dist.barrier()
        filled = saver_of(args.rows, own, url, concurrency=1)
        dist.barrier()
        filled.save("ckpt_1", step=1)
        return
    table = HashTable(DIM, name="t", slice=own)
    saver = Saver(nn.ModuleDict({"t": table}), SparseAdam([table]), str(url), concurrency=1)
    manager = CheckpointManager(saver, 1)
    reports: list[LoadReport] = []
    seconds = taken_by(lambda: reports.append(manager.load_model_bank([])))
    of_ranks: list[Any] = [None] * size
    dist.all_gather_object(of_ranks, (reports[0].bytes_read, len(table)))
    if rank == 0:
        stored = sum(path.stat().st_size for path in url.rglob("*.arrow"))
        n_bytes = [each for each, _ in of_ranks]
        report(
            {
                "case": "restore",
                "saved_by": saved_by,
                "ranks": size,
                "rows": sum(n_rows for _, n_rows in of_ranks),
                "stored": stored,
                "read_over_stored": round(sum(n_bytes) / stored, 3),
                "most_over_mean": round(max(n_bytes) * size / sum(n_bytes), 3),
                "sec": round(seconds, 3),
            }
        )


def compare_saves(rank: int, args: argparse.Namespace) -> None:
    half = saver_of(args.rows, gen_slice(rank, RANKS), args.root / "two", concurrency=1)
    whole = saver_of(args.rows, None, args.root / "one", concurrency=2) if rank == 0 else None
    n_bytes = args.rows * (8 + 4 * DIM * 3)
    seconds: dict[str, list[float]] = {"1 rank, 2 writers": [], "2 ranks, 1 writer each": []}

    def alone() -> None:
        if whole is not None:
            whole.save("c", 0, 1, overwrite=True)

    def together() -> None:
        half.save("c", overwrite=True)

    for number in range(args.rounds + 1):
        for name, work in zip(seconds, (alone, together), strict=True):
            if rank == 0:
                warm(args.root, n_bytes, sync=False)
            took = taken_by(work)
            if number:  # the first round compiles
                seconds[name].append(took)
    if rank == 0:
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        one, two = medians.values()
        report(
            {
                "case": "save",
                "rows": args.rows,
                "gb": round(n_bytes / 1e9, 3),
                "median_sec": {name: round(value, 3) for name, value in medians.items()},
                "two_ranks_over_one": round(two / one, 2),
                "all_sec": {name: [round(value, 3) for value in values] for name, values in seconds.items()},
            }
        )


def compare_dense(rank: int, args: argparse.Namespace) -> None:
    """Read the dense state on every rank, against reading it on rank 0 and sending it to the others."""
    from recckpt.dense.loader import load_state
    from recckpt.output_dir.listing import newest

    url = str(args.root / "dense")
    layers = {f"w{number}": nn.Linear(1024, 1024, bias=False) for number in range(args.dense_mib // 4)}
    if rank == 0:
        Saver(nn.ModuleDict(layers), output_dir=url).save("c", 0, 1)
    dist.barrier()
    storage = open_storage(url)
    checkpoint = newest(storage)
    entry = checkpoint.manifest.file("model.pt")
    assert entry is not None

    def read() -> dict[str, Any]:
        return load_state(storage, checkpoint.directory, entry)

    def send() -> None:
        found = read() if rank == 0 else {f"{name}.weight": torch.empty(1024, 1024) for name in layers}
        for tensor in found.values():
            dist.broadcast(tensor, src=0)

    seconds: dict[str, list[float]] = {"all ranks read": [], "rank 0 reads and sends": []}
    for _ in range(args.rounds):
        for name, work in zip(seconds, (read, send), strict=True):
            seconds[name].append(taken_by(work))
    if rank == 0:
        medians = {name: round(statistics.median(values), 3) for name, values in seconds.items()}
        report({"case": "dense", "mib": args.dense_mib, "median_sec": medians})


def saver_of(n_rows: int, own: Slice | None, url: Path, *, concurrency: int) -> Saver:
    """Return a saver of a table that is filled."""
    table = HashTable(DIM, name="t", slice=own)
    optim = SparseAdam([table])
    shutil.rmtree(url, ignore_errors=True)
    for begin in range(0, n_rows, 1 << 17):
        ids = torch.arange(begin, min(n_rows, begin + (1 << 17)))
        ids = ids if own is None else ids[own.owns(ids)]
        table.insert(ids, torch.randn(len(ids), DIM))
    return Saver(nn.ModuleDict({"t": table}), optim, str(url), concurrency=concurrency)


def taken_by(work: Callable[[], object]) -> float:
    """Return the seconds until all ranks are through. Collective."""
    dist.barrier()
    begin = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
