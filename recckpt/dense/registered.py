"""Registered objects and random generators: their state taken and given back, with no word of files."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from recckpt.dense.buffers import Copy, as_it_is
from recckpt.dense.named_optimizer import NamedOptimizer
from recckpt.dense.portable import portable
from recckpt.errors import StateMismatchError
from recckpt.format.layout import SPARSE_OPTIM


class Registry:
    """Named objects that are saved beside the model.

    An object has one of the pairs ``dump_io_state``/``load_io_state`` (dataset positions only) and
    ``state_dict``/``load_state_dict``, or is a plain value, which is its own state.

    Args:
        what: what the objects are, for messages.
        methods: (dump, load) names of methods, tried in order.
        plain: whether plain values are taken.
        adapter: gives what stands for an object when its state is taken or given; by default itself.
    """

    def __init__(
        self,
        what: str,
        methods: tuple[tuple[str, str], ...],
        *,
        plain: bool,
        adapter: Callable[[Any], Any] = lambda obj: obj,
    ) -> None:
        self._what, self._methods, self._plain, self._adapter = what, methods, plain, adapter
        self._objects: dict[str, Any] = {}
        self._unclaimed: dict[str, Any] = {}  # states that were loaded for names that nobody registered

    def add(self, name: str, obj: Any) -> None:
        """Register an object.

        Raises:
            ValueError: the name is empty, reserved or taken, or the object has no state to take.
        """
        if not isinstance(name, str) or not name or name == SPARSE_OPTIM:
            raise ValueError(f"{self._what}: {name!r} is no name to register under; choose another")
        if name in self._objects:
            raise ValueError(f"{self._what}: the name {name!r} is registered already; names are unique")
        if self._pair(obj) is None:
            if not self._plain:
                pairs = " or ".join("/".join(pair) for pair in self._methods)
                raise ValueError(f"{self._what}: {name!r} has neither {pairs}; give it one of these pairs of methods")
            portable(name, obj)
        self._objects[name] = obj

    def get(self, name: str) -> Any:
        """Return the object of a name; of a plain value or a name that is not registered, what was last loaded."""
        known = {**self._unclaimed, **self._objects}
        if name not in known:
            names = ", ".join(map(repr, known)) or "nothing"
            raise KeyError(f"{self._what}: nothing is registered as {name!r}, nor was loaded for it; there is {names}")
        return known[name]

    def __contains__(self, name: str) -> bool:
        return name in self._objects

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[str]:
        return iter(self._objects)

    def dump(self, copy: Copy = as_it_is) -> dict[str, Any]:
        """Return the state of all objects as portable data.

        Args:
            copy: what the tensors in it pass through, such as :meth:`recckpt.dense.buffers.DenseBuffers.copying`.

        Raises:
            ValueError: a state holds something that could not be loaded back safely; names the key.
        """
        return {
            name: portable(f"{self._what} {name!r}", copy((self._what, name), self._state(obj)))
            for name, obj in self._objects.items()
        }

    def load(self, states: Mapping[str, Any]) -> list[str]:
        """Give registered objects their states, keep those of other names, and return what started fresh.

        Raises:
            StateMismatchError: an object refused its state; names it.
        """
        return [f"{name}: {fresh}" for name, state in states.items() for fresh in self._give(name, state)]

    def merged(self, name: str, states: list[Any], index: int, count: int) -> Any:
        """Return the state of shard ``index`` of ``count``, which an object makes from those of other shards.

        Raises:
            StateMismatchError: the object refused to; names it.
        """
        obj = self._objects[name]
        with _refusals_named(name, obj, "merge_io_state"):
            return obj.merge_io_state(states, index, count)

    def beside(self, name: str, saved: Any) -> tuple[Any, Any]:
        """Return what of a saved state the object will take, and live state of the same form where there is any."""
        try:
            obj = self._adapter(self._objects[name])
            return obj.beside(saved) if isinstance(obj, NamedOptimizer) else (saved, self._state(self._objects[name]))
        except Exception:  # a state of another kind, which the object refuses when it gets it; or it has none yet
            return saved, None

    @contextmanager
    def loaded(self, states: Mapping[str, Any]) -> Iterator[list[str]]:
        """Load the states; if one is refused, or the block fails, the objects get back what they had."""
        before = {}
        for name in states:
            with suppress(Exception):  # a dataset that has not begun may have no position to go back to
                before[name] = deepcopy(self._state(self._objects[name]))
        try:
            yield self.load(states)
        except BaseException:
            for name, state in before.items():
                with suppress(StateMismatchError):  # the error that led here is the one to report
                    self._give(name, state)
            raise

    def _give(self, name: str, state: Any) -> list[str]:
        """Load one state and return the parameters of an optimizer that started fresh."""
        if name not in self._objects:
            self._unclaimed[name] = state
            return []
        obj = self._adapter(self._objects[name])
        pair = self._pair(obj)
        if pair is None:
            self._objects[name] = state
            return []
        with _refusals_named(name, obj, pair[1]):
            getattr(obj, pair[1])(state)
        return obj.fresh if isinstance(obj, NamedOptimizer) else []

    def _state(self, obj: Any) -> Any:
        obj = self._adapter(obj)
        pair = self._pair(obj)
        return obj if pair is None else getattr(obj, pair[0])()

    def _pair(self, obj: Any) -> tuple[str, str] | None:
        for dump, load in self._methods:
            if callable(getattr(obj, dump, None)) and callable(getattr(obj, load, None)):
                return dump, load
        return None


@contextmanager
def _refusals_named(name: str, obj: Any, method: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        refusal = f"{type(obj).__qualname__}.{method} refused it: {type(error).__name__}: {error}"
        raise StateMismatchError(f"the state of {name!r}", remedy=refusal) from error


def extra_registry(adapter: Callable[[Any], Any] = lambda obj: obj) -> Registry:
    """Return a registry of objects to checkpoint."""
    methods = (("state_dict", "load_state_dict"),)
    return Registry("register_for_checkpointing", methods, plain=True, adapter=adapter)


def io_registry() -> Registry:
    """Return a registry of dataset positions."""
    methods = (("dump_io_state", "load_io_state"), ("state_dict", "load_state_dict"))
    return Registry("register_io_state", methods, plain=False)


def dump_rng() -> dict[str, Any]:
    """Return the state of the random generators of this process: torch, CUDA, numpy and Python."""
    kind, keys, *rest = np.random.get_state()
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # asking must not start CUDA
    cuda = torch.cuda.get_rng_state_all() if initialized else []
    states = {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "numpy": [kind, keys, *rest],
        "python": random.getstate(),
    }
    return {name: portable(f"random state of {name}", state) for name, state in states.items()}


def check_rng(states: Mapping[str, Any]) -> None:
    """Raise ValueError where :func:`load_rng` could not take the states; the generators are left alone."""
    try:
        torch.Generator().set_state(states["torch"])
        devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        for number, state in enumerate(states["cuda"]):
            if state.dtype != torch.uint8:
                raise TypeError(f"the state of CUDA device {number} is of {state.dtype}")
            for device in devices[number : number + 1]:
                torch.Generator(device).set_state(state)
        kind, keys, *rest = states["numpy"]
        np.random.RandomState().set_state((kind, keys.numpy(), *rest))
        random.Random().setstate(states["python"])
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def load_rng(states: Mapping[str, Any]) -> None:
    """Give the random generators of this process back their state; those of absent devices are left out."""
    torch.set_rng_state(states["torch"])
    for device, state in zip(range(torch.cuda.device_count()), states["cuda"], strict=False):
        torch.cuda.set_rng_state(state, device)
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy(), *rest))
    random.setstate(states["python"])
