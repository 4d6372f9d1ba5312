"""Saves and loads the states of registered objects. A plain value is its own state; a load fills it in place."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from recckpt.dense.data_loaders import LoaderPosition, position_of
from recckpt.dense.keyed_optimizer import KeyedOptimizer
from recckpt.dense.optimizers import NamedOptimizer, ZeroOptimizer, give_state, schedulers_in
from recckpt.dense.state_copy import MAPPINGS, Copy, as_it_is, portable
from recckpt.dense.tensors import StoredTensor
from recckpt.errors import StateMismatchError
from recckpt.format.layout import SPARSE_OPTIM, is_encodable
from recckpt.text import first_few, nearest
from recckpt.types import flag

log = logging.getLogger("recckpt")
_LIBC = ctypes.CDLL(None)
_CONTAINERS = (list, *MAPPINGS, set)
_OF_SEVERAL = ("_schedulers", "_milestones")  # private keys of a scheduler's state that tell its kind
_STATE_DICT = ("state_dict", "load_state_dict")

_A_GENERATOR = (
    "a torch.Generator, which has no state_dict: register an object whose state_dict() returns "
    "{'state': generator.get_state()} and whose load_state_dict(state) calls generator.set_state(state['state']); "
    "torch's global generators are saved anyway"
)


class Registry:
    """Named objects that are saved together with the model.

    An object has one of the (dump, load) pairs in ``methods``, tried in order; if ``plain``, it may be a plain value
    instead. ``adapter`` returns the wrapper through which the state of an object is read and set. A load never asks an
    object for its state, because a data loader might then begin to read and ignore the position that it gets later.
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
        self.objects: dict[str, Any] = {}  # by name
        self._of_ranks: set[str] = set()
        self._unclaimed: dict[str, Any] = {}  # loaded states whose names are not registered
        self._has_warned = False

    def add(self, name: str, obj: Any, *, per_rank: bool = False) -> None:
        """Register an object that has a state; with ``per_rank`` each rank saves its own state, which ZeRO needs."""
        if not isinstance(name, str):
            kind = type(name).__name__
            raise ValueError(f"{self._what}: a {kind} cannot be registered as a name: pass the name, a string, first")
        if not name or name == SPARSE_OPTIM or not is_encodable(name):
            raise ValueError(f"{self._what}: {name!r} cannot be registered; choose another name")
        flag("per_rank", per_rank)
        if name in self.objects:
            raise ValueError(f"{self._what}: the name {name!r} is registered already; names are unique")
        self.check_new(name, obj)
        if isinstance(obj, torch.Generator):
            raise ValueError(f"{self._what}: {name!r} is {_A_GENERATOR}")
        if self._pair(obj) is None:
            if not self._plain:
                pairs = " nor ".join("/".join(pair) for pair in self._methods)
                raise ValueError(f"{self._what}: {name!r} has neither {pairs}; give it one of these pairs of methods")
            portable(name, obj)
        self.objects[name] = obj
        if per_rank or self.gathers(name):
            self._of_ranks.add(name)

    def check_new(self, name: str, obj: Any) -> None:
        """Raise ValueError if the object is registered under another name, because a load would give it two states."""
        is_one = is_filled(obj) or self._pair(obj) is not None
        twin = next((known for known, own in self.objects.items() if is_one and own is obj), None)
        if twin is not None:
            raise ValueError(
                f"{self._what}: {twin!r} and {name!r} are the same {type(obj).__name__}: keep one of the two names"
            )

    def get(self, name: str) -> Any:
        """Return the object registered under a name, else the state last loaded for it, else None with a warning."""
        known = {**self._unclaimed, **self.objects}
        if name not in known:
            log.warning(
                "%s: nothing is registered as %r, nor was loaded for it%s", self._what, name, nearest(name, known)
            )
        return known.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self.objects

    def __len__(self) -> int:
        return len(self.objects)

    def __iter__(self) -> Iterator[str]:
        return iter(self.objects)

    def is_of_ranks(self, name: str) -> bool:
        return name in self._of_ranks

    def gathers(self, name: str) -> bool:
        return name in self.objects and isinstance(self._adapted(name), ZeroOptimizer | KeyedOptimizer)

    def gathered(
        self, name: str, saved: Iterable[Any], stored: Callable[[str], StoredTensor]
    ) -> tuple[Any, Any] | None:
        """Return :meth:`KeyedOptimizer.gathered`; None if the object is not a keyed optimizer."""
        obj = self._adapted(name)
        return obj.gathered(name, saved, stored) if isinstance(obj, KeyedOptimizer) else None

    def dump(self, copy: Copy = as_it_is, *, of_ranks: bool = False) -> dict[str, Any]:
        """Return name -> state as portable data, of objects with one state per rank if ``of_ranks``, else the others.

        ``copy`` is applied to each state, such as :meth:`recckpt.dense.state_copy.DenseBuffers.copying`. Raises
        ValueError, with the key, for a value that could not be loaded back safely.
        """
        return {
            name: portable(f"{self._what} {name!r}", copy((self._what, name), self._state(obj)), torch.preserve_format)
            for name, obj in self.objects.items()
            if (name in self._of_ranks) == of_ranks
        }

    def merged(self, name: str, states: list[Any], index: int, count: int) -> Any:
        obj = self.objects[name]
        with _refusals_named(name, obj, "merge_io_state"):
            return obj.merge_io_state(states, index, count)

    def beside(self, name: str, saved: Any) -> tuple[Any, Any]:
        """Return (the part of a saved state that the object loads, its live state or None if reading it is unsafe)."""
        obj = self._adapted(name)
        try:
            if isinstance(obj, NamedOptimizer):
                return obj.beside(saved)
            return saved, self._state(obj) if isinstance(obj, nn.Module) or self._pair(obj) is None else None
        except Exception:  # the object has no state yet
            return saved, None

    @property
    def optimizers(self) -> dict[str, NamedOptimizer]:
        adapted = {name: self._adapter(obj) for name, obj in self.objects.items()}
        return {name: obj for name, obj in adapted.items() if isinstance(obj, NamedOptimizer) and obj.goes_by_name}

    @contextmanager
    def loaded(self, states: Mapping[str, Any]) -> Iterator[Callable[[], None]]:
        """Load the states, and keep states whose names are not registered for :meth:`get`.

        Optimizers and schedulers are loaded before the block, and restored if an object refuses its state or the block
        fails. Other objects cannot be restored, so the block itself loads them, as late as possible, by calling the
        function that ``with`` gives. Plain values are filled after the block.

        Raises:
            StateMismatchError: an object refused its state, or a plain value has another type.
        """
        self._unclaimed |= {name: state for name, state in states.items() if name not in self.objects}
        own = {name: self._adapter(self.objects[name]) for name in states if name in self.objects}
        plain = [name for name, obj in own.items() if self._pair(obj) is None]
        misfits = {name: misfit(self.objects[name], states[name]) for name in plain}
        mismatched = {name: pair for name, pair in misfits.items() if pair and is_filled(self.objects[name])}
        if mismatched:
            remedy = "register a value of the saved type, or leave it out with 'exclude'"
            raise StateMismatchError(f"{self._what}: a plain value", mismatched=mismatched, remedy=remedy)
        undos = {name: _undo_of(obj) for name, obj in own.items() if name not in plain}
        with ExitStack() as undone_on_error:
            for name, undo in undos.items():
                if undo is not None:
                    undone_on_error.callback(undo)
                    self._give(name, own[name], states[name])

            def give_rest() -> None:
                for name in (name for name, undo in undos.items() if undo is None):
                    self._give(name, own[name], states[name])
                    kept = "%s: %r keeps the loaded state although the load failed: repeat the load"
                    undone_on_error.callback(log.warning, kept, self._what, name)

            yield give_rest
            undone_on_error.pop_all()
        for name in plain:
            self._fill(name, states[name])

    def _give(self, name: str, obj: Any, state: Any) -> None:
        pair = self._pair(obj)
        assert pair is not None
        scheduler = next(schedulers_in(obj), None)
        if scheduler is not None and isinstance(state, Mapping) and "last_epoch" in state:
            _check_kind(name, scheduler, scheduler.state_dict(), state)
        with _refusals_named(name, obj, pair[1]):
            getattr(obj, pair[1])(state)
        if isinstance(obj, LoaderPosition) and obj.is_passed_by:
            log.warning(
                "%s: an iterator of %r was made before its position was loaded, so the iterator ignores the saved "
                "position; call restore() first, then iter(loader)",
                *(self._what, name),
            )

    def _fill(self, name: str, state: Any) -> None:
        live = self.objects[name]
        if is_filled(live):
            fill(live, state)
            return
        self.objects[name] = state
        if live is not None and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s: %r is of type %s, which a load cannot change: get_extra_data(%r) returns the loaded value, and "
                "the next save writes it; register a tensor, list or dict, so that a load changes it in place",
                *(self._what, name, type(live).__name__, name),
            )

    def _adapted(self, name: str) -> Any:
        return self._adapter(self.objects[name])

    def _state(self, obj: Any) -> Any:
        obj = self._adapter(obj)
        pair = self._pair(obj)
        if pair is None:
            return obj
        flush = getattr(obj, "_flush_io_state", None)  # RecIS's datasets, whose workers hold the position
        if callable(flush):
            flush()
        return getattr(obj, pair[0])()

    def _pair(self, obj: Any) -> tuple[str, str] | None:
        for dump, load in self._methods:
            if callable(getattr(obj, dump, None)) and callable(getattr(obj, load, None)):
                return dump, load
        return None


