"""The hooks of FBGEMM's fused kernels, which say what a backward pass is about to write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from recckpt.live.devices import is_capturing
from recckpt.live.hooks import WeakDoor
from recckpt.types import Door

# What changes rows beside backward passes: all of these may change any row, and do not say which.
_WRITERS = ("ema_inplace", "ensemble_and_swap", "init_embedding_weights_uniform")
_RESET = "reset_embedding_weight_momentum"  # of rows that have other ids now, which its caller writes next


class KernelHooks:
    """The hooks of one kernel, for all of its tables; they never raise.

    The rows that a backward pass changes are read from the node of the autograd graph that writes them, just before it
    does: forward passes that nothing follows announce nothing, and ids are those that the kernel has checked.

    Args:
        kernel: a ``SplitTableBatchedEmbeddingBagsCodegen``.
        is_proven: whether a pass changes no rows but those that it looks up.
    """

    def __init__(self, kernel: Any, *, is_proven: bool) -> None:
        self._kernel, self._is_proven = kernel, is_proven
        self._doors: dict[int, WeakDoor] = {}
        self._removers: list[Callable[[], object]] = []
        self.was_written = True  # since the cache was last written back; what was before is not known

    def attach(self, table: int, door: Door) -> Callable[[], object]:
        """Announce what changes in a table; return what ends that."""
        if not self._doors:
            self._install()
        self._doors[table] = WeakDoor(door)
        return partial(self._detach, table)

    def after_forward(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Ask the node that will write the rows to announce them before it does."""
        node = getattr(output, "grad_fn", None)
        if node is None or not self._doors:
            return
        indices, offsets, sizes = (_argument(args, kwargs, at, name) for at, name in _ARGUMENTS)
        node.register_prehook(partial(self.before_backward, indices, offsets, sizes))

    def before_backward(
        self, indices: Tensor, offsets: Tensor, sizes: Sequence[Sequence[int]] | None, *gradients: Any
    ) -> None:
        """Announce the rows that these inputs look up; ``sizes`` are those of batches by feature and rank, or None."""
        self.was_written = True
        try:
            if not self._is_proven or is_capturing():
                self.announce_all()
                return
            for table, rows in self._rows(indices, offsets, sizes):
                self._doors[table].announce(rows)
        except Exception as error:
            self._fail(error)

    def before_reset(
        self, pruned_indices: Tensor, pruned_indices_offsets: Tensor, logical_table_ids: Tensor, buffer_ids: Tensor
    ) -> None:
        """Announce the rows that are about to be reset, by arguments of :meth:`reset_embedding_weight_momentum`."""
        self.was_written = True
        try:
            bounds, tables = pruned_indices_offsets.tolist(), logical_table_ids.tolist()
            for table, begin, end in zip(tables, bounds[:-1], bounds[1:], strict=True):
                if table in self._doors and begin < end:
                    self._doors[table].announce(pruned_indices[begin:end])
        except Exception as error:
            self._fail(error)

    def announce_all(self, *args: Any, **kwargs: Any) -> None:
        """Announce that any row of any table is about to change."""
        self.was_written = True
        for door in self._doors.values():
            door.announce_all()

    def replaced(self, *args: Any, **kwargs: Any) -> None:
        """Say that the rows of all tables are others now."""
        for door in self._doors.values():
            door.replaced()

    def note_written_back(self) -> None:
        """Take what the cache has for no newer than what lies below it."""
        self.was_written = False

    def __deepcopy__(self, memo: dict[int, Any]) -> KernelHooks:
        return _of_a_copy()

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_a_copy, ()

    def _fail(self, error: Exception) -> None:
        first, *others = self._doors.values()
        first.failed(error)  # which fails one save; as many would fail as there are tables
        for door in others:
            door.replaced()

    def _rows(
        self, indices: Tensor, offsets: Tensor, sizes: Sequence[Sequence[int]] | None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (table, rows) of each feature that looks a table up whose changes are announced."""
        tables = self._kernel.feature_table_map
        indices, offsets = indices.detach().cpu(), offsets.cpu()  # once for all features: each copy waits for a device
        if sizes is None:
            size = (len(offsets) - 1) // len(tables)
            bounds = offsets[:: max(size, 1)].tolist() if size else [0] * (len(tables) + 1)
        else:
            bounds = offsets[torch.tensor([0, *accumulate(map(sum, sizes))], device="cpu")].tolist()
        for table, begin, end in zip(tables, bounds[:-1], bounds[1:], strict=True):
            if table in self._doors and begin < end:
                yield table, _looked_up(indices[begin:end], self._kernel.embedding_specs[table][0])

    def _install(self) -> None:
        kernel, self.was_written = self._kernel, True
        handles = [
            kernel.register_forward_hook(self.after_forward, with_kwargs=True),
            kernel.register_load_state_dict_pre_hook(self.announce_all),
        ]
        self._removers = [handle.remove for handle in handles]
        self._removers += [
            announce_calls(kernel, name, self.announce_all)
            for name in _WRITERS
            if callable(getattr(kernel, name, None))
        ]
        if callable(getattr(kernel, _RESET, None)):
            self._removers.append(announce_calls(kernel, _RESET, self.before_reset))

    def _detach(self, table: int) -> None:
        self._doors.pop(table, None)
        if not self._doors:
            for remove in self._removers:
                remove()
            self._removers = []


def _of_a_copy() -> KernelHooks:
    """Return what a copied or unpickled kernel has: it announces nothing."""
    return KernelHooks(None, is_proven=True)


_ARGUMENTS = ((0, "indices"), (1, "offsets"), (4, "batch_size_per_feature_per_rank"))  # of the kernel's forward


class _Announced:
    """A method of an object, which says that it is called, with which arguments, before it is.

    In a copy of the object, and once it is unpickled, the method is the plain one.
    """

    def __init__(self, obj: object, name: str, announce: Callable[..., object]) -> None:
        self._obj, self._name, self._announce = obj, name, announce

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._announce(*args, **kwargs)
        return getattr(type(self._obj), self._name)(self._obj, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return MethodType(getattr(type(self._obj), self._name), memo.get(id(self._obj), self._obj))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._obj, self._name)


def announce_calls(obj: Any, name: str, announce: Callable[..., object]) -> Callable[[], object]:
    """Call ``announce`` before each call of a method, with its arguments; return what ends that."""
    announced = _Announced(obj, name, announce)
    vars(obj)[name] = announced

    def end() -> None:
        if vars(obj).get(name) is announced:
            del vars(obj)[name]

    return end


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], at: int, name: str) -> Any:
    return args[at] if at < len(args) else kwargs.get(name)


def _looked_up(ids: Tensor, n_rows: int) -> Tensor:
    """Return rows that are there: for an id that is not, the kernel takes row 0 (``BoundsCheckMode.WARNING``)."""
    if int(ids.min()) >= 0 and int(ids.max()) < n_rows:
        return ids
    return torch.where((ids >= 0) & (ids < n_rows), ids, 0)
