"""The hooks that announce what is about to change in the weight of an embedding of torch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recckpt.live.devices import is_capturing
from recckpt.live.hooks import WeakDoor
from recckpt.live.write_guard import WriteGuard

_INT = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a float


class AnnouncedTable(Protocol):
    """What the hooks have to know of a table."""

    @property
    def weight(self) -> Tensor:
        """The weight of now."""

    @property
    def reason(self) -> str | None:
        """Why rows may change that have no gradient; None where none does."""

    def whole(self) -> Mapping[str, Tensor]:
        """Return all tensors that have a value a row, as the module and the optimizer have them."""

    def part_of(self, gradient: Tensor) -> Tensor | None:
        """Return the gradient of the rows of this rank; None where that is not known yet."""


class TorchAnnouncer:
    """The hooks of one table; they never raise, and keep neither table nor optimizer alive.

    A copy, as in a deep copy or a pickle of the model, does nothing.
    """

    def __init__(self, table: AnnouncedTable | None = None, door: WeakDoor | None = None) -> None:
        self._reference, self._door = None if table is None else weakref.ref(table), door or WeakDoor()
        self.guard = WriteGuard(self._tensors, self._door.replaced)

    def install(self, modules: Iterable[Any], optimizer: Optimizer | None) -> Callable[[], object]:
        """Hook the modules that have the weight, and the optimizer that trains it; return what removes the hooks."""
        handles: list[Any] = []
        if optimizer is not None:
            handles += [
                optimizer.register_step_pre_hook(self.before_step),
                optimizer.register_step_post_hook(self.after_write),
            ]
        for module in modules:
            handles += [
                module.register_load_state_dict_pre_hook(self.before_load),
                module.register_load_state_dict_post_hook(self.after_write),
            ]
            if getattr(module, "max_norm", None) is not None:
                handles += [
                    module.register_forward_pre_hook(self.before_forward, with_kwargs=True),
                    module.register_forward_hook(self.after_write, always_call=True),
                ]
        return lambda: [handle.remove() for handle in handles]

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Announce the rows that have a gradient; where a closure makes it, once that has."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._announce_step(is_final=self._is_last_hook(optimizer))
            return None

        def announcing() -> Any:
            loss = closure()
            self._announce_step(is_final=True)  # all hooks were called before the closure
            return loss

        return ((args[0], announcing, *args[2:]), {key: value for key, value in kwargs.items() if key != "closure"})

    def before_load(self, *args: Any) -> None:
        """Announce that a state dict is about to be loaded."""
        with self._known_write():
            self._door.announce_all()

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Announce the rows that ``max_norm`` may shorten."""
        with self._known_write():
            self._door.announce(args[0] if args else kwargs["input"])

    def after_write(self, *args: Any) -> None:
        """Take what was written for known."""
        self.guard.end()

    def _is_last_hook(self, optimizer: Optimizer) -> bool:
        """Say whether no hook of other code follows before the step, which might change the gradient."""
        owners = [getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values()]
        place = next((number for number, owner in enumerate(owners) if owner is self), 0)
        return all(isinstance(owner, TorchAnnouncer) for owner in owners[place:])

    def _announce_step(self, *, is_final: bool) -> None:
        """Announce what a step changes, by the gradient where that ``is_final``."""
        with self._known_write():
            table = self._table
            grad = table.weight.grad if table is not None else None
            if table is None or grad is None:
                return  # torch's optimizers leave such a parameter as it is
            is_known = table.reason is None and is_final and not is_capturing()
            part = table.part_of(grad) if is_known else None
            if part is None:
                self._door.announce_all()
            elif part.is_sparse:
                self._door.announce(part._indices()[0])
            else:
                self._door.announce(_has_gradient(part))

    @contextmanager
    def _known_write(self) -> Iterator[None]:
        """Announce in the block a write that follows it; an error there is that of the next save."""
        try:
            self.guard.begin()
            yield
        except Exception as error:
            self._door.failed(error)

    @property
    def _table(self) -> AnnouncedTable | None:
        return None if self._reference is None else self._reference()

    def _tensors(self) -> Mapping[str, Tensor]:
        table = self._table
        return {} if table is None else table.whole()

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchAnnouncer:
        return TorchAnnouncer()

    def __reduce__(self) -> tuple[Any, ...]:
        return TorchAnnouncer, ()


def _has_gradient(grad: Tensor) -> Tensor:
    """Return for each row of a dense gradient if it is not zero by bits: -0.0 may turn a weight of -0.0 into 0.0."""
    bits = grad.detach().contiguous().view(_INT[grad.element_size()])
    return bits.flatten(1).any(1)
