"""Save and load one large table, side by side with what else there is; one JSON line a case.

Every peer gets the same bytes as plain tensors and is told to sync or not to, as recckpt is. Rounds alternate between
the peers, and before each measured run a file of the same size is written and unlinked: memory that a virtual machine
touches for the first time is far slower than memory it reuses, and would otherwise be what is measured.

    python benchmarks/save_load.py --rows 4000000 --tmpfs /dev/shm --disk . --rounds 5
    python benchmarks/save_load.py --no-checksum --rounds 9    # only what checksums cost
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checksums import compare_checksums
from machine import describe_machine
from measuring import report, report_peers, scratch, status_mib, timed, touch_memory, warm
from peers import DIM, PEERS, State, model_of, unsynced
from safetensors.torch import load_file
from torch import Tensor, nn

from recckpt import Saver
from recckpt.sparse import HashTable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--disk", type=Path, default=Path())
    parser.add_argument("--cases", nargs="*", default=["save", "disk", "load", "tables", "memory"])
    parser.add_argument("--no-checksum", action="store_true", help="compare recckpt with itself without checksums")
    parser.add_argument("--tables", type=int, default=1000, help="of 4,000 rows each, against one of all the rows")
    parser.add_argument("--memory-rows", type=int, nargs="+", default=[1_000_000, 4_000_000, 8_000_000])
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)  # one row count, in a process of its own
    args = parser.parse_args()
    if args.memory_of:
        print(json.dumps(memory_beyond_the_table(args.memory_of, args.tmpfs)))
        return
    report({"case": "machine", **describe_machine()})
    if args.no_checksum:
        compare_checksums(args.tmpfs, args.rows, args.rounds)
        return
    cases: dict[str, Callable[[], None]] = {
        "save": lambda: compare_saves("save, tmpfs, no fsync", args.tmpfs, args.rows, args.rounds, sync=False),
        "disk": lambda: compare_saves("save, disk, fsync", args.disk, args.rows, args.rounds, sync=True),
        "load": lambda: compare_loads(args.tmpfs, args.rows, args.rounds),
        "tables": lambda: compare_table_counts(args.tmpfs, args.rounds, args.tables),
        "memory": lambda: compare_memory(args.tmpfs, args.memory_rows),
    }
    for case in args.cases:
        cases[case]()


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
    # No more than that: a saver that finds its claims gone has lost the output dir. It uses no name a second time.
    shutil.rmtree(next(directory.glob(f"{peer}*")))
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
    model, _ = model_of()
    Saver(model, output_dir=str(directory)).load()
    return model


def copied(shapes: dict[str, tuple[torch.Size, torch.dtype]], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy what was loaded into a fresh model's tensors, as ``load_state_dict`` does."""
    live = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    for name, tensor in live.items():
        tensor.copy_(tensors[name])
    return live


def compare_table_counts(root: Path, rounds: int, n_tables: int, table_rows: int = 4000) -> None:
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
                took = timed(partial(saver.save, "a"))
                n_files = sum(path.is_file() for path in directory.joinpath(name).glob("a*/**/*"))
                shutil.rmtree(next(directory.joinpath(name).glob("a*")))
                if round_number:
                    seconds[name].append(took)
    report_peers(
        "save of many tables, tmpfs", n_tables * table_rows, n_tables * table_rows * DIM * 4, seconds, n_files=n_files
    )


def compare_memory(root: Path, row_counts: list[int]) -> None:
    for rows in row_counts:
        command = [sys.executable, __file__, "--memory-of", str(rows), "--tmpfs", str(root)]
        report(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def memory_beyond_the_table(rows: int, root: Path) -> dict[str, Any]:
    model, table = model_of()
    table.reserve(rows)
    with scratch(root) as directory, unsynced():
        saver = Saver(model, output_dir=str(directory))
        saver.save("warm-up")
        for part in torch.split(torch.arange(rows), 100_000):
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


if __name__ == "__main__":
    main()
