"""A run that saves and rotates without a pause, and readers of it; driven by faults/test_readers_in_rotation.py.

As a process of its own it is one of the two: ``rotating_run.py write URL KIND`` saves checkpoints of a kind, "full" or
"delta", until its stdin ends, then prints how often; ``rotating_run.py read KIND URL READS STEPS`` reads ``READS``
times, and on until it has seen so many checkpoints, and prints what came of it.
"""

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

import numpy as np

from recckpt import CheckpointReader
from recckpt.errors import CheckpointRemovedError
from recckpt.sparse.files.arrow_format import column_buffer

N_ROWS = 300
TABLES = {"t": 4, "u": 6}  # of two groups, so that there are several parts
SLOT = "sparse_adagrad_sum"


class WrongReadError(AssertionError):
    """A read gave what no step of the run ever was."""


def check(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise WrongReadError(f"{what}: found {str(found)[:200]}, expected {str(expected)[:200]}")


class Run:
    """A run whose whole state follows from its step; of deltas, each has a row that was deleted and one that is new."""

    def __init__(self, url: str, kind: str = "full") -> None:
        import torch
        from torch import nn

        from recckpt import CheckpointManager, Deltas, Saver
        from recckpt.sparse import HashTable, SparseAdagrad

        self.torch = torch
        self.tables = {name: HashTable(dim, name=name) for name, dim in TABLES.items()}
        self.top = nn.Linear(4, 1)
        modules = nn.ModuleDict({**self.tables, "top": self.top})
        self.deltas = Deltas(full_every=5, max_dirty=1.0, max_chain_bytes=100.0) if kind == "delta" else False
        optimizer = SparseAdagrad(list(self.tables.values()))
        self.saver = Saver(modules, optimizer, url, max_keep=1, concurrency=2, deltas=self.deltas)
        self.manager = CheckpointManager(self.saver, 1)
        self.position = -1
        self.saver.register_io_state("stream", self)

    def dump_io_state(self) -> dict[str, int]:
        return {"position": self.position}

    def load_io_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def save(self) -> None:
        """Take a step, and with it the state of that step, which the manager saves."""
        step = self.manager.global_step + 1
        ids = self.torch.arange(step, step + N_ROWS)
        for name, dim in TABLES.items():
            values = self.torch.full((N_ROWS, dim), float(step))
            if self.deltas:
                self.tables[name].erase(self.torch.tensor([step - 1]))
            else:
                self.tables[name].clear()
            self.tables[name].insert(ids, values, {SLOT: values + 1})
        with self.torch.no_grad():
            self.top.weight.fill_(step)
        self.position = step
        self.manager.step()

    def checked(self) -> int:
        """Compare the model with that of the step that its dense part is of, and return the step."""
        torch = self.torch
        [weight] = self.top.weight.unique().tolist()
        step = int(weight)
        for name, table in self.tables.items():
            check(f"rows of {name}", len(table), N_ROWS)
            values, _ = table.lookup(torch.arange(step, step + N_ROWS))
            check(f"ids of {name}", sorted(table.ids().tolist()), list(range(step, step + N_ROWS)))
            check(f"values of {name}", values.unique().tolist(), [step])
            check(f"slots of {name}", table.slots[SLOT].unique().tolist(), [step + 1])
        return step


def check_rows(step: int, rows: dict[int, Any]) -> None:
    check("ids", sorted(rows), list(range(step, step + N_ROWS)))
    for values in rows.values():
        check("values", {float(v) for v in values}, {float(step)})


def by_reader(url: str) -> Callable[[], int]:
    def read() -> int:
        with CheckpointReader(url) as reader:
            step = reader.manifest.step
            assert step is not None
            for name, dim in TABLES.items():
                rows = {}
                for batch in reader.table(name):
                    values = np.frombuffer(column_buffer(batch.column("embedding")), np.float32).reshape(-1, dim)
                    rows |= dict(zip(batch.column("id").to_pylist(), values, strict=True))
                check_rows(step, rows)
            check("dense", set(reader.read_tensor("top.weight").ravel().tolist()), {step})
        return step

    return read


def by_load(url: str) -> Callable[[], int]:
    run = Run("memory://elsewhere")

    def read() -> int:
        run.saver.load(ckpt_path=url)
        return run.checked()

    return read


def by_bank(url: str) -> Callable[[], int]:
    run = Run("memory://elsewhere")

    def read() -> int:
        run.saver.load_by_config({"path": url})
        return run.checked()

    return read


def by_restore(url: str) -> Callable[[], int]:
    run = Run(url)

    def read() -> int:
        step = run.manager.restore(required=True)
        check("position", run.position, step)
        check("step", run.checked(), step)
        return step

    return read


def by_command(url: str) -> Callable[[], int]:
    from recckpt.cli import main

    def command(*args: str) -> Any:
        out, err = StringIO(), StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main([*args, "--json"])
        if code and "its writer removed" in err.getvalue():
            raise CheckpointRemovedError(url)
        if code:
            raise RuntimeError(err.getvalue())
        return json.loads(out.getvalue())

    def read() -> int:
        rows = command("head", url, "t", "-n", "1000")["rows"]
        step = min(row["id"] for row in rows)
        check_rows(step, {row["id"]: row["embedding"] for row in rows})
        shown = command("show", url)
        check("rows", shown["rows"], 2 * N_ROWS)
        check("tensors", [t["name"] for t in shown["tensors"]], ["top.weight", "top.bias"])
        try:
            row = command("get", url, "u", str(shown["step"] + N_ROWS // 2))["rows"][0]
        except RuntimeError as error:  # the run has gone on so far that the id is none any more
            if "has no row of id" not in str(error):
                raise
            return step
        check("one row", len(set(row["embedding"])), 1)
        return step

    return read


READERS = {"reader": by_reader, "load": by_load, "bank": by_bank, "restore": by_restore, "command": by_command}


def read_often(kind: str, url: str, n_reads: int, n_steps: int = 0) -> dict[str, Any]:
    """Read so often, and on until so many checkpoints were seen, the ``steps``; count what came of it."""
    outcomes = Counter(reads=0, wrong=0, removed=0, errors=0)
    steps: set[int] = set()
    told: list[str] = []
    read = READERS[kind](url)
    # On a busy machine many reads may see one save; where the writer hangs this ends as well.
    while outcomes["reads"] < n_reads or (len(steps) < n_steps and outcomes["reads"] < 100 * n_reads):
        outcomes["reads"] += 1
        try:
            steps.add(read())
        except CheckpointRemovedError:
            outcomes["removed"] += 1  # honest, and expected of storage where nothing can be held
        except WrongReadError as error:
            outcomes["wrong"] += 1
            told.append(f"{kind}: {error}")
        except Exception as error:
            outcomes["errors"] += 1
            told.append(f"{kind}: {type(error).__name__}: {error}")
    return {**outcomes, "steps": len(steps), "told": told[:5]}


def write_until(stop: threading.Event, url: str, ready: Callable[[], object], kind: str) -> int:
    """Save without a pause; returns how often."""
    run = Run(url, kind)
    run.save()
    ready()
    while not stop.is_set():
        run.save()
    return run.manager.global_step


def main() -> None:
    role, *args = sys.argv[1:]
    if role == "read":
        kind, url, n_reads, n_steps = args
        print(json.dumps(read_often(kind, url, int(n_reads), int(n_steps))), flush=True)
        return
    import torch

    torch.set_num_threads(1)
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    print(write_until(stop, args[0], lambda: print("ready", flush=True), args[1]), flush=True)


if __name__ == "__main__":
    main()
