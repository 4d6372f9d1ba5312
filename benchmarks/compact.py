"""How fast a chain is compacted, beside copying as many bytes file to file, and with how much memory of its own.

A full checkpoint and deltas of one part in a hundred each are written first. Each compaction runs in a fresh process,
so that its memory is its own: the most RssAnon that it ever had, the interpreter with numpy and Arrow included, and how
much more that is than before it began. The copy reads and writes the bytes of the full checkpoint, by
``shutil.copyfile``, in turn with the compactions.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measuring import peak_mib, report, scratch, status_mib, timed


def write_chain(output_dir: Path, rows: int, dim: int, deltas: int) -> None:
    """Write a full checkpoint of one table with one slot, and deltas on it of rows / 100 each."""
    import torch
    from torch import nn

    from recckpt import Deltas, Saver
    from recckpt.sparse import HashTable

    table = HashTable(dim, name="item")
    table.add_slot("sparse_m", (dim,))
    ids = torch.randperm(1 << 40 if rows > 1 << 24 else 1 << 24)[:rows]
    saver = Saver(nn.ModuleDict({"item": table}), None, str(output_dir), max_keep=None, deltas=Deltas(full_every=999))
    table.insert(ids, torch.randn(rows, dim))
    saver.save("full")
    for number in range(deltas):
        some = ids[torch.randperm(rows)[: rows // 100]]
        table.insert(some, torch.randn(len(some), dim))
        saver.save(f"delta {number}")
    saver.close()


def compact_here(output_dir: str, out: str, threads: int, budget_mib: int) -> None:
    """Compact in this process, and print what it took."""
    import recckpt.rewrite.compaction  # before memory is looked at
    import recckpt.rewrite.whole

    before = status_mib("RssAnon")
    with peak_mib("RssAnon") as grown:
        begin, processor = time.perf_counter(), time.process_time()
        done = recckpt.rewrite.compact(output_dir, out=out or None, threads=threads, budget_bytes=budget_mib << 20)
        seconds, processor = time.perf_counter() - begin, time.process_time() - processor
    said = {
        "seconds": seconds,
        "processor": processor,
        "anon_before_mib": before,
        "anon_peak_mib": before + grown[0],
        "directory": done.directory,
    }
    print(json.dumps({**said, "bytes": done.n_bytes, "links": done.n_links}))


def compact(output_dir: Path, threads: int, budget_mib: int) -> dict[str, Any]:
    """Compact in a process of its own; return what it took, and remove the offer."""
    command = [sys.executable, __file__, "--here", str(output_dir), "--threads", str(threads)]
    done = subprocess.run([*command, "--budget-mib", str(budget_mib)], capture_output=True, text=True, check=True)
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    shutil.rmtree(output_dir / said["directory"])
    return said


def copy(output_dir: Path) -> tuple[float, float]:
    """Copy the files of the full checkpoint one after another; return the seconds of clock and processor."""
    to = output_dir / "copy"
    to.mkdir()
    files = [path for path in (output_dir / "full").rglob("*") if path.is_file()]
    processor = time.process_time()
    seconds = timed(lambda: [shutil.copyfile(path, to / str(n)) for n, path in enumerate(files)])
    processor = time.process_time() - processor
    shutil.rmtree(to)
    return seconds, processor


def case(root: Path, rows: int, dim: int, deltas: int, *, rounds: int, threads: int, budget_mib: int) -> dict[str, Any]:
    """Return the line of one case: medians of what compaction and copy took, in turn."""
    write_chain(root / "runs", rows, dim, deltas)
    copied, said = [], []
    for _ in range(rounds):
        said.append(compact(root / "runs", threads, budget_mib))
        copied.append(copy(root / "runs"))
    gb = said[0]["bytes"] / 1e9
    seconds, processor = (statistics.median(each[key] for each in said) for key in ("seconds", "processor"))
    copy_seconds, copy_processor = (statistics.median(each) for each in zip(*copied, strict=True))
    return {
        "case": "compact",
        "rows": rows,
        "dim": dim,
        "deltas": deltas,
        "threads": threads,
        "budget_mib": budget_mib,
        "gb": round(gb, 3),
        "gb_per_sec": round(gb / seconds, 3),
        "copy_gb_per_sec": round(gb / copy_seconds, 3),
        "of_copy": round(copy_seconds / seconds, 3),
        "processor_sec_per_gb": round(processor / gb, 2),
        "copy_processor_sec_per_gb": round(copy_processor / gb, 2),
        "anon_mib": round(max(each["anon_peak_mib"] for each in said)),
        "own_mib": round(max(each["anon_peak_mib"] - each["anon_before_mib"] for each in said)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--deltas", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--budget-mib", type=int, default=256)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="where to write")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        compact_here(args.here, "", args.threads, args.budget_mib)
        return
    with scratch(args.dir) as root:
        how = {"rounds": args.rounds, "threads": args.threads, "budget_mib": args.budget_mib}
        report(case(root, args.rows, args.dim, args.deltas, **how))


if __name__ == "__main__":
    main()
