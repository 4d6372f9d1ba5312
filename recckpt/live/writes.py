"""Detects writes to a live table: by hooks, by torch's version counters, and by marks of rows on a device."""

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
Versions = Mapping[str, tuple[int, int]]  # slot -> (its address, its number of in-place writes)
Int64s = npt.NDArray[np.int64]


def is_capturing() -> bool:
    """Return whether a CUDA graph captures this thread's work on the device; then the thread must not wait for it."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def runs_apart(tensor: Tensor) -> bool:
    """Return whether a tensor's work is queued on a device, so that reading the tensor would wait."""
    return tensor.is_cuda


def wait_for_devices(tensors: Iterable[Tensor]) -> None:
    """Wait for all streams of these tensors' CUDA devices."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def outside_graphs(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make ``torch.compile`` break its graph at a hook: a compiled hook would read tensors before they are written."""
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
    """A door (receiver of announced changes) for hooks of modules and optimizers; forwards to the doors still alive.

    A copy of it, as in a deep copy or a pickle of a model, forwards to no door.
    """

    def __init__(self, *doors: Door) -> None:
        self.doors: list[weakref.ref[Door]] = [weakref.ref(door) for door in doors]

    def announce(self, rows: Tensor) -> None:
        for door in self.open:
            door.announce(rows)

    def announce_all(self, *args: Any, **kwargs: Any) -> None:
        """As :meth:`recckpt.types.Door.announce_all`, but usable as a hook with any arguments."""
        for door in self.open:
            door.announce_all()

    def replaced(self) -> None:
        for door in self.open:
            door.replaced()

    def failed(self, error: Exception) -> None:
        """Report the error to the first door, so that the next save fails; other doors mark all rows as changed."""
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
    """Detects unannounced writes by torch's version counters, which count in-place changes. Thread-safe.

    Writes that bypass autograd are not counted: ``weight.data.mul_(2)``, steps of fused optimizers, and ``foreach``
    steps of a DTensor. Hooks announce the steps of the table's own optimizer; for other writes see
    docs/your-tables.md.

    ``tensors`` returns the current tensors; ``on_unseen`` is called if they were written to without announcement.
    """

    def __init__(self, tensors: Callable[[], Mapping[str, Tensor]], on_unseen: Callable[[], object]) -> None:
        self._tensors, self._on_unseen = tensors, on_unseen
        self._lock = threading.RLock()
        self._is_writing = False
        self._versions = self._now()

    def begin(self) -> None:
        """Check for unannounced writes, then begin an announced write; an unfinished earlier one counts as ended."""
        with self._lock:
            self.settle()
            self._is_writing = True

    def end(self) -> None:
        """End the announced write: later checks compare with the current versions."""
        with self._lock:
            self._is_writing, self._versions = False, self._now()

    def look(self) -> None:
        """Call ``on_unseen`` if there was a write since the last check. Does nothing during an announced write."""
        with self._lock:
            if self._is_writing:
                return
            before, self._versions = self._versions, self._now()
            # Tensors at other addresses are ignored here, because the store itself compares addresses.
            both = [(before[slot], now) for slot, now in self._versions.items() if slot in before]
            if any(there[0] == now[0] and there != now for there, now in both):
                self._on_unseen()

    def settle(self) -> None:
        """Check from the thread that trains; an announced write that has not ended was ended by an exception.

        Changes of that write cannot be distinguished from later changes, so they count as unannounced.
        """
        with self._lock:
            self._is_writing = False
            self.look()

    def _now(self) -> Versions:
        return {slot: version_of(tensor) for slot, tensor in self._tensors().items()}


class NotedRows:
    """Marks of announced rows, one byte per row, on each device where rows are announced. Used under the store's lock.

    Several streams may mark rows concurrently, because all write the same value. ``begin`` is the first row that is
    marked; announced row numbers are relative to this rank's box.
    """

    def __init__(self, begin: int, n_rows: int) -> None:
        self._begin, self._n_rows = begin, n_rows
        self._noted: dict[torch.device, Tensor | None] = {}  # None if the device lacks memory for the marks

    @torch.no_grad()
    def note(self, rows: Tensor) -> bool:
        """Mark rows (indices or a mask, as in :meth:`recckpt.types.Door.announce`); False if memory is short."""
        noted = self._on(rows.device)
        if noted is None:
            return False
        if rows.dtype == torch.bool:
            noted[1:-1].logical_or_(rows.reshape(-1)[self._begin : self._begin + self._n_rows])
        else:  # rows outside the range mark an extra item at either end
            places = (rows.reshape(-1).to(torch.int64) - (self._begin - 1)).clamp_(0, self._n_rows + 1)
            noted.index_fill_(0, places, True)
        return True

    @torch.no_grad()
    def take(self) -> Int64s:
        """Return the distinct rows marked since the last call. Waits for the devices."""
        all_noted = [noted for noted in self._noted.values() if noted is not None]
        wait_for_devices(all_noted)
        taken = [noted[1:-1].nonzero().flatten().cpu().numpy() for noted in all_noted]
        for noted in all_noted:
            noted.zero_()
        wait_for_devices(all_noted)  # before other streams mark rows again
        return np.unique(np.concatenate(taken)) if len(taken) > 1 else np.concatenate([np.empty(0, np.int64), *taken])

    @torch.inference_mode(False)
    def _on(self, device: torch.device) -> Tensor | None:
        """Return the marks on a device; None if the device lacks memory for them, because training must not fail."""
        if device not in self._noted:
            try:
                self._noted[device] = noted = torch.zeros(self._n_rows + 2, dtype=torch.bool, device=device)
                wait_for_devices([noted])  # before other streams mark rows
            except torch.OutOfMemoryError:
                self._noted[device] = None
        return self._noted[device]
