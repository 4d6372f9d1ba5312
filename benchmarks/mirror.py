"""How long a mirror takes, beside a plain copy of the same bytes, file by file, each synced as the mirror syncs it.

A run of a full checkpoint and deltas of one part in a hundred each is mirrored to an empty place, in turn with the
copies; then once more, when nothing is new; then after one more delta. Whoever mirrors checks every byte, and the copy
none. The first pass is also made with one thread, as the copy is.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import report, scratch, timed
from torch import nn

import recckpt
from recckpt import Deltas, Saver
from recckpt.sparse import HashTable

_CHUNK_BYTES = 8 << 20


class Run:
    """A saver of one table with one slot."""

    def __init__(self, output_dir: Path, rows: int, dim: int) -> None:
        self.output_dir, self._rows, self._dim, self._n_saves = output_dir, rows, dim, 0
        self._table = HashTable(dim, name="item")
        self._table.add_slot("sparse_m", (dim,))
        self._ids = torch.randperm(1 << 24)[:rows]
        model = nn.ModuleDict({"item": self._table, "top": nn.Linear(dim, dim)})
        self._saver = Saver(model, None, str(output_dir), max_keep=None, deltas=Deltas(full_every=999))

    def save(self, rows: int) -> None:
        """Change so many rows, and save."""
        some = self._ids[torch.randperm(self._rows)[:rows]]
        self._table.insert(some, torch.randn(rows, self._dim))
        self._saver.save(f"ckpt_{self._n_saves}", step=self._n_saves)
        self._n_saves += 1


def copy(run: Path, to: Path) -> int:
    """Copy the files of all checkpoints one after another, each synced; return how many bytes they have."""
    n_bytes = 0
    for path in (path for path in run.glob("ckpt_*/**/*") if path.is_file()):
        place = to / path.relative_to(run)
        place.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb", buffering=0) as source, place.open("wb", buffering=0) as target:
            shutil.copyfileobj(source, target, _CHUNK_BYTES)
            os.fsync(target.fileno())
            n_bytes += target.tell()
    return n_bytes


def passes(root: Path, name: str, work: Callable[[Path], object]) -> tuple[float, float]:
    """Do some work into an empty place; return the seconds of clock and processor."""
    to = root / name
    processor = time.process_time()
    seconds = timed(lambda: work(to))
    processor = time.process_time() - processor
    shutil.rmtree(to)
    return seconds, processor


def case(root: Path, rows: int, dim: int, deltas: int, *, rounds: int, threads: int) -> dict[str, Any]:
    """Return the line of one case: medians of what mirrors and copies took, in turn."""
    run = Run(root / "run", rows, dim)
    for number in range(1 + deltas):
        run.save(rows // 100 if number else rows)
    peers: dict[str, Callable[[Path], object]] = {
        "mirror": lambda to: recckpt.rewrite.mirror(run.output_dir, to, threads=threads),
        "mirror_one_thread": lambda to: recckpt.rewrite.mirror(run.output_dir, to, threads=1),
        "copy": lambda to: copy(run.output_dir, to),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
    for name in [*peers, *(name for _ in range(rounds) for name in peers)]:
        taken[name].append(passes(root, "to", peers[name]))
    seconds = {name: statistics.median(each[0] for each in times[1:]) for name, times in taken.items()}
    processor = {name: statistics.median(each[1] for each in times[1:]) for name, times in taken.items()}
    first = recckpt.rewrite.mirror(run.output_dir, root / "to")
    again = [timed(lambda: recckpt.rewrite.mirror(run.output_dir, root / "to")) for _ in range(rounds)]
    run.save(rows // 100)
    new = recckpt.rewrite.mirror(run.output_dir, root / "to")
    changed_bytes = rows // 100 * (8 + 2 * 4 * dim)
    return {
        "case": "mirror",
        "rows": rows,
        "dim": dim,
        "deltas": deltas,
        "threads": threads,
        "gb": round(first.n_bytes / 1e9, 3),
        "gb_per_sec": {name: round(first.n_bytes / 1e9 / each, 3) for name, each in seconds.items()},
        "time_over_copy": {name: round(each / seconds["copy"], 2) for name, each in seconds.items()},
        "processor_sec_per_gb": {name: round(each / first.n_bytes * 1e9, 2) for name, each in processor.items()},
        "second_pass_sec": round(statistics.median(again), 3),
        "second_pass_bytes": recckpt.rewrite.mirror(run.output_dir, root / "to").n_bytes,
        "new_delta_bytes_over_rows": round(new.n_bytes / changed_bytes, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--deltas", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="where to write")
    args = parser.parse_args()
    with scratch(args.dir) as root:
        report(case(root, args.rows, args.dim, args.deltas, rounds=args.rounds, threads=args.threads))


if __name__ == "__main__":
    main()
