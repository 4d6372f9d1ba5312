"""Torch embeddings, including DTensors, as live tables with a torch optimizer; hooks announce their changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recckpt.dense.sharded import is_sharded
from recckpt.errors import LiveTableError
from recckpt.live.boxes import box_of, local_of, spread_of
from recckpt.live.optimizer_slots import slot_of
from recckpt.live.torch_rules import TorchRule, make_state, set_step
from recckpt.live.writes import WeakDoor, WriteGuard, is_capturing, outside_graphs
from recckpt.parallel.ranks import rank_and_size
from recckpt.sparse.table.checks import spec_of
from recckpt.text import first_few
from recckpt.types import EMBEDDING, Box, Door, SlotSpec

_INT = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a float


class TorchAnnouncer:
    """The hooks of one table. They never raise, and keep neither table nor optimizer alive.

    A copy of this object, as in a deep copy or a pickle of the model, does nothing.
    """

    def __init__(self, table: TorchEmbedding | None = None, door: WeakDoor | None = None) -> None:
        self._table: Callable[[], TorchEmbedding | None] = (lambda: None) if table is None else weakref.ref(table)
        self._door, of_now = door or WeakDoor(), self._table
        self.guard = WriteGuard(lambda: {} if (table := of_now()) is None else table.whole(), self._door.replaced)
        self._post_hook: int | None = None  # id of the hook in the optimizer
        self._step_hooks: tuple[tuple[Any, ...], bool] = (), False  # (key of its hooks when last checked, all ours?)

    def install(self, modules: Iterable[Any], optimizer: Optimizer | None) -> Callable[[], object]:
        """Hook the modules with the weight, and its optimizer; return a function that removes the hooks."""
        handles: list[Any] = []
        if optimizer is not None:
            handles += [
                optimizer.register_step_pre_hook(self.before_step),
                optimizer.register_step_post_hook(self.after_write),
            ]
            self._post_hook = handles[-1].id
        for module in modules:
            handles += [
                module.register_load_state_dict_pre_hook(self.before_load),
                module.register_load_state_dict_post_hook(self.after_write),
            ]
            if getattr(module, "max_norm", None) is not None:
                handles += [
                    module.register_forward_pre_hook(self.before_forward, with_kwargs=True),
                    module.register_forward_hook(self.after_write, always_call=True, prepend=True),
                ]
        return lambda: [handle.remove() for handle in handles]

    @outside_graphs
    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Announce the rows that have a gradient.

        If the step gets a closure, announce after the closure has computed the gradients.
        """
        hooks: Any = optimizer._optimizer_step_post_hooks
        # Other post-hooks may write rows: then move this table's hook to the end. Adding a hook changes this key,
        # because each hook has a new number.
        seen = len(hooks), next(reversed(hooks), None)
        if seen != self._step_hooks[0]:
            self._step_hooks = seen, not has_foreign(hooks)
        if not self._step_hooks[1] and self._post_hook in hooks:
            hooks.move_to_end(self._post_hook)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._announce_step(is_final=self._are_ours(optimizer._optimizer_step_pre_hooks, since=True))
            return None

        def announcing() -> Any:
            loss = closure()
            self._announce_step(is_final=True)  # all pre-hooks have run before the closure
            return loss

        return ((args[0], announcing, *args[2:]), {key: value for key, value in kwargs.items() if key != "closure"})

    @outside_graphs
    def before_load(self, *args: Any) -> None:
        with self._known_write():
            self._door.announce_all()

    @outside_graphs
    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Announce the rows that ``max_norm`` may change, or all rows if other hooks run in between."""
        with self._known_write():
            if self._are_ours(module._forward_pre_hooks, since=True) and self._are_ours(module._forward_hooks):
                self._door.announce(args[0] if args else kwargs["input"])
            else:
                self._door.announce_all()

    @outside_graphs
    def after_write(self, *args: Any) -> None:
        """End the announced write."""
        self.guard.end()

    def _are_ours(self, hooks: Mapping[int, Any], *, since: bool = False) -> bool:
        """Return whether all hooks before this table's hook are recckpt's; with ``since``, all hooks after it."""
        owners = [getattr(hook, "__self__", None) for hook in hooks.values()]
        place = next((number for number, owner in enumerate(owners) if owner is self), 0)
        return all(isinstance(owner, TorchAnnouncer) for owner in (owners[place:] if since else owners[:place]))

    def _announce_step(self, *, is_final: bool) -> None:
        """Announce the rows that a step changes: rows with a gradient if the gradient ``is_final``, otherwise all."""
        with self._known_write():
            table = self._table()
            grad = table.weight.grad if table is not None else None
            if table is None or grad is None:
                return  # torch's optimizers do not change a parameter without a gradient
            is_known = is_final and self._step_hooks[1] and table.reason is None and not is_capturing()
            part = table.part_of(grad) if is_known else None
            if part is None:
                self._door.announce_all()
            elif part.is_sparse:
                self._door.announce(part._indices()[0])
            else:  # compare bits with 0: a gradient of -0.0 may turn a weight of -0.0 into 0.0
                bits = part.detach().contiguous().view(_INT[part.element_size()])
                self._door.announce(bits.flatten(1).any(1))

    @contextmanager
    def _known_write(self) -> Iterator[None]:
        """Announce, in the block, a write that follows the block; an error in the block fails the next save."""
        try:
            self.guard.begin()
            yield
        except Exception as error:
            self._door.failed(error)

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchAnnouncer:
        return TorchAnnouncer()

    def __reduce__(self) -> tuple[Any, ...]:
        return TorchAnnouncer, ()


def has_foreign(hooks: Mapping[int, Any]) -> bool:
    """Say whether any of these hooks belongs to other code than recckpt's."""
    owners = (type(getattr(hook, "__self__", None)) for hook in hooks.values())
    return not all(owner.__module__.split(".")[0] == "recckpt" for owner in owners)


