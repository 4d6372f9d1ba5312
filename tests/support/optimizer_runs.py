"""A small model trained by any optimizer, saved midway: how the resumed run differs from the straight one."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recckpt import Saver
from support.builders import frozen

STEPS = 4  # before the save, and after it

Make = Callable[[nn.Module], Any]
Step = Callable[[Any, Callable[[], Tensor]], object]


class Net(nn.Module):
    """An embedding and two layers, whose weights are matrices of several shapes, and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.wide, self.top = nn.Embedding(20, 16), nn.Linear(16, 24), nn.Linear(24, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(torch.tanh(self.wide(self.items(ids).mean(1))))


def net(dtype: torch.dtype = torch.float32) -> Net:
    """Return the model as each run begins with it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net().to(dtype)


def by_closure(optimizer: Any, loss: Callable[[], Tensor]) -> None:
    """Step an optimizer that may ask for the loss more than once."""

    @torch.enable_grad()  # some call it where there are no gradients
    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)


def trained(model: Net, optimizer: Any, steps: Iterable[int], step: Step = by_closure) -> None:
    """Train some steps, each of which has a batch and random numbers of its own."""
    for number in steps:
        draw = torch.Generator().manual_seed(number)
        ids = torch.randint(0, 20, (8, 3), generator=draw)
        wanted = torch.randn(8, 3, generator=draw).to(model.top.weight.dtype)
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)  # some draw from here: Kron of pytorch-optimizer, once in a hundred steps
        step(optimizer, lambda ids=ids, wanted=wanted: ((model(ids) - wanted) ** 2).mean())


def differences(
    root: Path, runs: Mapping[str, tuple[Make, Step]], dtype: torch.dtype = torch.float32
) -> dict[str, list[str]]:
    """Train a model by each optimizer, save all in one checkpoint, and go on; resume, and go on as well.

    Return what differs in weights, state, settings, dtypes or strides, by the name of the run; nothing of those that
    are equal.
    """
    straight, resumed = (_Runs(root, runs, dtype) for _ in range(2))
    straight.train(range(STEPS))
    straight.saver.save("c", step=1)
    at_save = straight.states()
    straight.train(range(STEPS, 2 * STEPS))
    resumed.saver.load()
    after_load = resumed.states()
    resumed.train(range(STEPS, 2 * STEPS))
    found = {
        name: [
            *_differences(at_save[name], after_load[name], "after the load: "),
            *_differences(straight.states()[name], resumed.states()[name], "at the end: "),
        ]
        for name in runs
    }
    return {name: lines for name, lines in found.items() if lines}


class _Runs:
    def __init__(self, root: Path, runs: Mapping[str, tuple[Make, Step]], dtype: torch.dtype) -> None:
        self._steps = {name: step for name, (_, step) in runs.items()}
        self._models = {name: net(dtype) for name in runs}
        self._optimizers = {name: make(self._models[name]) for name, (make, _) in runs.items()}
        self.saver = Saver(
            nn.ModuleDict({f"of_{name}": model for name, model in self._models.items()}), output_dir=root
        )
        for name, optimizer in self._optimizers.items():
            self.saver.register_for_checkpointing(name, optimizer)

    def train(self, steps: Iterable[int]) -> None:
        for name, optimizer in self._optimizers.items():
            trained(self._models[name], optimizer, steps, self._steps[name])

    def states(self) -> dict[str, Any]:
        """Return what each run is made of, as it is now."""
        return {
            name: copy.deepcopy({"weights": model.state_dict(), "optimizer": self._optimizers[name].state_dict()})
            for name, model in self._models.items()
        }


def _differences(one: Any, other: Any, place: str) -> list[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        lines = [f"{place}[{key!r}] is lost" for key in one if key not in other]
        lines += [f"{place}[{key!r}] is new" for key in other if key not in one]
        return lines + [
            line for key in one if key in other for line in _differences(one[key], other[key], f"{place}[{key!r}]")
        ]
    if isinstance(one, list | tuple) and type(one) is type(other) and len(one) == len(other):
        return [
            line
            for number, pair in enumerate(zip(one, other, strict=True))
            for line in _differences(*pair, f"{place}[{number}]")
        ]
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        pair = [(str(each.dtype), tuple(each.shape), _strides(each)) for each in (one, other)]
        lines = [f"{place}: {pair[0]} -> {pair[1]}"] if pair[0] != pair[1] else []
        return lines or ([f"{place}: other values"] if frozen(one) != frozen(other) else [])
    return [] if type(one) is type(other) and one == other else [f"{place}: {one!r:.60} -> {other!r:.60}"]


def _strides(tensor: Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def classes_of(module: Any) -> dict[str, type[Optimizer]]:
    """Return the optimizers that a module offers, by name."""
    found = {name: getattr(module, name) for name in dir(module)}
    return {
        name: kind
        for name, kind in found.items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
