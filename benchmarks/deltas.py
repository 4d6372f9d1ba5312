"""What a delta costs beside a full save and beside what the others write for the same steps; one JSON line a case.

    python benchmarks/deltas.py --rows 4000000 --tmpfs /dev/shm --rounds 5
    python benchmarks/deltas.py --cases ratings --ratings ratings.csv.gz

A round changes one row in a hundred of a table of rows of 64 float32 and a slot, and has everybody save that. Nobody
syncs. ``small`` changes as few rows as a run that saves all the time, which shows what a delta costs that has next to
nothing to write; ``pause`` saves in the background, ``restore`` loads a full checkpoint and ten deltas, and ``ratings``
counts the bytes of a run over real data. benchmarks/compact.py makes one checkpoint of a chain.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from machine import describe_machine
from measuring import report, scratch, timed, touch_memory, warm
from peers import DIM, PEERS, State, model_of, unsynced

import recckpt
from recckpt import Deltas, Saver
from recckpt.sparse import HashTable

ONLY_DELTAS = Deltas(full_every=999, max_chain_bytes=999.0)
LINKS = 10
EXAMPLES = Path(__file__).parents[1] / "examples"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--changed", type=float, default=0.01, help="the part of the rows that a round changes")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--cases", nargs="*", default=["save", "small", "pause", "restore"])
    parser.add_argument("--ratings", type=Path, metavar="FILE", help="MovieLens ratings.csv[.gz], for the case ratings")
    parser.add_argument("--batch-size", type=int, default=64, help="of the case ratings")
    args = parser.parse_args()
    report({"case": "machine", **describe_machine()})
    cases: dict[str, Callable[[], None]] = {
        "save": lambda: compare_saves(args.tmpfs, args.rows, args.rounds, args.changed),
        "small": lambda: measure_small(args.tmpfs, args.rows, args.rounds),
        "pause": lambda: compare_pauses(args.tmpfs, args.rows, args.rounds, args.changed),
        "restore": lambda: compare_restores(args.tmpfs, args.rows, args.rounds, args.changed),
        "ratings": lambda: count_bytes(args.tmpfs, args.ratings, args.batch_size),
    }
    for case in args.cases:
        cases[case]()


class Changing:
    """The rows of the benchmark, of which each round changes some: as a table, and as the tensors of the others."""

    def __init__(self, rows: int, changed: float) -> None:
        self.state, self._random = State(rows), np.random.default_rng(0)
        [self.table] = self.state.model.children()
        self.n_changed = max(1, int(rows * changed))

    def change(self) -> None:
        """Change rows at random places."""
        rows = torch.from_numpy(self._random.choice(len(self.state.tensors["ids"]), self.n_changed, replace=False))
        fresh = torch.rand(self.n_changed, DIM)
        for name in ("embedding", "moment"):
            self.state.tensors[name][rows] = fresh
        assert isinstance(self.table, HashTable)
        self.table.insert(self.state.tensors["ids"][rows], fresh, {"moment": fresh})

    @property
    def changed_bytes(self) -> int:
        """Bytes of the rows of one round."""
        return self.n_changed * (8 + 2 * 4 * DIM)


def compare_saves(root: Path, rows: int, rounds: int, changed: float) -> None:
    changing = Changing(rows, changed)
    state, names = changing.state, ("full", "torch.save", "dcp", "safetensors")
    seconds: dict[str, list[float]] = {"delta": [], **{name: [] for name in names}}
    n_bytes: list[int] = []
    with scratch(root) as directory, unsynced():
        deltas = Saver(state.model, output_dir=str(directory / "deltas"), max_keep=1, deltas=ONLY_DELTAS)
        full = Saver(state.model, output_dir=str(directory / "full"), max_keep=1)
        deltas.save("ckpt_0")
        for number in range(rounds + 1):
            changing.change()
            took = {"delta": timed(lambda: deltas.save(f"ckpt_{number + 1}"))}  # noqa: B023  # called at once
            record = recckpt.CheckpointReader(str(directory / "deltas" / f"ckpt_{number + 1}")).manifest
            n_bytes.append(sum(file.n_bytes for file in record.files if file.name.startswith("sparse/")))
            for name in names:
                warm(directory, state.n_bytes, False)
                if name == "full":
                    took[name] = timed(lambda: full.save(f"ckpt_{number + 1}"))  # noqa: B023
                    continue
                target = directory / name
                target.mkdir()
                took[name] = timed(lambda: PEERS[name](state, target, False))  # noqa: B023
                shutil.rmtree(target)
            for name, value in took.items() if number else ():  # the first compiles, imports and touches
                seconds[name].append(value)
    medians = {name: median(values) for name, values in seconds.items()}
    report(
        {
            "case": "a delta beside what others write for the same steps, tmpfs, no fsync",
            "rows": rows,
            "changed": changed,
            "rounds": rounds,
            "gb": round(state.n_bytes / 1e9, 3),
            "median_sec": {name: round(value, 4) for name, value in medians.items()},
            "times_faster_than": {name: round(medians[name] / medians["delta"], 1) for name in names},
            "bytes_over_changed_rows": round(median(n_bytes) / changing.changed_bytes, 3),
            "all_sec": {name: [round(value, 4) for value in values] for name, values in seconds.items()},
            "target": {"times_faster_than full": 30, "bytes_over_changed_rows": 1.5},
        }
    )


def measure_small(root: Path, rows: int, rounds: int, n_changed: int = 100) -> None:
    """Seconds of deltas of a few rows, by the clock and of the processor, at each length of a chain as it comes."""
    changing = Changing(rows, n_changed / rows)
    wall, processor = list[float](), list[float]()
    with scratch(root) as directory, unsynced():
        saver = Saver(changing.state.model, output_dir=str(directory), deltas=Deltas(full_every=20))
        for number in range(1 + 20 * rounds):
            changing.change()
            begin = time.process_time()
            took = timed(lambda: saver.save(f"ckpt_{number}"))  # noqa: B023
            if number % 21 > 1:
                wall.append(took)
                processor.append(time.process_time() - begin)
    report(
        {
            "case": "a delta of a few rows, tmpfs, no fsync",
            "rows": rows,
            "changed_rows": changing.n_changed,
            "deltas": len(wall),
            "median_ms": round(median(wall) * 1e3, 1),
            "processor_ms": round(median(processor) * 1e3, 1),
        }
    )


def compare_pauses(root: Path, rows: int, rounds: int, changed: float) -> None:
    """How long a save in the background stops training: the call, until the next step may begin."""
    changing = Changing(rows, changed)
    pauses: dict[str, list[float]] = {"delta": [], "full": []}
    commits: dict[str, list[float]] = {"delta": [], "full": []}
    with scratch(root) as directory, unsynced():
        savers = {
            "delta": Saver(changing.state.model, output_dir=str(directory / "d"), max_keep=1, deltas=ONLY_DELTAS),
            "full": Saver(changing.state.model, output_dir=str(directory / "f"), max_keep=1),
        }
        for saver in savers.values():
            saver.save("ckpt_0")
        for number in range(rounds + 1):
            changing.change()
            for name, saver in savers.items():
                handles: list[Any] = []
                pause = timed(lambda: handles.append(saver.save_async(f"ckpt_{number + 1}")))  # noqa: B023
                commit = pause + timed(handles[0].wait)
                if number:
                    pauses[name].append(pause)
                    commits[name].append(commit)
    report(
        {
            "case": "the pause of a save in the background, tmpfs, no fsync",
            "rows": rows,
            "changed": changed,
            "rounds": rounds,
            "median_pause_ms": {name: round(median(values) * 1e3, 2) for name, values in pauses.items()},
            "median_commit_sec": {name: round(median(values), 3) for name, values in commits.items()},
            "target": {"pause_ms": 5},
        }
    )


def write_chain(changing: Changing, output_dir: Path) -> None:
    """Save a full checkpoint, ``full``, and a chain on it whose newest link is ``ckpt_10``."""
    with unsynced():
        Saver(changing.state.model, output_dir=str(output_dir / "full"), max_keep=1).save("ckpt_0")
        saver = Saver(changing.state.model, output_dir=str(output_dir / "chain"), max_keep=1, deltas=ONLY_DELTAS)
        saver.save("ckpt_0")
        for number in range(LINKS):
            changing.change()
            saver.save(f"ckpt_{number + 1}")


def compare_restores(root: Path, rows: int, rounds: int, changed: float) -> None:
    with scratch(root) as directory:
        changing = Changing(rows, changed)
        write_chain(changing, directory)
        n_bytes = changing.state.n_bytes
        del changing
        gc.collect()
        for with_rows in (False, True):
            seconds: dict[str, list[float]] = {"full": [], "chain": []}
            for number in range(rounds + 1):
                for name, values in seconds.items():
                    took = restore_seconds(directory / name, n_bytes, with_rows)
                    if number:
                        values.append(took)
            medians = {name: median(values) for name, values in seconds.items()}
            report(
                {
                    "case": f"restore into {'a table with rows' if with_rows else 'an empty table'}, tmpfs",
                    "rows": rows,
                    "links": 1 + LINKS,
                    "changed": changed,
                    "rounds": rounds,
                    "median_sec": {name: round(value, 3) for name, value in medians.items()},
                    "chain_over_full": round(medians["chain"] / medians["full"], 2),
                    "target": {"chain_over_full": 1.4},
                }
            )


def restore_seconds(output_dir: Path, n_bytes: int, with_rows: bool) -> float:
    model, table = model_of()
    saver = Saver(model, output_dir=str(output_dir))
    if with_rows:
        saver.load()
    else:
        touch_memory(2 * n_bytes)
    took = timed(saver.load)
    del model, table, saver
    gc.collect()
    return took


def count_bytes(root: Path, ratings: Path, batch_size: int, save_interval: int = 50, steps: int = 3000) -> None:
    """Bytes that a run over real data writes: all full, and with deltas."""
    sys.path.insert(0, str(EXAMPLES))
    from click_log import ClickLog, read_ratings  # found by the path above
    from train_ctr import Run

    written: dict[str, list[int]] = {"full": [], "deltas": []}
    torch.set_num_threads(1)
    with scratch(root) as directory, unsynced():
        for name, values in written.items():
            clicks = ClickLog(*read_ratings(str(ratings)), batch_size, 0)
            output_dir = str(directory / name)
            run = Run(clicks, output_dir, save_interval=save_interval, max_keep=2, seed=0, deltas=name == "deltas")
            run.train(steps)
            timeline = (directory / name / "timeline.jsonl").read_text().splitlines()
            values += [json.loads(line)["n_bytes"] for line in timeline]
    total = {name: sum(values) for name, values in written.items()}
    report(
        {
            "case": "bytes written by a run over ratings",
            "steps": steps,
            "batch_size": batch_size,
            "save_interval": save_interval,
            "saves": len(written["full"]),
            "mb": {name: round(value / 1e6, 2) for name, value in total.items()},
            "deltas_over_full": round(total["deltas"] / total["full"], 3),
        }
    )


if __name__ == "__main__":
    main()
