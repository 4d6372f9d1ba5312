"""A run that trains and saves while Ctrl-C comes every few milliseconds: ``interrupted_run.py DIR STEPS HITS HOW``.

HOW is ``waited`` for saves that are waited for, or ``async`` for saves in the background.

It takes so many steps at least, and goes on until so many interrupts have come through.

Prints how often it was interrupted and whether it ended bit for bit like a run that never was.
"""

import os
import random
import signal
import sys
import threading

import numpy as np
import torch
from torch import nn

from recckpt import Saver
from recckpt.sparse import HashTable, Normal, SparseAdamW
from support import disks


class Run:
    """Each phase of a step is tried again until it has been done once."""

    def __init__(self, output_dir: str, *, in_background: bool = False) -> None:
        self.table = HashTable(8, name="t", initializer=Normal())
        self.optim = SparseAdamW([self.table], lr=0.1)
        self.saver = Saver(nn.ModuleList([self.table]), self.optim, output_dir, 2)
        self.in_background = in_background
        self.step = self.phase = self.tries = 0
        self.loss = torch.empty(0)

    def train(self, n_steps: int) -> None:
        phases = [self.look_up, self.backward, self.optim.step, self.erase, self.save]
        while self.step < n_steps:
            self.tries += 1
            phases[self.phase]()
            is_last = self.phase == len(phases) - 1
            self.tries, self.phase, self.step = (0, 0, self.step + 1) if is_last else (0, self.phase + 1, self.step)

    @property
    def ids(self) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng(self.step).integers(0, 200 + 40 * self.step, 400))

    def look_up(self) -> None:
        self.loss = self.table(self.ids).square().sum()

    def backward(self) -> None:
        if (
            self.table.pending_gradients.of_rows(self.table.store) is None
        ):  # else it had got there when it was interrupted
            self.loss.backward(retain_graph=True)

    def erase(self) -> None:
        self.table.erase(self.ids[:20])

    def save(self) -> None:
        if self.in_background and self.step % 2:
            self.saver.save_async("newest", step=self.step, overwrite=True)
            self.saver.is_saving and self.saver.settle(0.001)
        elif self.step % 10 == 9:
            self.saver.save("newest", step=self.step, overwrite=True)

    @property
    def is_spared(self) -> bool:
        """Whether this is every third try of a phase: on a busy machine, one that is always interrupted never ends."""
        return self.tries > 0 and self.tries % 3 == 0

    def state(self) -> list[torch.Tensor]:
        ids = self.table.ids()
        order = torch.argsort(ids)
        slots = [self.table.slots[name] for name in sorted(self.table.slots)]
        return [values[order] for values in (ids, self.table.embeddings(), *slots)]


def interrupted(run: Run, n_steps: int, n_hits: int) -> int:
    """Train under a storm of SIGINT, until enough came through, and return how many did."""
    hits, is_armed, is_over = 0, False, threading.Event()

    def fire() -> None:
        while not is_over.wait(random.random() * 0.006):
            os.kill(os.getpid(), signal.SIGINT)

    def interrupt(*_: object) -> None:
        nonlocal is_armed
        if is_armed and not run.is_spared:
            is_armed = False
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    threading.Thread(target=fire, daemon=True).start()
    while not is_over.is_set():
        try:
            is_armed = True
            run.train(n_steps)
            is_armed = False
            n_steps += 10
            if hits >= n_hits:
                is_over.set()
        except KeyboardInterrupt:
            hits += 1
            torch.set_grad_enabled(True)  # torch.no_grad() leaves it off where it is interrupted as it begins or ends
    return hits


def main(root: str, n_steps: int, n_hits: int, how: str) -> None:
    disks.leave_to_the_kernel()
    straight, stormy = Run(f"{root}/straight"), Run(f"{root}/stormy", in_background=how == "async")
    resumed = Run(f"{root}/stormy")
    hits = interrupted(stormy, n_steps, n_hits)
    stormy.saver.save("newest", step=stormy.step, overwrite=True)
    straight.train(stormy.step)
    resumed.saver.load()
    expected = straight.state()
    for run in (stormy, resumed):
        assert all(torch.equal(*pair) for pair in zip(run.state(), expected, strict=True))
        assert run.optim.state_dict()["state"] == straight.optim.state_dict()["state"]
    print(f"interrupts {hits}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
