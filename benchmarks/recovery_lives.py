"""A trainer with near saves, and its lives: processes that are killed, and started anew on what the one before left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

_DIM = 64
_NEVER = 10**9  # steps
_PATIENCE = 1000  # steps beyond those that were asked for
Line = dict[str, Any]


@dataclass(frozen=True)
class Took:
    """What steps took: by the clock, of that in ``manager.step()``, of its processor, and of that in all threads."""

    sec: float
    held_sec: float
    held_cpu_sec: float
    cpu_sec: float


@dataclass(frozen=True)
class Recipe:
    """How a trainer trains and saves.

    Args:
        rows: of its table.
        look_ups: of a step.
        hidden: width of its dense network.
        threads: of the training; 0 for torch's own default.
        save_every: steps from one delta to the next; None for no saves but the first.
        near_every: steps from one near save to the next; None for none.
        accelerator_ms: how long each step waits, as for a network that an accelerator computes.
    """

    rows: int
    look_ups: int
    hidden: int
    threads: int
    save_every: int | None
    near_every: int | None
    accelerator_ms: float = 0.0


class Trainer:
    """A table with one slot and a dense network over it, with deltas in the background, and near saves.

    Args:
        root: holds the output dir and the near dir.
        recipe: how it trains and saves.
    """

    def __init__(self, root: Path, recipe: Recipe) -> None:
        import torch

        from recckpt import CheckpointManager, Deltas, Near, Saver
        from recckpt.sparse import HashTable, SparseAdagrad

        if recipe.threads:
            torch.set_num_threads(recipe.threads)
        torch.manual_seed(0)
        self._recipe, self._held_sec, self._held_cpu_sec = recipe, 0.0, 0.0
        self.table = HashTable(_DIM, name="item")
        self._sparse_optim = SparseAdagrad([self.table], lr=0.01)
        width = recipe.hidden
        layers = torch.nn.Linear(_DIM, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU()
        self._top = torch.nn.Sequential(*layers)
        self._dense_optim = torch.optim.SGD(self._top.parameters(), lr=0.01)
        self.saves: list[Line] = []
        self.saver = Saver(
            torch.nn.ModuleDict({"item": self.table, "top": self._top}),
            self._sparse_optim,
            str(root / "runs"),
            max_keep=2,
            deltas=Deltas(full_every=999, max_dirty=1.0, max_chain_bytes=1000),
            near=None if recipe.near_every is None else Near(root / "near", interval=recipe.near_every),
            on_save=self._note_save,
        )
        self.saver.register_for_checkpointing("dense_optim", self._dense_optim)
        self.manager = CheckpointManager(self.saver, recipe.save_every or _NEVER, async_save=True)

    def fill(self) -> None:
        """Make all rows, and a full checkpoint of them."""
        import torch

        self.table.reserve(self._recipe.rows)
        for ids in torch.split(torch.arange(self._recipe.rows), 100_000):
            self.table.insert(ids, torch.rand(len(ids), _DIM))
        self.manager.save()

    def step(self) -> None:
        """Train on skewed ids: the k-th most frequent comes 1/k as often as the first."""
        import torch

        ids = (self._recipe.rows ** torch.rand(self._recipe.look_ups, dtype=torch.float64)).long() - 1
        loss = self._top(self.table(ids)).square().mean()
        torch.autograd.backward(loss)
        time.sleep(self._recipe.accelerator_ms / 1e3)
        for optimizer in (self._sparse_optim, self._dense_optim):
            optimizer.step()
            optimizer.zero_grad()
        begin, cpu = time.perf_counter(), time.thread_time()
        self.manager.step()
        self._held_sec += time.perf_counter() - begin
        self._held_cpu_sec += time.thread_time() - cpu

    def train(self, n_steps: int) -> Took:
        """Make so many steps, and wait, beyond what they took, for saves that are under way then."""
        held, held_cpu = self._held_sec, self._held_cpu_sec
        begin, cpu = time.perf_counter(), time.process_time()
        for _ in range(n_steps):
            self.step()
        sec = time.perf_counter() - begin
        self._settle()
        return Took(sec, self._held_sec - held, self._held_cpu_sec - held_cpu, time.process_time() - cpu)

    def _settle(self) -> None:
        self.manager.wait_until_finished()
        if self.saver.near_saves is not None:
            self.saver.near_saves.settle()

    def _note_save(self, info: Any) -> None:
        if info.error is not None:
            raise info.error
        late = self.manager.global_step - (info.step or 0)
        self.saves.append({"pause_sec": info.blocked_sec, "late_sec": info.seconds, "late_steps": late})


class Life:
    """A process that restores, trains until it is killed, and says what it has done.

    Args:
        recipe: how it trains and saves.
        root: where it trains.
        loops: a directory for compiled loops, empty on a new host; None for where they are already.
    """

    def __init__(self, recipe: Recipe, root: Path, loops: Path | None = None) -> None:
        here = {"NUMBA_CACHE_DIR": str(loops)} if loops else {}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(root), json.dumps(asdict(recipe))],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **here},
        )
        assert recipe.near_every is not None
        self._near_every, self._near, self._due_at = recipe.near_every, 0, 0.0
        self.late_near: list[Line] = []  # from when a near save was due until it was acknowledged
        self.saves: list[Line] = []
        self.last = 0
        """The step that it has reached, and said so."""

    def read(self, what: str) -> Line:
        """Return the next of its lines that is of this kind."""
        while (line := self._next())["what"] != what:
            pass
        return line

    def train(self, n_steps: int) -> None:
        """Wait until it has made so many steps more, and then for the first near save and checkpoint, if need be."""
        most = self.last + n_steps + _PATIENCE
        while n_steps > 0 or not (self.saves and self.late_near):
            self.read("step")
            n_steps -= 1
            if self.last > most:
                raise SystemExit(f"no checkpoint or no near save in {most} steps: found {self.saves}, {self.late_near}")

    def kill(self) -> tuple[float, float]:
        """Kill it; return when, and when that was noticed."""
        killed = time.time()
        self._process.kill()
        self._process.wait()
        ended = time.time()
        assert self._process.stdout is not None
        for line in self._process.stdout:  # what it said before it died, of which the last may be torn
            if line.endswith("}\n"):
                self._take(json.loads(line))
        self._process.stdout.close()
        return killed, ended

    def _next(self) -> Line:
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise SystemExit(f"the trainer ended by itself, with {self._process.wait()}")
        return self._take(json.loads(text))

    def _take(self, line: Line) -> Line:
        if line["what"] == "step":
            self.last = line["step"]
            if line["near"] > self._near:
                late_steps = 1 + (self.last - 1) % self._near_every
                self.late_near.append({"late_steps": late_steps, "late_sec": line["time"] - self._due_at})
            self._near = line["near"]
            if self.last % self._near_every == 0:
                self._due_at = line["time"]
        elif line["what"] == "save":
            self.saves.append(line)
        return line


def live(root: Path, recipe: Recipe, out: IO[str]) -> None:
    """Restore, or begin, and train until this process is killed."""

    def say(what: str, **more: Any) -> None:
        line = {"what": what, "time": time.time(), "cpu_sec": time.process_time(), **more}
        out.write(json.dumps(line) + "\n")
        out.flush()

    trainer = Trainer(root, recipe)
    say("model")
    if not trainer.manager.restore():
        trainer.fill()
    say("restored", step=trainer.manager.global_step)
    while True:
        trainer.step()
        say("step", step=trainer.manager.global_step, near=trainer.manager.counts.near)
        while trainer.saves:
            say("save", **trainer.saves.pop(0))


if __name__ == "__main__":
    live(Path(sys.argv[1]), Recipe(**json.loads(sys.argv[2])), sys.stdout)
