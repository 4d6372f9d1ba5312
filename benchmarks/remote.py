"""Saves to and loads from a slow object store, straight and by way of this host; one JSON line a case.

The store is moto's server behind a proxy that makes each request take longer by a latency and by its bytes over a
bandwidth, on each connection.

    python benchmarks/remote.py --rows 500000 --latency-ms 0 20 100 --mb-per-s 50 --rounds 3
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.config import conf
from machine import describe_machine
from measuring import report, scratch, timed
from remote_server import SlowServer
from torch import nn

from recckpt import Saver
from recckpt.policies import Transfers
from recckpt.save.stage import Staged
from recckpt.sparse import HashTable

DIM = 64
_STEP_ROWS = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency-ms", type=int, nargs="+", default=[0, 20, 100])
    parser.add_argument("--mb-per-s", type=int, default=50, help="of each connection; 0 for no limit")
    parser.add_argument("--tables", type=int, nargs="+", default=[1, 200], help="that share the rows, of a load")
    parser.add_argument("--work-dir", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    report({"case": "machine", **describe_machine()})
    for latency_ms in args.latency_ms:
        with SlowServer(latency_ms, args.mb_per_s) as server, scratch(args.work_dir) as work_dir:
            conf["s3"] = {"endpoint_url": f"http://127.0.0.1:{server.port}", "key": "any", "secret": "any"}
            fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bench")
            line = {"latency_ms": latency_ms, "mb_per_s": args.mb_per_s, "rows": args.rows, "rounds": args.rounds}
            compare_saves(args.rows, args.rounds, work_dir, line)
            for n_tables in args.tables:
                compare_loads(n_tables, args.rows, args.rounds, work_dir, server, line)


def table_of(rows: int, name: str = "t") -> HashTable:
    table = HashTable(DIM, name=name)
    if rows:
        table.insert(torch.arange(rows), torch.rand(rows, DIM))
    return table


def compare_saves(rows: int, rounds: int, work_dir: Path, line: dict[str, Any]) -> None:
    """How long a save in the background keeps the old values of rows, and what that costs training."""
    table = table_of(rows)
    model = nn.ModuleDict({"t": table})
    savers = {
        "plain": Saver(model, output_dir="s3://bench/runs"),
        "work_dir": Saver(model, output_dir="s3://bench/staged", transfers=Transfers(work_dir=work_dir)),
    }
    found: dict[str, list[dict[str, float]]] = {peer: [] for peer in savers}
    for number in range(rounds + 1):
        for peer, saver in savers.items():
            measured = save_beside_training(saver, table, f"c{number}")
            if number:  # the first compiles and imports
                found[peer].append(measured)
    medians = {
        peer: {key: round(statistics.median(one[key] for one in rounds_of), 2) for key in rounds_of[0]}
        for peer, rounds_of in found.items()
    }
    report({"case": "save", **line, **medians})


def save_beside_training(saver: Saver, table: HashTable, ckpt_id: str) -> dict[str, float]:
    released, close = list[float](), Staged.close

    def noted_close(staged: Staged) -> None:
        close(staged)
        released.append(time.perf_counter())

    Staged.close = noted_close  # type: ignore[assignment,method-assign]  # no hook says when a save lets tables go
    try:
        begin = time.perf_counter()
        handle = saver.save_async(ckpt_id)
        while not handle.done():
            table.insert(torch.randint(0, len(table), (_STEP_ROWS,)), torch.rand(_STEP_ROWS, DIM))
            time.sleep(0.02)  # what else a step does
        handle.wait()
        commit_sec = time.perf_counter() - begin
    finally:
        Staged.close = close  # type: ignore[method-assign]  # as it was
    mib = handle.info.kept_rows * DIM * 4 / 2**20
    return {"held_sec": released[0] - begin, "commit_sec": commit_sec, "mib_aside": mib}


def compare_loads(
    n_tables: int, rows: int, rounds: int, work_dir: Path, server: SlowServer, line: dict[str, Any]
) -> None:
    """Seconds and requests of a load into empty tables."""
    url = f"s3://bench/tables-{n_tables}"
    Saver(model_of(n_tables, rows), output_dir=url).save("c")
    seconds: dict[str, list[float]] = {"plain": [], "pre_download": []}
    requests: dict[str, int] = {}
    for number in range(rounds + 1):
        for peer, times in seconds.items():
            empty = model_of(n_tables, 0)
            saver = Saver(
                empty, output_dir=url, transfers=Transfers(work_dir=work_dir, pre_download=peer == "pre_download")
            )
            server.requests()
            took = timed(saver.load)
            requests[peer] = server.requests()
            if number:
                times.append(took)
    medians = {f"{peer}_sec": round(statistics.median(times), 2) for peer, times in seconds.items()}
    mib = round(rows * (DIM * 4 + 8) / 2**20)
    report({"case": "load", "tables": n_tables, **line, "mib": mib, **medians, "requests": requests})


def model_of(n_tables: int, rows: int) -> nn.Module:
    return nn.ModuleList([table_of(rows // n_tables, f"t{number}") for number in range(n_tables)])


if __name__ == "__main__":
    main()