def _undo_of(obj: Any) -> Callable[[], object] | None:
    """Return a function that restores the object's present state; None if that is unsafe or would need a copy.

    The states of torch's optimizers and schedulers need no copy, because a load replaces the objects in the state.
    """
    if isinstance(obj, NamedOptimizer):
        obj = obj.optimizer
    replaces = isinstance(obj, Optimizer) and type(obj).load_state_dict is Optimizer.load_state_dict
    if replaces:
        return partial(give_state, obj, obj.state_dict())
    return partial(obj.load_state_dict, obj.state_dict()) if isinstance(obj, LRScheduler) else None


@contextmanager
def _refusals_named(name: str, obj: Any, method: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        refusal = f"{type(obj).__qualname__}.{method} refused it: {type(error).__name__}: {error}"
        raise StateMismatchError(f"the state of {name!r}", remedy=refusal) from error


def _check_kind(name: str, scheduler: LRScheduler, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse the state of a scheduler of another kind, which torch mixes with what the scheduler has by itself."""
    here, there = (
        {key for key in state if not key.startswith("_") or key in _OF_SEVERAL} - {"verbose"} for state in (own, saved)
    )
    if here - there and there - here:
        found, expected = (first_few(sorted(keys)) for keys in (there - here, here - there))
        load_conf = {"exclude": [name], "strict": True}
        remedy = (
            f"another kind of scheduler saved it: found {found}, expected {expected} of a {type(scheduler).__name__}; "
            "register one of the same kind, or begin this schedule by "
            f"restore(hyper_parameters='keep', load_conf={load_conf})"
        )
        raise StateMismatchError(f"the state of {name!r}", remedy=remedy)
    inside = getattr(scheduler, "_schedulers", ())
    for inner, *states in zip(inside, own.get("_schedulers", ()), saved.get("_schedulers", ()), strict=False):
        _check_kind(name, inner, *states)


def extra_registry(adapter: Callable[[Any], Any] = lambda obj: obj) -> Registry:
    return Registry("register_for_checkpointing", (_STATE_DICT,), plain=True, adapter=adapter)


def io_registry() -> Registry:
    methods = (("dump_io_state", "load_io_state"), _STATE_DICT)
    return Registry("register_io_state", methods, plain=False, adapter=position_of)


def is_filled(live: Any) -> bool:
    """Return whether a load can change a value in place; numbers and strings cannot be changed."""
    if isinstance(live, np.ndarray):
        return live.flags.writeable
    if isinstance(live, Tensor):
        return not (live.is_inference() or is_overlapping(live) or is_read_only(live))
    return type(live) in _CONTAINERS


def is_overlapping(live: Tensor) -> bool:
    return any(n > 1 and not step for n, step in zip(live.shape, live.stride(), strict=True))


def is_read_only(live: Tensor) -> bool:
    """Return whether a tensor lies in a read-only memory map, where a write would end the process; asks the kernel."""
    if live.device.type != "cpu" or live.is_meta or not live.numel():
        return False
    last = sum((n - 1) * step for n, step in zip(live.shape, live.stride(), strict=True)) * live.element_size()
    source, sink = os.pipe()
    try:
        for address in {live.data_ptr(), live.data_ptr() + last}:
            os.write(sink, ctypes.string_at(address, 1))
            if int(_LIBC.read(source, ctypes.c_void_p(address), ctypes.c_size_t(1))) < 0:  # writes the same byte
                return True
    finally:
        os.close(source)
        os.close(sink)
    return False


def misfit(live: Any, saved: Any) -> tuple[str, str] | None:
    found, expected = _kind(saved), _kind(live)
    return None if found == expected else (found, expected)


def fill(live: Any, saved: Any) -> None:
    """Set a live value in place; members of a container are set in place if they fit, else replaced."""
    if isinstance(live, np.ndarray):
        live[...] = saved.numpy()
    elif isinstance(live, Tensor):
        with torch.no_grad():
            live.copy_(saved)
    elif isinstance(live, dict):
        filled = {key: _filled(live.get(key), value) for key, value in saved.items()}
        live.clear()
        dict.update(live, filled)  # Counter.update would add
    elif isinstance(live, list):
        inside = [*live, *[None] * (len(saved) - len(live))]
        live[:] = [_filled(item, value) for item, value in zip(inside, saved, strict=False)]
    else:
        live.clear()
        live.update(saved)


def _filled(live: Any, saved: Any) -> Any:
    if is_filled(live) and misfit(live, saved) is None:
        fill(live, saved)
        return live
    return saved.numpy() if isinstance(live, np.ndarray) and isinstance(saved, Tensor) else saved


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype.newbyteorder('=').name} {value.shape}"
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return "dict" if isinstance(value, dict) else type(value).__name__
