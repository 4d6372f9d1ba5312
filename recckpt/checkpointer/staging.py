"""Packs a state and copies it into reused memory, so that training may change the original."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recckpt.dense.saver import Placed, pickled
from recckpt.dense.state_copy import plain_tensor, portable
from recckpt.parallel.one_process import OwnFuture
from recckpt.parallel.threads import InOrder

MAX_DEPTH = 100  # most levels of nested containers; loading must be able to walk them again
_ALIGNMENT = 64
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


def pack(state_dict: Mapping[str, Any]) -> tuple[bytes, list[Tensor]]:
    """Return the pickle of a state dict, and a list of pieces; the pickle refers to each tensor by its piece's index.

    A piece is a one-dimensional byte tensor on the state's device, usually the state's own memory. Tensors that share
    memory share it in the file, too, unless that would store more bytes than the tensors use: for a view, only its own
    part is stored.

    TypeError if the state is not a dict; ValueError names a place in it that could not be loaded back safely.
    """
    if type(state_dict) not in (dict, OrderedDict):
        raise TypeError(f"a state dict is a dict or OrderedDict, found a {type(state_dict).__name__}")
    references: list[_Reference] = []
    tree = _walk("", state_dict, references, 0)
    places: dict[int, Placed] = {}
    pieces = [_piece(number, members, places) for number, members in enumerate(_stored_together(references))]
    return pickled(tree, lambda obj: places[obj.number] if type(obj) is _Reference else None), pieces


@dataclass(frozen=True)
class _Reference:
    """Replaces a tensor in the pickle; ``begin`` and ``end`` count items of its storage."""

    number: int
    tensor: Tensor
    begin: int
    end: int


def span(tensor: Tensor) -> int:
    """Return how many items of its storage a tensor spans, gaps included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def child(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _walk(name: str, value: Any, references: list[_Reference], depth: int) -> Any:
    """Copy the containers, with references in place of tensors, and plain data unchanged."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{name[:200]}: it contains itself, or is nested deeper than {MAX_DEPTH}")
    if type(value) is str:
        return sys.intern(value)  # pickle writes an interned string once, so equal states make equal files
    if isinstance(value, np.ndarray):
        value = portable(name, value)
    if isinstance(value, Tensor):
        tensor = plain_tensor(name, value).resolve_conj().resolve_neg()
        if tensor.numel() > span(tensor):  # each item of the tensor must have its own item of the storage
            tensor = tensor.contiguous()
        begin = int(tensor.storage_offset())
        references.append(_Reference(len(references), tensor, begin, begin + span(tensor)))
        return references[-1]
    if type(value) in (dict, OrderedDict):
        made = type(value)()
        for key, item in value.items():
            (portable_key,) = (sys.intern(key),) if type(key) is str else portable(name, {key: None})
            made[portable_key] = _walk(child(name, key), item, references, depth + 1)
        return made
    if type(value) in (list, tuple):
        return type(value)([_walk(f"{name}[{i}]", item, references, depth + 1) for i, item in enumerate(value)])
    plain = portable(name, value)
    if type(plain) is set and _holds_tensor(plain):
        raise ValueError(f"{name}: a tensor in a set cannot be loaded in place; use a list")
    return plain


def _holds_tensor(values: Iterable[Any]) -> bool:
    return any(isinstance(value, Tensor) or (type(value) is tuple and _holds_tensor(value)) for value in values)


def _piece(number: int, members: list[_Reference], places: dict[int, Placed]) -> Tensor:
    """Return the bytes that store a group of overlapping tensors, and record each tensor's offset in these bytes."""
    tensor, begin, end = members[0].tensor, members[0].begin, max(member.end for member in members)
    is_copied = len(_by_place(members)) == 1 and end - begin > tensor.numel()  # drops gaps that no other tensor fills
    if is_copied:
        tensor = tensor.contiguous()
        begin, end = 0, tensor.numel()
    n_bytes, dtype = (end - begin) * tensor.element_size(), str(tensor.dtype).removeprefix("torch.")
    for member in members:
        one, offset = (tensor, 0) if is_copied else (member.tensor, member.begin - begin)
        places[member.number] = Placed(dtype, number, n_bytes, offset, tuple(one.shape), one.stride())
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(tensor.untyped_storage(), begin * tensor.element_size(), (n_bytes,), (1,))


def _stored_together(references: list[_Reference]) -> Iterator[list[_Reference]]:
    """Yield groups of overlapping tensors; separates tensors if a group would store more bytes than they use."""
    by_storage: dict[Any, list[_Reference]] = defaultdict(list)
    for reference in references:
        tensor, storage = reference.tensor, reference.tensor.untyped_storage()
        shared = tensor.device, storage.data_ptr(), storage.nbytes(), tensor.dtype
        by_storage[shared if tensor.numel() else reference.number].append(reference)
    for members in by_storage.values():
        members.sort(key=lambda member: member.begin)
        groups, end = [[members[0]]], members[0].end
        for member in members[1:]:
            if member.begin >= end:
                groups.append([])
            groups[-1].append(member)
            end = max(end, member.end)
        for group in groups:
            places = _by_place(group)
            n_spanned = max(member.end for member in group) - group[0].begin
            is_shared = n_spanned <= sum(same[0].tensor.numel() for same in places)
            yield from [group] if is_shared else places


def _by_place(members: list[_Reference]) -> list[list[_Reference]]:
    """Group tensors that are the same part of memory."""
    places: dict[Any, list[_Reference]] = defaultdict(list)
    for member in members:
        places[member.begin, member.tensor.shape, member.tensor.stride()].append(member)
    return list(places.values())


class Arena:
    """A block of shared memory, which grows and is reused by later saves.

    It is not a file in ``/dev/shm``, which is small in many containers, and whose files outlive a killed process. The
    writer process gets the descriptor ``fd``.
    """

    def __init__(self) -> None:
        self.n_bytes = 0
        self.memory: mmap.mmap | None = None
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("recckpt-staging", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())

    def reserve(self, n_bytes: int) -> None:
        """Map a larger block if ``n_bytes`` needs one; memory is allocated only when it is written to."""
        if n_bytes > self.n_bytes:
            os.ftruncate(self.fd, n_bytes)
            self.memory, self.n_bytes = mmap.mmap(self.fd, n_bytes), n_bytes

    def __del__(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True)
class StagedState:
    """State that does not change until it has been written.

    Attributes:
        pickle: the pickled state, in which tensors refer to pieces by index.
        spans: (begin, size) in bytes of each piece in the arena.
        arena: the memory that holds the pieces.
    """

    pickle: bytes
    spans: list[tuple[int, int]]
    arena: Arena


class CheckpointStager(ABC):
    """Copies the state, so that training may continue."""

    @abstractmethod
    def stage(self, state_dict: Mapping[str, Any], **kwargs: Any) -> StagedState | Future[StagedState]:
        """Return a copy of the present state, or a future of it.

        The copy may overwrite the previous copy, which has been written by then.

        Args:
            state_dict: as for :meth:`Checkpointer.save`.
            kwargs: the keyword arguments of ``save``.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for running copies, and free the memory."""


class SharedMemoryStager(CheckpointStager):
    """Copies tensors into one block of shared memory that the writer process maps.

    Tensors in host memory are copied before :meth:`stage` returns. CUDA devices copy their own tensors, after the work
    already enqueued on the current stream and before later work; the future is done when they finish. Not
    thread-safe.
    """

    def __init__(self) -> None:
        self._arena: Arena | None = Arena()
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._pinned: int | None = None  # address of the arena, if it is pinned for copies by devices
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._waits = InOrder("recckpt-stage")

    def stage(self, state_dict: Mapping[str, Any], **kwargs: Any) -> StagedState | Future[StagedState]:
        """Return a copy of the state; a future if it is on a CUDA device.

        Raises:
            TypeError, ValueError: part of the state could not be loaded back safely.
            RuntimeError: the stager is closed.
        """
        if self._arena is None:
            raise RuntimeError("the stager is closed; make a new one")
        pickle, pieces = pack(state_dict)
        sizes = [piece.numel() for piece in pieces]
        begins = [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
        if begins[-1] > self._arena.n_bytes:
            self._unpin()
            self._arena.reserve(begins[-1])
            self._bytes = torch.frombuffer(self._arena.memory, dtype=torch.uint8)
        staged = StagedState(pickle, list(zip(begins, sizes, strict=False)), self._arena)
        copies = [(self._bytes[at : at + size], piece) for (at, size), piece in zip(staged.spans, pieces, strict=True)]
        from_cuda = [(target, piece) for target, piece in copies if piece.is_cuda and piece.numel()]
        events = self._enqueue(from_cuda)
        for target, piece in copies:
            if not piece.is_cuda:
                target.copy_(piece)
        if not from_cuda:
            return staged

        def when_copied() -> StagedState:
            for event in events:
                event.synchronize()
            return staged

        copied: OwnFuture[StagedState] = OwnFuture()
        copied.set_running_or_notify_cancel()
        self._waits.submit(partial(copied.run, when_copied))
        return copied

    def close(self) -> None:
        """Wait for the devices and release the memory; a running write keeps it alive."""
        self._waits.finish()
        self._unpin()
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._arena = None

    def _enqueue(self, copies: list[tuple[Tensor, Tensor]]) -> list[torch.cuda.Event]:
        """Enqueue (target, source) copies on one stream per device; return one event per device that marks their end.

        The copies run after the work that training has enqueued on the current stream, and before the work that it
        enqueues next. So no half-written value is read, and only the devices wait.
        """
        if copies and self._pinned is None:
            address, n_bytes = self._bytes.data_ptr(), self._bytes.numel()
            _check(torch.cuda.cudart().cudaHostRegister(address, n_bytes, _PORTABLE))  # type: ignore[no-untyped-call]
            self._pinned = address
        used = []
        for target, source in copies:
            stream = self._streams.get(source.device)
            if stream is None:
                stream = self._streams[source.device] = torch.cuda.Stream(source.device)  # type: ignore[no-untyped-call]
            if stream not in used:
                stream.wait_stream(torch.cuda.current_stream(source.device))
                used.append(stream)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            source.record_stream(stream)
        events = [stream.record_event() for stream in used]
        for stream, event in zip(used, events, strict=True):
            torch.cuda.current_stream(stream.device).wait_event(event)
        return events

    def _unpin(self) -> None:
        if self._pinned is not None:
            _check(torch.cuda.cudart().cudaHostUnregister(self._pinned))  # type: ignore[no-untyped-call]
            self._pinned = None


def _check(code: Any) -> None:
    if int(code) != 0:
        raise RuntimeError(f"pinning shared memory for CUDA failed with error {int(code)}")