class TorchEmbedding:
    def __init__(
        self,
        name: str,
        module: nn.Module,
        optimizer: Optimizer | None,
        rule: TorchRule | None,
        tied: Sequence[nn.Module] = (),
    ) -> None:
        self._module: Any = module
        self._tied = tied
        self._optimizer, self._rule = optimizer, rule
        self.name, self.n_rows = name, len(self.weight)
        self._rank, self._n_ranks = rank_and_size()
        self._announcer = TorchAnnouncer()
        self._reason_of_load: str | None = None
        self._make_state()

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self._module.weight
        return weight

    @property
    def reason(self) -> str | None:
        """Why a step may change rows without a gradient; None if it does not."""
        group = self._group
        return (self._rule.reason(group) or self._reason_of_load) if self._rule and group else None

    def box(self) -> Box:
        return Box((0, self.n_rows), replica=self._rank, n_replicas=self._n_ranks)

    def prepare(self) -> None:
        """Check for unannounced writes, and make the states that a new weight or setting needs.

        Raises LiveTableError if the module now has another weight, which its optimizer does not train, or if other code
        keeps state in the optimizer.
        """
        if self._optimizer is not None and not self._group:
            raise LiveTableError(
                f"table {self.name!r}: its module now has a weight that {type(self._optimizer).__name__} does not "
                "train: give the optimizer this weight, or close() the live tables and call live_tables again"
            )
        if self._rule is not None:
            own = [*self._rule.keys(self._group), *self._rule.others, "step"]
            if others := [str(key) for key in self._state if key not in own]:
                raise LiveTableError(
                    f"table {self.name!r}: other code keeps {first_few(others)} in the state of its "
                    f"{type(self._optimizer).__name__}, which a live table does not save: keep it outside of the "
                    "optimizer, or leave the table dense by exclude="
                )
        self._announcer.guard.settle()
        self._make_state()

    def look(self) -> None:
        self._announcer.guard.look()

    def tensors(self) -> Mapping[str, Tensor]:
        whole = self.whole()
        return {**whole, EMBEDDING: whole[EMBEDDING].detach()}

    def whole(self) -> Mapping[str, Tensor]:  # the tensors of module and optimizer, not reduced to this rank's part
        group, state = self._group, self._state  # searched once, because each step calls this method
        rule = self._rule if group else None
        states = {slot_of(rule.prefix, key): state.get(key) for key in rule.keys(group)} if rule is not None else {}
        return {EMBEDDING: self.weight, **{slot: value for slot, value in states.items() if isinstance(value, Tensor)}}

    def other_slots(self) -> Mapping[str, SlotSpec]:
        """Return the slots that the table gets if a load sets optimizer settings that need them."""
        if self._rule is None:
            return {}
        slots = (slot_of(self._rule.prefix, key) for key in self._rule.others)
        return {slot: spec_of(slot, self.weight) for slot in slots if slot not in self.tensors()}

    def part_of(self, gradient: Tensor) -> Tensor | None:
        return gradient

    def attach(self, door: Door) -> Callable[[], object]:
        self._announcer = TorchAnnouncer(self, WeakDoor(door))
        return self._announcer.install((self._module, *self._tied), self._optimizer)

    def scalars(self) -> Mapping[str, int | float]:
        step = self._state.get("step")
        return {} if step is None else {"step": int(step)}

    def settings(self) -> Mapping[str, Any]:
        return {key: value for key, value in self._group.items() if key != "params"} if self._optimizer else {}

    def finish(self, scalars: Mapping[str, int | float], settings: Mapping[str, Any]) -> None:
        """Set the step count, and those of the settings that the parameter group of the weight has."""
        if self._optimizer is None:
            return
        if "step" in scalars:
            set_step(self._optimizer, self.weight, int(scalars["step"]))
        group = self._group
        for key in group.keys() & settings.keys() - {"params"}:
            group[key] = _set(group[key], settings[key])
        self._make_state()
        if settings and self._rule is not None and group:
            for key in {*self._rule.others} - {*self._rule.keys(group)}:  # states that the new settings do not have
                self._optimizer.state.get(self.weight, {}).pop(key, None)
        if self._rule is not None and "sum" in self._rule.keys(group):
            is_usual = bool((self.tensors()[slot_of(self._rule.prefix, "sum")] >= 0).all())
            self._reason_of_load = None if is_usual else "a sum that is NaN or negative changes rows without a gradient"

    def _make_state(self) -> None:
        if self._optimizer is not None and self._rule is not None and self._group:
            make_state(self._optimizer, self._group, self.weight, self._rule)

    @property
    def _state(self) -> Mapping[str, Any]:
        return self._optimizer.state.get(self.weight, {}) if self._optimizer is not None else {}

    @property
    def _group(self) -> dict[str, Any]:
        weight, groups = self.weight, self._optimizer.param_groups if self._optimizer is not None else ()
        return next((group for group in groups if any(one is weight for one in group["params"])), {})


