"""Save and load one large table, side by side with what else there is; one JSON line a case.

Every peer gets the same bytes as plain tensors and is told to sync or not to, as recckpt is. Rounds alternate between
the peers, and before each measured run a file of the same size is written and unlinked: memory that a virtual machine
touches for the first time is far slower than memory it reuses, and would otherwise be what is measured.

    python benchmarks/save_load.py --rows 4000000 --tmpfs /dev/shm --disk . --rounds 5
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from machine import describe_machine
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from recckpt import Saver
from recckpt.sparse import HashTable

DIM = 64
THREADS = 2
CHUNK_BYTES = 8 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--disk", type=Path, default=Path())
    parser.add_argument("--cases", nargs="*", default=["save", "disk", "load", "tables", "memory"])
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)  # one row count, in a process of its own
    args = parser.parse_args()
    if args.memory_of:
        print(json.dumps(memory_beyond_the_table(args.memory_of, args.tmpfs)))
        return
    report({"case": "machine", **describe_machine()})
    cases: dict[str, Callable[[], None]] = {
        "save": lambda: compare_saves("save, tmpfs, no fsync", args.tmpfs, args.rows, args.rounds, sync=False),
        "disk": lambda: compare_saves("save, disk, fsync", args.disk, args.rows, args.rounds, sync=True),
        "load": lambda: compare_loads(args.tmpfs, args.rows, args.rounds),
        "tables": lambda: compare_table_counts(args.tmpfs, args.rounds),
        "memory": lambda: compare_memory(args.tmpfs),
    }
    for case in args.cases:
        cases[case]()


def report(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


# --- the state and the peers ---------------------------------------------------------------------


class State:
    """The same rows as a table and as plain tensors."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
        self.tensors: dict[str, Tensor] = {
            "ids": ids,
            "embedding": torch.rand(rows, DIM, generator=generator),
            "moment": torch.rand(rows, DIM, generator=generator),
        }
        self.model = model_of(fill=self.tensors)
        self.n_bytes = sum(tensor.nbytes for tensor in self.tensors.values())


def model_of(fill: dict[str, Tensor] | None = None) -> nn.Module:
    table = HashTable(DIM, name="item")
    table.add_slot("moment", (DIM,))
    if fill:
        table.reserve(len(fill["ids"]))
        for part in torch.arange(len(fill["ids"])).split(100_000):
            table.insert(fill["ids"][part], fill["embedding"][part], {"moment": fill["moment"][part]})
    return nn.ModuleDict({"item": table})


def save_recckpt(state: State, directory: Path, sync: bool) -> None:
    saver = SAVERS.setdefault(id(state), Saver(state.model, output_dir=str(directory.parent)))
    with unsynced() if not sync else mock.MagicMock():
        saver.save(directory.name, overwrite=True)


def save_torch(state: State, directory: Path, sync: bool) -> None:
    torch.save(state.tensors, directory / "model.pt")
    sync_tree(directory, sync)


def save_dcp(state: State, directory: Path, sync: bool) -> None:
    writer = dcp.FileSystemWriter(directory, thread_count=THREADS, single_file_per_rank=False, sync_files=sync)
    dcp.save(state.tensors, storage_writer=writer, no_dist=True)


def save_safetensors(state: State, directory: Path, sync: bool) -> None:
    save_file(state.tensors, directory / "model.safetensors")
    sync_tree(directory, sync)


def save_limit(state: State, directory: Path, sync: bool) -> None:
    """Plain writes of as many bytes, from as many threads as there are cores here."""
    block = memoryview(np.ones(CHUNK_BYTES, np.uint8))

    def write(number: int) -> None:
        fd, left = os.open(directory / str(number), os.O_CREAT | os.O_WRONLY), state.n_bytes // THREADS
        while left:
            left -= os.write(fd, block[: min(left, CHUNK_BYTES)])
        if sync:
            os.fsync(fd)
        os.close(fd)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


SAVERS: dict[int, Saver] = {}
PEERS: dict[str, Callable[[State, Path, bool], None]] = {
    "recckpt": save_recckpt,
    "torch.save": save_torch,
    "dcp": save_dcp,
    "safetensors": save_safetensors,
    "limit": save_limit,
}


@contextmanager
def unsynced() -> Iterator[None]:
    """Leave out every fsync, as the peers do by themselves."""
    with mock.patch("os.fsync", lambda fd: None):
        yield


def sync_tree(directory: Path, sync: bool) -> None:
    for path in [*directory.iterdir(), directory] if sync else []:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


# --- the cases -----------------------------------------------------------------------------------


def compare_saves(case: str, root: Path, rows: int, rounds: int, sync: bool) -> None:
    state = State(rows)
    seconds: dict[str, list[float]] = {peer: [] for peer in PEERS}
    with scratch(root) as directory:
        for peer in PEERS:  # compiles, imports and touches what is done once
            timed_save(peer, State(1000), directory, sync)
        for _ in range(rounds):
            for peer in PEERS:
                warm(directory, state.n_bytes, sync)
                seconds[peer].append(timed_save(peer, state, directory, sync))
    report_peers(case, rows, state.n_bytes, seconds)


