"""Save while training goes on: how long it stands still, how much slower its steps are, what memory that takes.

One training run, on ids that are skewed, is saved by everybody in turn, round by round; before each save as many steps
are measured without one. Every peer saves the same rows: the others get the memory of the table as plain tensors.

    python benchmarks/pause.py --rows 1000000 4000000 8000000 --rounds 3
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe_machine
from measuring import report, scratch, status_mib, timed, warm
from pause_peers import PEERS, Peer, Recckpt, Training
from torch import nn

from recckpt import Saver

_QUIET_STEPS = 60  # at least, before each save


class Rounds:
    """What was measured of one peer; seconds by the clock, and of the processor where it says so."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self.pauses_cpu: list[float] = []
        self.commits: list[float] = []
        self.blocking: list[float] = []
        self.quiet: list[tuple[float, float]] = []  # steps without a save: clock, processor
        self.busy: list[tuple[float, float]] = []  # steps beside one
        self.ratios: list[float] = []
        self.lost: list[float] = []  # by training, for one save: the pause, and what its steps took longer
        self.beyond_mib: list[float] = []
        self.kept: list[int] = []
        self.written: list[int] = []  # rows, of which a delta has only some

    def to_json(self, row_bytes: int) -> dict[str, Any]:
        """Return medians and ratios."""
        quiet, busy = np.array(self.quiet), np.array(self.busy)
        p99 = np.percentile(quiet[:, 0], 99), np.percentile(busy[:, 0], 99)
        found = {
            "pause_ms": _ms(statistics.median(self.pauses)),
            "pause_cpu_ms": _ms(statistics.median(self.pauses_cpu)),
            "all_pause_ms": [_ms(pause) for pause in self.pauses],
            "commit_sec": round(statistics.median(self.commits), 2),
            "steps": len(busy),
            "step_ms": _ms(np.median(quiet[:, 0])),
            "step_p99_ms": _ms(p99[0]),
            "step_median_over_quiet": _ratio(np.median(busy[:, 0]), np.median(quiet[:, 0])),
            "step_p99_over_quiet": _ratio(p99[1], p99[0]),
            "step_cpu_over_quiet": _ratio(np.median(busy[:, 1]), np.median(quiet[:, 1])),
            "step_median_over_quiet_by_round": [round(ratio, 2) for ratio in self.ratios],
            "training_lost_sec": round(statistics.median(self.lost), 3),
            "beyond_mib": round(max(self.beyond_mib)),
        }
        if self.blocking:
            found |= {
                "rows_written": self.written,
                "rows_aside": self.kept,
                "mib_aside": [round(kept * row_bytes / 2**20) for kept in self.kept],
                "blocking_sec": round(statistics.median(self.blocking), 2),
                "commit_over_blocking": _ratio(statistics.median(self.commits), statistics.median(self.blocking)),
                "training_lost_over_blocking": _ratio(statistics.median(self.lost), statistics.median(self.blocking)),
            }
        return found


def _ms(seconds: Any) -> float:
    return round(float(seconds) * 1e3, 3)


def _ratio(value: Any, to: Any) -> float:
    return round(float(value) / float(to), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 4_000_000, 8_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--threads", type=int, help="of the training; torch's own default where it is not given")
    parser.add_argument("--writers", type=int, default=Recckpt.writers, help="threads that write, of recckpt")
    parser.add_argument("--dense-mib", type=int, default=64)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    Recckpt.writers = args.writers
    threads = {"training_threads": torch.get_num_threads(), "writers": args.writers}
    report({"case": "machine", **threads, **describe_machine()})
    for rows in args.rows:
        compare(rows, args.rounds, args.tmpfs, args.peers)
    report_dense(args.dense_mib, args.tmpfs)


def compare(rows: int, rounds: int, root: Path, names: list[str]) -> None:
    training = Training(rows)
    measured = {name: Rounds() for name in names}
    with scratch(root) as directory:
        for number in range(rounds):
            for name in names:
                peer = PEERS[name](training, directory / "runs")
                peer.warm_up(directory / "runs" / f"a-warm-up{number}")
                forget(directory / "runs")
                measure(training, peer, directory, measured[name], number)
                peer.close()
                del peer
                gc.collect()
    for name in names:
        report(
            {
                "case": "pause",
                "peer": name,
                "rows": rows,
                "gb": round(training.n_bytes / 1e9, 2),
                "rounds": rounds,
                "load": os.getloadavg()[0],
                **measured[name].to_json(training.row_bytes),
            }
        )
    if "recckpt" in names:
        ours = statistics.median(measured["recckpt"].pauses)
        ratios = {name: round(statistics.median(measured[name].pauses) / ours, 1) for name in names}
        report({"case": "pause over ours", "rows": rows, **ratios})


def measure(training: Training, peer: Peer, directory: Path, into: Rounds, number: int) -> None:
    """Save once, with steps before and meanwhile."""
    runs = directory / "runs"
    warm(directory, training.n_bytes, sync=False)
    for _ in range(5):
        training.step()
    quiet = [timed_twice(training.step) for _ in range(_QUIET_STEPS)]
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before, done_at, futures = status_mib("VmRSS"), list[float](), list[Future[Any]]()
    begin = time.perf_counter()
    pause, pause_cpu = timed_twice(lambda: futures.append(peer.save(runs / f"a{number}")))
    [future] = futures
    future.add_done_callback(lambda _: done_at.append(time.perf_counter()))
    busy = []
    while not future.done():
        busy.append(timed_twice(training.step))
    future.result()
    into.pauses.append(pause)
    into.pauses_cpu.append(pause_cpu)
    into.commits.append(done_at[0] - begin)
    into.beyond_mib.append(status_mib("VmHWM") - before + children_mib())
    into.quiet += quiet
    into.busy += busy
    into.lost.append(pause + sum(clock for clock, _ in busy) - len(busy) * np.mean(quiet, axis=0)[0])
    into.ratios.append(np.median(busy, axis=0)[0] / np.median(quiet, axis=0)[0] if busy else float("nan"))
    forget(runs)
    if isinstance(peer, Recckpt):
        into.kept.append(peer.info.kept_rows)
        into.written.append(peer.info.n_upserts)
        warm(directory, training.n_bytes, sync=False)
        into.blocking.append(timed(lambda: peer.save_and_wait(runs / f"a{number}-blocking")))
        forget(runs)


def timed_twice(work: Callable[[], Any]) -> tuple[float, float]:
    """Return seconds by the clock, and of the processor in this thread."""
    begin = time.thread_time()
    return timed(work), time.thread_time() - begin


def forget(runs: Path) -> None:
    """Remove checkpoints, and leave what belongs to the output dir."""
    for path in runs.glob("a*"):
        shutil.rmtree(path)


def children_mib() -> float:
    """Return the private memory of the processes that a peer has started."""
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def report_dense(mib: int, root: Path) -> None:
    """Report the pause for dense state alone: it is copied, to buffers that are kept."""
    model = nn.ParameterList([torch.rand(1 << 18) for _ in range(mib)])
    with scratch(root) as directory, Saver(model, output_dir=str(directory)) as saver:
        pauses = []
        for number in range(6):
            begin = time.perf_counter()
            handle = saver.save_async(f"a{number}")
            pauses.append(time.perf_counter() - begin)
            handle.wait()
    report(
        {
            "case": "dense state alone",
            "mib": mib,
            "first_ms": round(pauses[0] * 1e3, 1),
            "median_ms": round(statistics.median(pauses[1:]) * 1e3, 1),
        }
    )


if __name__ == "__main__":
    main()
