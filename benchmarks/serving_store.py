"""Seconds from a training step to a row that a key-value server answers with; a server of Redis's protocol is started.

    python benchmarks/serving_store.py --rows 1000000 --changed 0.01

A process changes rows and saves deltas in the background, and a thread of it follows the run by the store of
``examples/serve_store.py``. A round begins when the step that is saved is over, and ends when a row of it comes back
from the server; each has its parts: until the save was committed, and until the store had it.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from machine import describe_machine
from measuring import report, scratch
from torch import nn

import recckpt
from recckpt import Deltas, Saver
from recckpt.sparse import HashTable

sys.path.append(str(Path(__file__).parent.parent / "examples"))
DIM = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--changed", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--root", type=Path, default=Path())
    args = parser.parse_args()
    report({"case": "machine", **describe_machine()})
    if shutil.which("redis-server") is None:
        report({"case": "serving store", "skipped": "redis-server is not installed"})
        return
    with scratch(args.root) as directory, server() as url:
        measure(directory / "run", url, args.rows, max(1, int(args.rows * args.changed)), args.rounds)


@contextmanager
def server() -> Iterator[str]:
    """Start a server on the loopback interface, which keeps nothing, and yield its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


def measure(run: Path, url: str, rows: int, n_changed: int, rounds: int) -> None:
    from serve_store import RowStore

    table = HashTable(DIM, name="item")
    table.insert(torch.arange(rows), torch.zeros(rows, DIM))
    deltas = Deltas(full_every=999, max_chain_bytes=1e9)
    with Saver(nn.ModuleDict({"item": table}), output_dir=str(run), deltas=deltas) as saver:
        saver.save("ckpt_0", step=0)
        store = RowStore(url)
        begin = time.perf_counter()
        all_rows = follow(run, store, -1)
        first = time.perf_counter() - begin
        parts: dict[str, list[float]] = {"committed": [], "applied": [], "served": []}
        for step in range(1, rounds + 1):
            ids = torch.randperm(rows)[:n_changed]
            table.insert(ids, torch.full((n_changed, DIM), float(step)))
            begin, applied = time.perf_counter(), list[int]()
            thread = threading.Thread(
                target=lambda at=step, to=applied: to.append(follow(run, store, at - 1)), daemon=True
            )
            thread.start()
            saver.save_async(f"ckpt_{step}", step=step).wait()
            parts["committed"].append(time.perf_counter() - begin)
            thread.join()
            parts["applied"].append(time.perf_counter() - begin)
            values, _ = store.look_up("item", [int(ids[0])], DIM)
            parts["served"].append(time.perf_counter() - begin)
            assert (values == step).all()
            assert applied == [n_changed]
    medians = {f"{name}_sec": round(statistics.median(each), 3) for name, each in parts.items()}
    report({"case": "serving store", "rows": rows, "changed": n_changed, "first_sec": round(first, 2), **medians})
    assert all_rows == rows


def follow(run: Path, store: object, after: int) -> int:
    """Apply the next checkpoint of a run, and return how many rows were written."""
    checkpoint = next(iter(recckpt.follow(run, after=after, every_sec=0.05)))
    n_rows: int = store.apply(checkpoint)  # type: ignore[attr-defined]  # of an example
    return n_rows


if __name__ == "__main__":
    main()