def timed_save(peer: str, state: State, directory: Path, sync: bool) -> float:
    target = directory / peer
    if peer != "recckpt":
        target.mkdir()
    seconds = timed(lambda: PEERS[peer](state, target, sync))
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return seconds


def compare_loads(root: Path, rows: int, rounds: int) -> None:
    state = State(rows)
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in state.tensors.items()}
    n_bytes = state.n_bytes
    with scratch(root) as directory:
        for peer in ("recckpt", "torch.save", "safetensors"):
            if peer != "recckpt":
                (directory / peer).mkdir()
            PEERS[peer](state, directory / peer, False)
        SAVERS.clear()
        del state
        loaders: dict[str, Callable[[], Any]] = {
            "recckpt": lambda: load_recckpt(directory),
            "torch.load + copy": lambda: copied(shapes, torch.load(directory / "torch.save" / "model.pt")),
            "safetensors + copy": lambda: copied(shapes, load_file(directory / "safetensors" / "model.safetensors")),
        }
        seconds: dict[str, list[float]] = {peer: [] for peer in loaders}
        for round_number in range(rounds + 1):
            for peer, load in loaders.items():
                gc.collect()
                touch_memory(2 * n_bytes)
                took = timed(load)
                if round_number:  # the first compiles and imports
                    seconds[peer].append(took)
    report_peers("load into an empty table, tmpfs", rows, n_bytes, seconds)


def load_recckpt(directory: Path) -> nn.Module:
    model = model_of()
    Saver(model, output_dir=str(directory)).load()
    return model


def copied(shapes: dict[str, tuple[torch.Size, torch.dtype]], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy what was loaded into a fresh model's tensors, as ``load_state_dict`` does."""
    live = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    for name, tensor in live.items():
        tensor.copy_(tensors[name])
    return live


def compare_table_counts(root: Path, rounds: int, n_tables: int = 1000, table_rows: int = 4000) -> None:
    tables = [HashTable(DIM, name=f"table_{number}") for number in range(n_tables)]
    for number, table in enumerate(tables):
        table.insert(torch.arange(table_rows) + number * table_rows, torch.rand(table_rows, DIM))
    one = HashTable(DIM, name="one")
    one.insert(torch.arange(n_tables * table_rows), torch.rand(n_tables * table_rows, DIM))
    models = {"1 table": nn.ModuleList([one]), f"{n_tables} tables": nn.ModuleList(tables)}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    n_files = 0
    with scratch(root) as directory, unsynced():
        savers = {name: Saver(model, output_dir=str(directory / name)) for name, model in models.items()}
        for round_number in range(rounds + 1):
            for name, saver in savers.items():
                warm(directory, n_tables * table_rows * DIM * 4, sync=False)
                took = timed(lambda saver=saver: saver.save("a", overwrite=True))
                n_files = sum(path.is_file() for path in directory.joinpath(name).glob("a*/**/*"))
                shutil.rmtree(next(directory.joinpath(name).glob("a*")))
                if round_number:
                    seconds[name].append(took)
    report_peers(
        "save of many tables, tmpfs", n_tables * table_rows, n_tables * table_rows * DIM * 4, seconds, n_files=n_files
    )


def compare_memory(root: Path) -> None:
    for rows in (1_000_000, 4_000_000, 8_000_000):
        command = [sys.executable, __file__, "--memory-of", str(rows), "--tmpfs", str(root)]
        report(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def memory_beyond_the_table(rows: int, root: Path) -> dict[str, Any]:
    model = model_of()
    table = model["item"]
    table.reserve(rows)
    with scratch(root) as directory, unsynced():
        saver = Saver(model, output_dir=str(directory))
        saver.save("warm-up")
        for part in torch.arange(rows).split(100_000):
            table.insert(part, torch.rand(len(part), DIM), {"moment": torch.rand(len(part), DIM)})
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = status_mib("VmRSS")
        saver.save("measured")
        after = status_mib("VmHWM")
    return {
        "case": "memory while saving",
        "rows": rows,
        "table_mib": round(table.nbytes / 2**20),
        "beyond_mib": round(after - before),
    }


# --- measuring -----------------------------------------------------------------------------------


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
    path, block = directory / "warm", np.ones(CHUNK_BYTES, np.uint8)
    with path.open("wb", buffering=0) as file:
        for _ in range(-(-n_bytes // CHUNK_BYTES)):
            file.write(block)
        if sync:
            os.fsync(file.fileno())
    path.unlink()


def touch_memory(n_bytes: int) -> None:
    """Touch and free as much memory as comes next."""
    np.ones(n_bytes, np.uint8)


def status_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


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


if __name__ == "__main__":
    main()