def _set(setting: Any, value: Any) -> Any:
    """Return a setting with a saved value; a tensor is filled, as ``lr`` and ``betas`` may be for a compiled step."""
    if isinstance(setting, Tensor):
        return setting.fill_(value)
    return tuple(map(_set, setting, value)) if isinstance(setting, tuple) else value


class DTensorEmbedding(TorchEmbedding):
    """The rows of an embedding on this rank: a part of them, a copy, or a copy of a part."""

    def __init__(
        self,
        name: str,
        module: Any,
        optimizer: Optimizer | None,
        rule: TorchRule | None,
        tied: Sequence[nn.Module] = (),
    ) -> None:
        self._weight: Tensor = module.weight
        super().__init__(name, module, optimizer, rule, tied)

    @property
    def weight(self) -> Tensor:
        now = self._module.weight
        if now is not self._weight and is_sharded(now) and spread_of(now) == spread_of(self._weight):
            self._weight = now
        return self._weight

    def box(self) -> Box:
        return box_of(self.weight)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return this rank's part of weight and states. Raises LiveTableError if a state has another layout."""
        whole, expected = self.whole(), spread_of(self.weight)
        for slot, tensor in whole.items():
            if spread_of(tensor) != expected:
                found = f"{tuple(tensor.shape)} {getattr(tensor, 'placements', 'of one rank')}"
                raise LiveTableError(
                    f"table {self.name!r}: found {slot} as {found}, expected {expected[0]} {expected[2]}, the layout "
                    "of its weight: call live_tables before the first step, and load no state of another layout"
                )
        return {slot: local_of(tensor).detach() for slot, tensor in whole.items()}

    def part_of(self, gradient: Any) -> Tensor | None:
        placements = getattr(gradient, "placements", None)
        if spread_of(gradient) == spread_of(self.weight):
            return local_of(gradient)
        if placements and all(one.is_replicate() for one in placements):
            return local_of(gradient)[slice(*self.box().rows)]
        return None
