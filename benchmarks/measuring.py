"""How the benchmarks measure: scratch space, warm memory, medians, one JSON line a case."""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

CHUNK = bytes(8 << 20)


def report(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


@contextmanager
def scratch(root: Path) -> Iterator[Path]:
    directory = root.absolute() / f"recckpt-bench-{os.getpid()}"
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def timed(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - begin
    del result
    return seconds


def warm(directory: Path, n_bytes: int, sync: bool) -> None:
    """Write and unlink a file of the size that comes next."""
    path = directory / "warm"
    with path.open("wb", buffering=0) as file:
        for _ in range(-(-n_bytes // len(CHUNK))):
            file.write(CHUNK)
        if sync:
            os.fsync(file.fileno())
    path.unlink()


def touch_memory(n_bytes: int) -> None:
    """Touch and free as much memory as comes next."""
    np.ones(n_bytes, np.uint8)


def status_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


@contextmanager
def peak_mib(field: str) -> Iterator[list[float]]:
    """Yield a list whose one item is, at the end of the block, by how much a figure of this process grew at most."""
    before, peak, is_over = status_mib(field), [0.0], threading.Event()

    def look() -> None:
        while not is_over.wait(0.005):
            peak[0] = max(peak[0], status_mib(field) - before)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        is_over.set()
        thread.join()


def report_peers(case: str, rows: int, n_bytes: int, seconds: dict[str, list[float]], **more: Any) -> None:
    """Report medians, and the ratio of each peer's median to ours: above 1, ours is faster."""
    medians = {peer: statistics.median(values) for peer, values in seconds.items()}
    first = next(iter(medians.values()))
    report(
        {
            "case": case,
            "rows": rows,
            "gb": round(n_bytes / 1e9, 3),
            "rounds": min(len(values) for values in seconds.values()),
            "median_gb_per_s": {peer: round(n_bytes / 1e9 / median, 2) for peer, median in medians.items()},
            "time_over_first": {peer: round(median / first, 2) for peer, median in medians.items()},
            "all_sec": {peer: [round(value, 2) for value in values] for peer, values in seconds.items()},
            **more,
        }
    )


def on_ranks(script: str, size: int, options: Sequence[object]) -> None:
    """Run a benchmark as ``size`` ranks, each with ``--rank RANK SIZE PORT`` behind the options."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, *map(str, [script, *options, "--rank", rank, size, port])], env=environment)
        for rank in range(size)
    ]
    try:
        codes = [rank.wait() for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes}")
