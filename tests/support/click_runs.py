"""Runs that leave checkpoints in ``runs/clicks``, as those of a user whose job does not resume."""

from __future__ import annotations

from pathlib import Path

import torch

from recckpt import CheckpointManager, Saver
from recckpt.sparse import HashTable, SparseAdamW
from support.builders import flip_bit


class Model(torch.nn.Module):
    def __init__(self, dim: int = 16, dense: int = 2) -> None:
        super().__init__()
        self.user = HashTable(dim, name="user")
        self.dense = torch.nn.Linear(dim, dense)


def made(model: Model | None = None, output_dir: str = "runs/clicks", **options: object) -> CheckpointManager:
    model = model or Model()
    optim = SparseAdamW([model.user])
    return CheckpointManager(Saver(model, optim, output_dir, **{"max_keep": 3, **options}), save_interval=100)


def trained(steps: int = 2, **options: object) -> CheckpointManager:
    """Leave checkpoints ckpt_100, ckpt_200, ... in runs/clicks."""
    manager = made(**options)
    model = manager.saver.model
    model.user.insert(torch.arange(50), torch.ones(50, 16))
    for step in range(1, steps + 1):
        model.user.insert(torch.arange(step), torch.ones(step, 16))
        go_on(manager, 100 * step)
    return manager


def go_on(manager: CheckpointManager, step: int) -> None:
    while manager.global_step < step:
        manager.step()


class Position:
    """A dataset that says where it is."""

    def state_dict(self) -> dict[str, int]:
        return {"at": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def damage(ckpt: str) -> None:
    flip_bit(next(Path(ckpt, "sparse").glob("*.arrow")))
