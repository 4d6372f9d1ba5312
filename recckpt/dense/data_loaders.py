"""Saves the random generators and the positions of torchdata's data loaders: both decide the order of data."""

from __future__ import annotations

import random
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from recckpt.dense.state_copy import portable

_GENERATORS, _HAS_ENDED = "recckpt_generators", "recckpt_has_ended"  # keys added to the state of a loader


class LoaderPosition:
    """Wraps a ``StatefulDataLoader`` so that its state includes random generators.

    A new iterator draws seeds and an order from torch's generator, the loader's and the sampler's. When a run resumes
    within an epoch, its new iterator starts from the generator states that the saved run's iterator started from. So a
    sampler without a state draws the same order. Then the generators are set back to their saved states.

    Attributes:
        is_passed_by: whether an iterator from before the load still exists; such an iterator ignores the loaded state.
    """

    def __init__(self, loader: Any) -> None:
        self.is_passed_by = False
        self._loader, self._base = loader, _base(loader)
        self._make = self._base._get_iterator
        self._begun: Mapping[str, Any] | None = None  # generator states before the present iterator was made
        self._base._get_iterator = self._iterator
        if self._base._initial_iter_for_state_dict:  # an unused iterator, made when accelerate asked for the state
            self._base.load_state_dict({})  # drops that iterator

    @property
    def has_failed(self) -> bool:
        """Whether the loader failed to read the last batch, so that its position is after this batch."""
        iterator = vars(self._base._iterator) if self._base._iterator is not None else {}
        is_reading_here = not self._base.num_workers
        return is_reading_here and iterator.get("_sampler_iter_yielded", 0) > iterator.get("_num_yielded", 0)

    def state_dict(self) -> dict[str, Any]:
        state = self._loader.state_dict()
        generators = {"begun": self._begun, "now": self._own_states()}
        if self._loader is not self._base:  # the wrapper of accelerate seeds some samplers with these values
            generators["iteration"] = self._loader.iteration
            generators["initial_seed"] = getattr(_sampler(self._base), "initial_seed", None)
        return {**state, _GENERATORS: generators}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state; the next iterator begins at its position."""
        state = dict(state)
        generators = state.pop(_GENERATORS, {})
        before = self._base._iterator and weakref.ref(self._base._iterator)
        self._loader.load_state_dict(state)
        self.is_passed_by = before is not None and before() is not None
        self._begun = generators.get("begun")
        self._set_own(generators.get("now", {}))
        if self._loader is not self._base and "iteration" in generators:
            self._loader.iteration = generators["iteration"] + bool(state.get("_iterator_finished"))
            if (seed := generators["initial_seed"]) is not None:
                _sampler(self._base).initial_seed = seed

    def _iterator(self) -> Any:  # replaces the loader's own method
        state = self._base.next_iter_state
        if state is None:
            self._note_begin(is_new=True)
            iterator = self._make()
        else:
            of_process, own = dump_rng(), self._own_states()
            again = None if state.get("_iterator_finished") else self._begun
            iterator = self._make() if again is None else self._made_again(again)
            load_rng(of_process)
            sampler = _sampler(self._base)  # a sampler with a state_dict is restored with the loader and draws nothing
            if again is None or hasattr(sampler, "state_dict") or type(sampler).__module__.startswith("torchdata."):
                self._set_own(own)
        if self._base.persistent_workers:
            iterator._reset = self._begin_again
        return iterator

    def _made_again(self, begun: Mapping[str, Any]) -> Any:
        """Return an iterator whose sampler draws the order of the saved run and has skipped the used batches."""
        base, own = self._base, self._base.generator
        load_rng(begun["of_process"])
        self._set_own(begun["own"])
        if not begun["is_new"]:
            # A new iterator draws a seed before its sampler draws; the saved run reused its iterator and drew no seed.
            base.generator = torch.Generator()
        try:
            iterator = self._make()
        finally:
            base.generator = own
        if isinstance(iterator._sampler_iter, islice) and not base.num_workers:  # skip now, not at the next batch
            iterator._sampler_iter = rest = iter(iterator._index_sampler)
            deque(islice(rest, iterator._sampler_iter_yielded), maxlen=0)
        return iterator

    def _begin_again(self, loader: Any, *args: Any) -> None:
        """Begin an epoch with the present iterator, which keeps its persistent workers."""
        self._note_begin(is_new=False)
        type(loader._iterator)._reset(loader._iterator, loader, *args)

    def _note_begin(self, *, is_new: bool) -> None:
        self._begun = {"of_process": dump_rng(), "own": self._own_states(), "is_new": is_new}

    def _own_states(self) -> dict[str, Any]:
        return {name: generator.get_state() for name, generator in self._own()}

    def _set_own(self, states: Mapping[str, Any]) -> None:
        for name, generator in self._own():
            if name in states:
                generator.set_state(states[name])

    def _own(self) -> Iterator[tuple[str, torch.Generator]]:
        batches = self._base.batch_sampler
        owners = {"loader": self._base, "sampler": _sampler(self._base), "batch_sampler": batches}
        for name, owner in owners.items():
            if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
                yield name, generator


class NodesPosition:
    """Wraps a ``Loader`` of ``torchdata.nodes`` so that its state says whether its iterator has ended.

    Without that, a loader that gave its last batch begins a new epoch when it resumes, though a loop is yet to see the
    end of the old one; and one that does not restart by itself resumes with an empty epoch after an epoch has ended.
    """

    def __init__(self, loader: Any) -> None:
        self._loader, self._has_ended = loader, False
        root = loader.root
        self._next, self._reset = root.next, root.reset
        root.next, root.reset = self._note_end, self._note_begin

    def state_dict(self) -> dict[str, Any]:
        return {**self._loader.state_dict(), _HAS_ENDED: self._has_ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self._loader.restart_on_stop_iteration = state.pop(_HAS_ENDED, self._loader.restart_on_stop_iteration)
        self._loader.load_state_dict(state)

    def _note_end(self) -> Any:  # replaces the root's own method
        try:
            return self._next()
        except StopIteration:
            self._has_ended = True
            raise

    def _note_begin(self, initial_state: dict[str, Any] | None = None) -> None:
        self._has_ended = False
        self._reset(initial_state)


def position_of(obj: Any) -> Any:
    """Return a wrapper for a loader of torchdata, and any other object unchanged.

    Call this before the loader makes an iterator, because only later iterators are tracked.
    """
    nodes = sys.modules.get("torchdata.nodes")
    if nodes is not None and isinstance(obj, nodes.Loader):
        known = getattr(obj.root.next, "__self__", None)
        return known if isinstance(known, NodesPosition) else NodesPosition(obj)
    if not is_stateful(obj):
        return obj
    known = getattr(_base(obj)._get_iterator, "__self__", None)
    return known if isinstance(known, LoaderPosition) else LoaderPosition(obj)


def is_stateful(obj: Any) -> bool:
    """Return whether this is a ``StatefulDataLoader`` of torchdata, or wraps one as accelerate does."""
    module = sys.modules.get("torchdata.stateful_dataloader")
    return module is not None and isinstance(obj, module.StatefulDataLoader)


def shuffling_loaders(frame: FrameType | None) -> dict[str, DataLoader[Any]]:
    """Return the shuffling data loaders among the variables of a frame and its callers, by name."""
    loaders: dict[int, tuple[str, DataLoader[Any]]] = {}
    while frame is not None:
        variables = list(frame.f_locals.items())
        with suppress(Exception):
            variables = [*((f"self.{name}", value) for name, value in vars(frame.f_locals["self"]).items()), *variables]
        for name, value in variables:
            with suppress(Exception):  # an unbound proxy may raise at any attribute access
                if not isinstance(value, DataLoader):
                    continue
                sampler = _sampler(value)
                is_random = any("Random" in kind.__name__ for kind in type(sampler).__mro__)
                if getattr(sampler, "shuffle", False) or is_random:
                    loaders.setdefault(id(value), (name, value))
        frame = frame.f_back
    return dict(loaders.values())


def _sampler(loader: Any) -> Any:
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def _base(loader: Any) -> Any:
    return getattr(loader, "base_dataloader", loader)


def dump_rng() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # because get_rng_state starts CUDA
    cuda = torch.cuda.get_rng_state_all() if initialized else []
    states = {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "numpy": [kind, keys, *rest],
        "python": random.getstate(),
    }
    return {name: portable(f"random state of {name}", state) for name, state in states.items()}


def check_rng(states: Mapping[str, Any]) -> None:
    """Raise ValueError if :func:`load_rng` would refuse the states; no generator changes."""
    try:
        torch.Generator().set_state(states["torch"])
        devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        for number, state in enumerate(states["cuda"]):
            if state.dtype != torch.uint8:
                raise TypeError(f"the state of CUDA device {number} has dtype {state.dtype}")
            for device in devices[number : number + 1]:
                torch.Generator(device).set_state(state)
        kind, keys, *rest = states["numpy"]
        np.random.RandomState().set_state((kind, keys.numpy(), *rest))
        random.Random().setstate(states["python"])
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def load_rng(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    for device, state in zip(range(torch.cuda.device_count()), states["cuda"], strict=False):
        torch.cuda.set_rng_state(state, device)
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy(), *rest))
    random.setstate(states["python"])
