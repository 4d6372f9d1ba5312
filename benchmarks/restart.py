"""How long a trainer takes from exec to its first step, and what recckpt adds to that; seconds, with their parts.

    python benchmarks/restart.py --rows 1000000

Three trainers of one model run in turn, each a process of its own: one with ``nn.Embedding`` and torch alone, which
begins anew; one with tables of recckpt, which begins anew; and that one once more, which restores what it has saved.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCH, DIM = 1024, 16
Parts = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--root", type=Path, default=Path())
    parser.add_argument("--as", choices=TRAINERS, dest="trainer", help=argparse.SUPPRESS)  # in a process of its own
    args = parser.parse_args()
    if args.trainer:
        print(json.dumps(TRAINERS[args.trainer](args.root, args.rows)))
        return
    from machine import describe_machine
    from measuring import report, scratch

    report({"case": "machine", **describe_machine()})
    with scratch(args.root) as directory:
        in_a_process("saved", directory, args.rows)  # compiles, too
        rounds = [
            {name: in_a_process(name, directory, args.rows) for name in ("torch", "new", "restored")}
            for _ in range(args.rounds)
        ]
    medians = {name: median_of([each[name] for each in rounds]) for name in rounds[0]}
    for name, parts in medians.items():
        over = round(parts["first_step"] / medians["torch"]["first_step"], 2)
        report({"case": "restart", "trainer": name, "rows": args.rows, **parts, "over_torch": over})


def in_a_process(trainer: str, directory: Path, rows: int) -> Parts:
    command = [sys.executable, __file__, "--as", trainer, "--root", str(directory), "--rows", str(rows)]
    environment = {**os.environ, "BEGUN": str(time.time())}
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    parts: Parts = json.loads(result.stdout)
    return parts


def median_of(rounds: list[Parts]) -> Parts:
    return {name: round(statistics.median(each[name] for each in rounds), 3) for name in rounds[0]}


class Clock:
    """Notes how long after exec each part was over: by the clock, and by the processor for the last."""

    def __init__(self) -> None:
        self._begun, self.parts = float(os.environ["BEGUN"]), dict[str, float]()

    def note(self, part: str) -> None:
        """Note that a part is over."""
        self.parts[part] = time.time() - self._begun

    def end(self) -> Parts:
        """Return all parts, the last of which is over."""
        self.note("first_step")
        return {**self.parts, "first_step_cpu": time.process_time()}


def by_torch(directory: Path, rows: int) -> Parts:
    clock = Clock()
    import torch
    from torch import nn

    clock.note("torch")
    model = nn.ModuleDict({"item": nn.Embedding(rows, DIM, sparse=True), "top": nn.Linear(DIM, 1)})
    sparse, dense = torch.optim.SparseAdam(model["item"].parameters()), torch.optim.Adam(model["top"].parameters())
    clock.note("model")
    step(model, [sparse, dense], rows)
    return clock.end()


def by_recckpt(directory: Path, rows: int, *, saves: bool = False, restores: bool = True) -> Parts:
    clock = Clock()
    import torch
    from torch import nn

    clock.note("torch")
    from recckpt import CheckpointManager
    from recckpt.sparse import HashTable, SparseAdam

    clock.note("recckpt")
    table = HashTable(DIM, name="item")
    model = nn.ModuleDict({"item": table, "top": nn.Linear(DIM, 1)})
    optimizers: list[Any] = [SparseAdam([table]), torch.optim.Adam(model["top"].parameters())]
    where = directory / ("run" if saves or restores else f"new-{os.getpid()}")
    manager = CheckpointManager.attach(model, optimizers, output_dir=where, save_interval=1000)
    clock.note("model")
    manager.restore()
    clock.note("restore")
    step(model, optimizers, rows)
    parts = clock.end()
    if saves:
        table.insert(torch.arange(rows), torch.rand(rows, DIM))
        manager.step()
        manager.save()
    manager.close()
    return parts


def step(model: Any, optimizers: list[Any], rows: int) -> None:
    import torch

    model["top"](model["item"](torch.randint(rows, (BATCH,)))).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


TRAINERS: dict[str, Callable[[Path, int], Parts]] = {
    "torch": by_torch,
    "new": lambda directory, rows: by_recckpt(directory, rows, restores=False),
    "restored": by_recckpt,
    "saved": lambda directory, rows: by_recckpt(directory, rows, saves=True),
}

if __name__ == "__main__":
    main()
