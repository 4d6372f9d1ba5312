"""``nn.Embedding`` and ``nn.EmbeddingBag`` with an optimizer of torch as live tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from recckpt.errors import LiveTableError
from recckpt.live.hooks import WeakDoor
from recckpt.live.optimizer_slots import slot_of
from recckpt.live.torch_announcer import TorchAnnouncer
from recckpt.live.torch_rules import TorchRule, make_state, set_step
from recckpt.parallel.ranks import rank_and_size
from recckpt.sparse.table.checks import spec_of
from recckpt.types import EMBEDDING, Box, Door, SlotSpec


class TorchEmbedding:
    """The weight of an embedding, and what its optimizer keeps of each row.

    Args:
        name: in checkpoints.
        module: whose ``weight`` it is.
        optimizer: that trains it; None where the weight is frozen.
        rule: of the optimizer.
        tied: other modules that have the same weight.
    """

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
        self._make_state()

    @property
    def weight(self) -> Tensor:
        """The weight of now."""
        weight: Tensor = self._module.weight
        return weight

    @property
    def reason(self) -> str | None:
        """Why rows may change that have no gradient; None where none does."""
        group = self._group
        return self._rule.reason(group) if self._rule and group else None

    def box(self) -> Box:
        """Return all rows: each rank has a copy of them, as of all weights that are not sharded."""
        return Box((0, self.n_rows), replica=self._rank, n_replicas=self._n_ranks)

    def prepare(self) -> None:
        """Look for writes that were not announced, and give a new weight, or a setting, the states that it needs.

        Raises:
            LiveTableError: the module has another weight by now, which its optimizer does not train.
        """
        if self._optimizer is not None and not self._group:
            raise LiveTableError(
                f"table {self.name!r}: its module has another weight than {type(self._optimizer).__name__} trains: "
                "give the optimizer that one, or close() the live tables and call live_tables once more"
            )
        self._announcer.guard.settle()
        self._make_state()

    def look(self) -> None:
        """Look for writes that were not announced."""
        self._announcer.guard.look()

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the weight and the states of the optimizer that have a value a row."""
        whole = self.whole()
        return {**whole, EMBEDDING: whole[EMBEDDING].detach()}

    def whole(self) -> Mapping[str, Tensor]:
        """Return them as the module and the optimizer have them."""
        group, state = self._group, self._state  # once: each step asks for them, and they are looked for
        slots = self._rule.slots(group) if self._rule and group else {}
        states = {slot: state.get(key) for key, slot in slots.items()}
        return {EMBEDDING: self.weight, **{slot: value for slot, value in states.items() if isinstance(value, Tensor)}}

    def other_slots(self) -> Mapping[str, SlotSpec]:
        """Return the slots that it gets once a load has given its optimizer settings that need them."""
        if self._rule is None:
            return {}
        slots = (slot_of(self._rule.prefix, key) for key in self._rule.others)
        return {slot: spec_of(slot, self.weight) for slot in slots if slot not in self.tensors()}

    def part_of(self, gradient: Tensor) -> Tensor | None:
        """Return the gradient of the rows of this rank."""
        return gradient

    def attach(self, door: Door) -> Callable[[], object]:
        """Announce what a step, a load, and in forward passes ``max_norm`` are about to change."""
        self._announcer = TorchAnnouncer(self, WeakDoor(door))
        return self._announcer.install((self._module, *self._tied), self._optimizer)

    def scalars(self) -> Mapping[str, int | float]:
        """Return the steps of the optimizer."""
        step = self._state.get("step")
        return {} if step is None else {"step": int(step)}

    def settings(self) -> Mapping[str, Any]:
        """Return the settings of the group of the weight."""
        return {key: value for key, value in self._group.items() if key != "params"} if self._optimizer else {}

    def finish(self, scalars: Mapping[str, int | float], settings: Mapping[str, Any]) -> None:
        """Take over the steps, and what settings the group of the weight has."""
        if self._optimizer is None:
            return
        if "step" in scalars:
            set_step(self._optimizer, self.weight, int(scalars["step"]))
        group = self._group
        for key in group.keys() & settings.keys() - {"params"}:
            if isinstance(group[key], Tensor):  # as lr may be, for a compiled step
                group[key].fill_(settings[key])
            else:
                group[key] = settings[key]
        self._make_state()

    def _make_state(self) -> None:
        if self._optimizer is not None and self._rule is not None and self._group:
            make_state(self._optimizer, self._group, self.weight, self._rule)

    @property
    def _state(self) -> Mapping[str, Any]:
        return self._optimizer.state.get(self.weight, {}) if self._optimizer is not None else {}

    @property
    def _group(self) -> dict[str, Any]:
        """The group of the optimizer that has the weight."""
        weight, groups = self.weight, self._optimizer.param_groups if self._optimizer is not None else ()
        return next((group for group in groups if any(one is weight for one in group["params"])), {})
