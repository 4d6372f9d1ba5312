"""Live tables: the pause of a save, what a delta costs and holds, a step with marks, and fingerprints.

    python benchmarks/live.py --rows 4000000
    python benchmarks/live.py --rows 4000000 --device cuda

Each case measures its peer in the same run: a small table, DCP of the same model, the same step without marks, a copy.
On the CPU the pause, a step and fingerprints take the time of its processor; on CUDA all time until the device is done,
of 20 steps in a row.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from measuring import report, scratch, timed
from torch import nn
from torch.distributed.checkpoint import state_dict_saver

from recckpt import Saver
from recckpt.live import LiveTables, live_tables
from recckpt.sparse.table.prints import fingerprints

_LOOK_UPS = 8192  # of a step
Kind = type[torch.optim.SparseAdam] | type[torch.optim.Adam]


class Run:
    """An ``nn.Embedding`` that SparseAdam or Adam trains, with live tables where they are wanted."""

    def __init__(self, rows: int, dim: int, kind: Kind, device: str, *, is_live: bool = True) -> None:
        self.model = nn.Embedding(rows, dim, sparse=kind is torch.optim.SparseAdam, device=device)
        self.optimizer: torch.optim.Optimizer = kind([self.model.weight])
        self.step(torch.arange(16, device=device))  # the states are there
        self.tables: LiveTables | None = live_tables(self.model, self.optimizer, min_rows=1) if is_live else None

    def step(self, ids: torch.Tensor) -> None:
        """Train the rows of ids."""
        self.optimizer.zero_grad()
        torch.autograd.backward(self.model(ids).square().sum())
        self.optimizer.step()

    def steps(self, batches: torch.Tensor) -> None:
        """Train batch after batch."""
        for ids in batches:
            self.step(ids)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The weight, and what its optimizer keeps of each row."""
        states = self.optimizer.state[self.model.weight].values()
        slots = [value for value in states if isinstance(value, torch.Tensor) and value.dim()]
        return [self.model.weight.detach(), *slots]

    def saver(self, output_dir: Path, *, deltas: bool = True) -> Saver:
        """Return a saver of this run."""
        return Saver(self.model, output_dir=str(output_dir), tables=self.tables, deltas=deltas)


