"""Near saves: what one takes and holds, a step of training beside them, and a restore from one.

    python benchmarks/near.py --rows 4000000

Each case measures its peer in the same run: a delta of the same rows to the same memory, steps without near saves, a
restore of the base and one delta. ``copies`` has two ranks, each a host of its own, that copy what the other writes
over loopback; ``lost`` has four, of which one comes back with an empty disk before each restore.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from machine import describe_machine
from measuring import on_ranks, report, scratch, timed
from torch import nn

from recckpt import CheckpointManager, Deltas, Near, Saver
from recckpt.sparse import HashTable, SparseAdagrad, gen_slice

_LOOK_UPS = 8192  # of a step
_NEVER = 10**9  # steps
_TOUCHED_BYTES = 256 << 20  # more than a near save takes, with those that it replaces
_EVERY = 20  # steps from one near save to the next
CASES = ("save", "copies", "step", "restore", "lost")
_RANKS = {"copies": 2, "lost": 4}  # of the cases with several, each of them a host of its own
_LOST = 2


class Run:
    """A table with one slot of the same size, whose saves and near saves are made by hand.

    Args:
        root: holds the output dir, ``runs``, and the near dir.
        rows: of the table; 0 for a run that is restored.
        dim: values in a row.
        hidden: width of the dense layers, which take most of a step.
        rank: of ``size`` ranks, each with a near dir of its own.
    """

    def __init__(self, root: Path, rows: int, dim: int, hidden: int = 16, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.table = HashTable(dim, name="item", slice=gen_slice(rank, size))
        self.optimizer = SparseAdagrad([self.table], lr=0.01)
        if rows:
            own = self._owned(torch.arange(rows))
            self.table.insert(own, torch.rand(len(own), dim))
        self.top = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        model = nn.ModuleDict({"item": self.table, "top": self.top})
        self.saver = Saver(
            model,
            self.optimizer,
            str(root / "runs"),
            max_keep=2,
            deltas=Deltas(full_every=999, max_dirty=1.0, max_chain_bytes=1000),
            near=Near(root / f"near-{rank}", interval=_NEVER),
        )
        self.manager = CheckpointManager(self.saver, _NEVER)

    def train(self, ids: torch.Tensor) -> None:
        """Make a step on some ids."""
        self.top.zero_grad()
        torch.autograd.backward(self.top(self.table(self._owned(ids))).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.manager.step()

    def begin_near(self) -> None:
        """Begin a near save of this step, as the manager does."""
        assert self.saver.near_saves is not None
        assert self.saver.near_saves.begin(self.rank, self.size, self.manager.global_step, {})

    def end_near(self) -> None:
        """Wait for it, which must have ended well."""
        assert self.saver.near_saves is not None
        self.saver.near_saves.settle()
        assert not self.saver.near_saves.counts.failed
        assert not self.saver.near_saves.counts.skipped

    def _owned(self, ids: torch.Tensor) -> torch.Tensor:
        return ids[gen_slice(self.rank, self.size).owns(ids)]

    def near(self) -> None:
        """Make a whole near save."""
        self.begin_near()
        self.end_near()


def save(root: Path, rows: int, dim: int, rounds: int, *, rank: int = 0, size: int = 1) -> None:
    """Report a near save of 1 % of the rows beside a delta of the same rows, by time, pause and bytes."""
    torch.manual_seed(rows)  # so that all ranks draw the same ids
    run = Run(root, rows, dim, rank=rank, size=size)
    run.saver.save("0", step=0)
    seconds: dict[str, list[float]] = {"near": [], "delta": [], "near_pause": [], "delta_pause": []}
    bytes_over = []
    for number in range(1, 2 * rounds + 1):
        run.train(torch.randperm(rows)[: rows // 100])
        _wait_with_touched_memory(root, rank)
        begin = time.perf_counter()
        run.begin_near()  # first: it leaves the marks as they are
        seconds["near_pause"].append(time.perf_counter() - begin)
        run.end_near()
        seconds["near"].append(time.perf_counter() - begin)
        _wait_with_touched_memory(root, rank)
        begin = time.perf_counter()
        handle = run.saver.save_async(f"{number}", step=number)
        seconds["delta_pause"].append(time.perf_counter() - begin)
        handle.wait()
        seconds["delta"].append(time.perf_counter() - begin)
        newest = max(root.glob(f"near-{rank}/**/near.json"), key=lambda path: int(path.parent.name)).parent
        bytes_over.append(_bytes_in(newest) / _bytes_in(root / "runs" / str(number)))
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    if rank == 0:
        report(
            {
                "case": "near, save of 1 %" + ("" if size == 1 else f", {size} hosts that copy each other's"),
                "rows": rows,
                "ms": {name: round(1e3 * median, 1) for name, median in medians.items()},
                "time_over_delta": round(medians["near"] / medians["delta"], 2),
                "pause_over_delta": round(medians["near_pause"] / medians["delta_pause"], 2),
                "bytes_over_delta": round(max(bytes_over), 4),
            }
        )
    run.manager.close()


def _wait_with_touched_memory(root: Path, rank: int = 0) -> None:
    """Wait for all ranks, once there is memory that was used before: a virtual machine may be slow to give other."""
    (root / f"touched-{rank}").write_bytes(bytes(_TOUCHED_BYTES))
    (root / f"touched-{rank}").unlink()
    _of_all(0)


def step(root: Path, rows: int, dim: int, rounds: int, *, hidden: int) -> None:
    """Report 20 steps and a near save, until it is sealed, beside 20 steps without; in turn, on one run."""
    run = Run(root, rows, dim, hidden)
    run.saver.save("base", step=0)
    seconds: dict[str, list[float]] = {"near": [], "plain": []}
    for number in range(4 * rounds + 1):
        for name in ("near", "plain") if number % 2 else ("plain", "near"):
            _wait_with_touched_memory(root)
            begin = time.perf_counter()
            if name == "near":
                run.begin_near()
            for _ in range(_EVERY):
                run.train(torch.randint(rows, (_LOOK_UPS,)))
            run.end_near()
            seconds[name].append(time.perf_counter() - begin)
        run.saver.save("base", step=0, overwrite=True)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    report(
        {
            "case": f"near, step with one every {_EVERY}",
            "rows": rows,
            "ms": round(1e3 * medians["plain"] / _EVERY, 2),
            "near_to_plain": round(medians["near"] / medians["plain"], 3),
        }
    )
    run.manager.close()


def restore(root: Path, rows: int, dim: int, rounds: int, *, rank: int = 0, size: int = 1) -> None:
    """Report a restore of base and near save beside that of base and one delta, and what of the store each opens."""
    torch.manual_seed(rows)
    for name in ("near", "delta"):
        run = Run(root / name, rows, dim, rank=rank, size=size)
        run.saver.save("base", step=0)
        run.train(torch.arange(0, rows, 100))
        run.near() if name == "near" else run.saver.save("delta", step=1)
        run.manager.close()
    peers: dict[str, Callable[[Run], object]] = {
        "near": lambda run: run.manager.restore(),
        "delta": lambda run: run.manager.restore(),
        "base": lambda run: run.manager.restore(near=False),
    }
    opened = _Opened()
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    n_bytes: dict[str, int] = {}
    for number in range(rounds + 1):
        for name in peers if number % 2 else reversed(peers):
            of = root / ("delta" if name == "delta" else "near")
            if size > 1 and rank == _LOST:
                shutil.rmtree(of / f"near-{rank}", ignore_errors=True)
            run = Run(of, 0, dim, rank=rank, size=size)
            _wait_with_touched_memory(root, rank)
            opened.begin(of / "runs")
            seconds[name].append(timed(partial(_restored, peers[name], run)))
            n_bytes[name] = _of_all(opened.n_bytes)
            assert run.manager.global_step == (name != "base")
            run.manager.close()
            del run
            gc.collect()
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    if rank == 0:
        report(
            {
                "case": "near, restore" + ("" if size == 1 else f" after the loss of 1 of {size} hosts"),
                "rows": rows,
                "ms": {name: round(1e3 * median) for name, median in medians.items()},
                "time_over_base_and_delta": round(medians["near"] / medians["delta"], 2),
                "store_bytes_over_base": round(n_bytes["near"] / n_bytes["base"], 4),
            }
        )


def _restored(restore_run: Callable[[Run], object], run: Run) -> None:
    restore_run(run)
    _of_all(0)  # once all have


def _of_all(number: int) -> int:
    """Return the sum over all ranks, once all have come."""
    total = torch.tensor(number)
    if dist.is_initialized():
        dist.all_reduce(total)
    return int(total)


class _Opened:
    """Counts the bytes of the files below a directory that are opened; a file that is opened twice counts twice."""

    def __init__(self) -> None:
        self._root, self.n_bytes = "", 0
        sys.addaudithook(self._note)

    def begin(self, root: Path) -> None:
        """Count from now on what is opened there."""
        self._root, self.n_bytes = f"{root}/", 0

    def _note(self, event: str, args: tuple[object, ...]) -> None:
        if event == "open" and self._root and str(args[0]).startswith(self._root):
            path = Path(str(args[0]))
            self.n_bytes += path.stat().st_size if path.is_file() else 0


def _bytes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def be_rank(rank: int, size: int, port: int, args: argparse.Namespace) -> None:
    """Take part in a case of several ranks, and end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    work = {"copies": save, "lost": restore}[args.cases[0]]
    work(args.dir, args.rows, args.dim, args.rounds, rank=rank, size=size)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a thread of torch may still release tensors of the last gather: an interpreter that ends aborts there


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=512, help="width of the dense layers of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--cases", nargs="*", choices=CASES, default=CASES)
    parser.add_argument("--rank", nargs=3, metavar=("RANK", "OF", "PORT"), type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    if args.rank:
        rank, size, port = args.rank
        be_rank(rank, size, port, args)
        return
    report({"case": "machine", "dim": args.dim, **describe_machine()})
    with scratch(args.dir) as root:
        options = ["--rows", args.rows, "--dim", args.dim, "--rounds", args.rounds, "--dir", root]
        alone: dict[str, Callable[..., None]] = {
            "save": save,
            "step": partial(step, hidden=args.hidden),
            "restore": restore,
        }
        for name in args.cases:
            if name in alone:
                alone[name](root, args.rows, args.dim, args.rounds)
            else:
                on_ranks(__file__, _RANKS[name], [*options, "--cases", name])
            for path in root.iterdir():
                shutil.rmtree(path)


if __name__ == "__main__":
    main()
