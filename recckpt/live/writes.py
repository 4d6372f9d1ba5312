"""How writes to a live table are noticed: by hooks, by versions that torch counts, by rows noted on a device."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.live.boxes import version_of
from recckpt.types import Door

_P = ParamSpec("_P")
_R = TypeVar("_R")
Versions = Mapping[str, tuple[int, int]]  # slot -> where it lies, and how often it was written in place
Int64s = npt.NDArray[np.int64]


def is_capturing() -> bool:
    """Say whether what this thread does on a device is recorded in a CUDA graph, and must not wait for the device."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def runs_apart(tensor: Tensor) -> bool:
    """Say whether what is asked of a tensor is queued on a device, so that reading it here would wait for that."""
    return tensor.is_cuda


def wait_for_devices(tensors: Iterable[Tensor]) -> None:
    """Wait until all streams of the devices of some tensors have done what was asked of them; not for the CPU."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def outside_graphs(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let ``torch.compile`` break its graph at a hook: in a graph it would look at tensors before they are written."""
    uncompiled: list[Callable[_P, _R]] = []

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if not uncompiled:
            uncompiled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return uncompiled[0](*args, **kwargs)

    return call


class WeakDoor:
    """A door for hooks, which modules and optimizers keep: goes on to those doors that are still there, all of them.

    A copy of it, as in a deep copy of a model, or one that was pickled, goes on to none.
    """

    def __init__(self, *doors: Door) -> None:
        self.doors: list[weakref.ref[Door]] = [weakref.ref(door) for door in doors]

    def announce(self, rows: Tensor) -> None:
        for door in self.open:
            door.announce(rows)

    def announce_all(self, *args: Any, **kwargs: Any) -> None:
        """As :meth:`recckpt.types.Door.announce_all`; a hook of whatever arguments."""
        for door in self.open:
            door.announce_all()

    def replaced(self) -> None:
        for door in self.open:
            door.replaced()

    def failed(self, error: Exception) -> None:
        """As :meth:`recckpt.types.Door.failed`: the first fails the next save, which is one of all."""
        for number, door in enumerate(self.open):
            if number:
                door.replaced()
            else:
                door.failed(error)

    @property
    def open(self) -> list[Door]:
        return [door for reference in self.doors if (door := reference()) is not None]

    def __deepcopy__(self, memo: dict[int, Any]) -> WeakDoor:
        return WeakDoor()

    def __reduce__(self) -> tuple[Any, ...]:
        return WeakDoor, ()


class WriteGuard:
    """Compares the versions of tensors between writes that were announced: torch counts each change in place.

    It does not count what goes past autograd: ``weight.data.mul_(2)``, the steps of fused optimizers, and of a DTensor
    those with ``foreach``. Those of the optimizer that trains a table are announced all the same; for the former,
    docs/your-tables.md says what to do.
    Thread-safe.

    Args:
        tensors: returns those of now.
        on_unseen: is called where they were written to.
    """

    def __init__(self, tensors: Callable[[], Mapping[str, Tensor]], on_unseen: Callable[[], object]) -> None:
        self._tensors, self._on_unseen = tensors, on_unseen
        self._lock = threading.RLock()
        self._is_writing = False
        self._versions = self._now()

    def begin(self) -> None:
        """Look once more before a write that was announced; one that has not ended was ended by an exception."""
        with self._lock:
            self.settle()
            self._is_writing = True

    def end(self) -> None:
        """Take what is there after that write for known."""
        with self._lock:
            self._is_writing, self._versions = False, self._now()

    def look(self) -> None:
        """Call ``on_unseen`` where something wrote since the last look; not while a write is under way."""
        with self._lock:
            if self._is_writing:
                return
            before, self._versions = self._versions, self._now()
            # Tensors that lie elsewhere are others: the store compares the places itself.
            both = [(before[slot], now) for slot, now in self._versions.items() if slot in before]
            if any(there[0] == now[0] and there != now for there, now in both):
                self._on_unseen()

    def settle(self) -> None:
        """Look in the thread that trains: a write that is still under way there was ended by an exception.

        What it wrote itself is not told from what came after it, so that counts as not announced either.
        """
        with self._lock:
            self._is_writing = False
            self.look()

    def _now(self) -> Versions:
        return {slot: version_of(tensor) for slot, tensor in self._tensors().items()}


class NotedRows:
    """A byte a row on each device that names rows. Used under the lock of the store.

    Several streams may note at once: all write the same value.

    Args:
        begin: first row of the box that is noted.
        n_rows: how many are.
    """

    def __init__(self, begin: int, n_rows: int) -> None:
        self._begin, self._n_rows = begin, n_rows
        self._noted: dict[torch.device, Tensor | None] = {}  # None where there is no room

    @torch.no_grad()
    def note(self, rows: Tensor) -> bool:
        """Note rows, as :meth:`recckpt.types.Door.announce` takes them, once the current stream has made them.

        Returns:
            Whether it did: not where the device has no room.
        """
        noted = self._on(rows.device)
        if noted is None:
            return False
        if rows.dtype == torch.bool:
            noted[1:-1].logical_or_(rows.reshape(-1)[self._begin : self._begin + self._n_rows])
        else:  # those of others are noted before the first and behind the last
            places = (rows.reshape(-1).to(torch.int64) - (self._begin - 1)).clamp_(0, self._n_rows + 1)
            noted.index_fill_(0, places, True)
        return True

    @torch.no_grad()
    def take(self) -> Int64s:
        """Return what was noted since the last time, all different; waits for the devices."""
        all_noted = [noted for noted in self._noted.values() if noted is not None]
        wait_for_devices(all_noted)
        taken = [noted[1:-1].nonzero().flatten().cpu().numpy() for noted in all_noted]
        for noted in all_noted:
            noted.zero_()
        wait_for_devices(all_noted)  # before other streams note again
        return np.unique(np.concatenate(taken)) if len(taken) > 1 else np.concatenate([np.empty(0, np.int64), *taken])

    @torch.inference_mode(False)
    def _on(self, device: torch.device) -> Tensor | None:
        """Return the bytes on a device; None where there is no room, for which training must not fail."""
        if device not in self._noted:
            try:
                self._noted[device] = noted = torch.zeros(self._n_rows + 2, dtype=torch.bool, device=device)
                wait_for_devices([noted])  # before other streams note
            except torch.OutOfMemoryError:
                self._noted[device] = None
        return self._noted[device]