def pause(root: Path, rows: int, dim: int, rounds: int, device: str) -> None:
    """Report what ``save_async`` takes beside a table of a thirtieth; on CUDA beside a copy to the host too."""
    medians, copies = {}, []
    clock = time.thread_time if device == "cpu" else partial(device_clock, device)
    for n in (max(1000, rows // 30), rows):
        run = Run(n, dim, torch.optim.SparseAdam, device)
        saver, seconds = run.saver(root / f"pause-{n}"), []
        for number in range(rounds + 1):
            run.step(torch.randint(n, (_LOOK_UPS,), device=device))
            begin = clock()
            handle = saver.save_async(f"{number}", step=number)
            seconds.append(clock() - begin)
            handle.wait()
            if device != "cpu" and n == rows:
                begin = clock()
                for tensor in run.tensors:
                    tensor.cpu()
                copies.append(clock() - begin)
        saver.close()
        medians[n] = statistics.median(seconds[1:])
    small, large = medians
    ratio = round(medians[large] / medians[small], 2)
    line = {"case": "live, pause", "rows": [small, large], "ms": round(1e3 * medians[large], 2), "to_small": ratio}
    report(line | ({"copy_to_cpu_ms": round(1e3 * statistics.median(copies[1:]), 1)} if copies else {}))


def delta(root: Path, rows: int, dim: int, rounds: int, device: str) -> None:
    """Report how many times as long DCP takes for the model as a delta of 1 % does, and which rows the delta holds."""
    run = Run(rows, dim, torch.optim.SparseAdam, device)
    saver = run.saver(root / "delta")
    saver.save("base", step=0)
    seconds: dict[str, list[float]] = {"delta": [], "dcp": []}
    held = []
    for number in range(1, rounds + 1):
        ids = torch.randperm(rows, device=device)[: rows // 100]
        before = run.model.weight.detach().clone()
        run.step(ids)
        changed = int((run.model.weight.detach() != before).any(1).sum())
        del before
        begin = time.perf_counter()
        table = saver.save(f"{number}", step=number).tables[0]
        seconds["delta"].append(time.perf_counter() - begin)
        held.append((table.delta.upserts if table.delta else table.rows) / changed)
        state = {"model": run.model.state_dict(), "optim": run.optimizer.state_dict()}
        seconds["dcp"].append(timed(partial(save_dcp, state, root / "dcp")))
        shutil.rmtree(root / "dcp")
    saver.close()
    medians = {peer: statistics.median(values) for peer, values in seconds.items()}
    report(
        {
            "case": "live, delta of 1 %",
            "rows": rows,
            "ms": {peer: round(1e3 * median) for peer, median in medians.items()},
            "dcp_to_delta": round(medians["dcp"] / medians["delta"], 1),
            "held_to_changed": round(max(held), 4),
        }
    )


def step(root: Path, rows: int, dim: int, rounds: int, device: str) -> None:
    """Report a step with marks beside one without; both in turn, each with the memory that was taken first once."""
    threads, n_in_row = torch.get_num_threads(), 1 if device == "cpu" else 20  # a device runs behind the host
    torch.set_num_threads(1)  # those of OpenMP wait for each other on the processor, and count as its time
    medians: dict[str, list[float]] = {"marked": [], "plain": []}
    for order in (("plain", "marked"), ("marked", "plain")):
        runs = {name: Run(rows, dim, torch.optim.SparseAdam, device, is_live=name == "marked") for name in order}
        saver = runs["marked"].saver(root / order[0])
        saver.save("base", step=0)
        seconds: dict[str, list[float]] = {name: [] for name in order}
        for i in range(20 * rounds):
            ids = torch.randint(rows, (n_in_row, _LOOK_UPS), device=device)
            for name in order if i % 2 else order[::-1]:  # the first to step on some ids finds the caches cold
                seconds[name].append(time_of(partial(runs[name].steps, ids), device) / n_in_row)
        saver.close()
        for name, values in seconds.items():
            medians[name].append(statistics.median(values))
    torch.set_num_threads(threads)
    means = {name: statistics.geometric_mean(values) for name, values in medians.items()}
    ratio = round(means["marked"] / means["plain"], 3)
    report({"case": "live, step", "rows": rows, "ms": round(1e3 * means["plain"], 2), "marked_to_plain": ratio})


def prints(root: Path, rows: int, dim: int, rounds: int, device: str) -> None:
    """Report what the fingerprints of all rows take beside a copy to the CPU, and beside a full save."""
    run = Run(rows, dim, torch.optim.Adam, device)
    assert run.tables is not None
    [table] = run.tables.values()
    own = run.tensors
    target = [torch.empty_like(tensor, device="cpu") for tensor in own]
    saver = run.saver(root / "prints", deltas=False)
    seconds: dict[str, list[float]] = {"prints": [], "copy": [], "save": []}
    threads = torch.get_num_threads()
    for number in range(rounds + 1):
        torch.set_num_threads(1)
        for name, work in (
            ("prints", lambda: fingerprints(table.store.snapshot("t"))),
            ("copy", lambda: [one.copy_(other) for one, other in zip(target, own, strict=True)]),
            ("save", partial(saver.save, f"{number}", step=number)),
        ):
            seconds[name].append(time_of(work, device))
    torch.set_num_threads(threads)
    saver.close()
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    report(
        {
            "case": "live, fingerprints",
            "rows": rows,
            "to_copy": round(medians["prints"] / medians["copy"], 2),
            "to_full_save": round(medians["prints"] / medians["save"], 2),
        }
    )


def save_dcp(state: Mapping[str, Any], directory: Path) -> None:
    """Save a state by torch.distributed.checkpoint."""
    state_dict_saver.save(dict(state), checkpoint_id=directory, no_dist=True)


def time_of(work: Callable[[], Any], device: str) -> float:
    """Return the seconds of the processor that work takes in all threads; on CUDA all until the device is done."""
    clock = time.process_time if device == "cpu" else partial(device_clock, device)
    begin = clock()
    work()
    return clock() - begin


def device_clock(device: str) -> float:
    """Return the time at which a device has done what was asked of it."""
    torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    gpu = {} if args.device == "cpu" else {"gpu": torch.cuda.get_device_name(args.device)}
    report({"case": "machine", "dim": args.dim, **describe_machine(), **gpu})
    with scratch(args.dir) as root:
        for case in (pause, delta, step, prints):
            case(root, args.rows if case is delta else args.rows * 3 // 4, args.dim, args.rounds, args.device)
            for path in root.iterdir():
                shutil.rmtree(path)


if __name__ == "__main__":
    main()
