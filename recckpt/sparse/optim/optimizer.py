"""What the sparse optimizers have in common: tables in place of parameters, slots in place of state."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer

from recckpt import types
from recckpt.errors import StateMismatchError
from recckpt.sparse.table.checks import opaque
from recckpt.sparse.table.gradients import RowGradients
from recckpt.sparse.table.nn_module import warn_once
from recckpt.sparse.table.table import HashTable
from recckpt.types import EMBEDDING, positive_int

Group = dict[str, Any]
REMEDY = (
    "recckpt.recis.filter_out_sparse_param(model) gives the tables of a model; its parameters are for a dense optimizer"
)
Int64s = npt.NDArray[np.int64]
made: WeakValueDictionary[int, SparseOptimizer] = WeakValueDictionary()  # the living ones of this process, by id()
_IN_EVAL_MODE = (
    "{} of the {} ids that a step trains have no row, and get none: they were looked up in eval mode, where the values "
    "that they read are not trained; call model.train() before training goes on, as after a validation"
)
Tables = Mapping[str, types.SavableTable] | Iterable[types.SavableTable] | Iterable[Group]


class TableParameter(Tensor):
    """An empty tensor whose ``grad`` is the table's waiting gradients.

    torch keeps its books by tensor, and asks of a parameter only that it is one and has a ``grad``.
    """

    table: HashTable
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as nn.Parameter

    def __new__(cls, table: HashTable) -> TableParameter:
        self = torch.empty(0, device="cpu").as_subclass(cls)
        self.table = table
        return self

    @property
    def grad(self) -> Tensor | None:
        return self.table.grad

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        self.table.grad = grad

    @property
    def requires_grad(self) -> bool:
        return self.table.requires_grad

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.table.requires_grad = requires_grad

    def requires_grad_(self, requires_grad: bool = True) -> TableParameter:
        self.table.requires_grad = requires_grad
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TableParameter:
        twin = memo[id(self)] = TableParameter(copy.deepcopy(self.table, memo))
        return twin


def plain(value: Any) -> Any:
    """Return scalar tensors and numpy scalars as Python numbers, also inside lists and tuples."""
    if isinstance(value, (Tensor, np.generic)):
        return value.item()
    if isinstance(value, (list, tuple)):
        return type(value)(plain(item) for item in value)
    return value


def options(group: Mapping[str, Any], *without: str) -> Group:
    """Return the entries of a group in plain values, without its tensors and ``without``."""
    return {key: plain(value) for key, value in group.items() if key != "params" and key not in without}


def check_number(group: Group, name: str, below: float = float("inf")) -> None:
    value = group[name]
    if not isinstance(value, (int, float)) or not 0 <= value < below:
        raise ValueError(f"found {name}={value!r}, expected a number of [0, {below})")


def match(saved: Mapping[str, Any], live: Sequence[Group], slots: Sequence[str], keys: Iterable[str]) -> list[Group]:
    """Return the groups of a saved ``state_dict()`` in the live order; StateMismatchError if they are others."""
    if not _is_well_formed(saved):
        raise StateMismatchError(
            "the state dict", remedy="it is not one of a recckpt sparse optimizer: save and load the same one"
        )
    saved_groups = {frozenset(group["tables"]): group for group in saved["param_groups"]}
    have, need = frozenset().union(*saved_groups), [name for group in live for name in group["tables"]]
    mismatched: dict[str, tuple[object, object]] = {}
    if list(saved["slots"]) != list(slots):
        mismatched["slots"] = (saved["slots"], list(slots))
    matched = []
    for number, group in enumerate(live):
        own = saved_groups.get(frozenset(group["tables"]), {})
        if have == set(need) and not own:
            others = [sorted(tables) for tables in saved_groups if tables & set(group["tables"])]
            mismatched[f"tables of group {number}"] = (others, group["tables"])
        elif own and not set(keys) <= set(own):
            mismatched[f"hyper-parameters of group {number}"] = (sorted(own), sorted(keys))
        matched.append({**options(group), **own, "tables": group["tables"]})
    missing, unexpected = sorted(set(need) - have), sorted((have | set(saved["state"])) - set(need))
    if missing or unexpected or mismatched:
        raise StateMismatchError(
            "the state of the sparse optimizer", missing=missing, unexpected=unexpected, mismatched=mismatched
        )
    return matched


def _is_well_formed(saved: Any) -> bool:
    return (
        isinstance(saved, Mapping)
        and {"slots", "state", "param_groups"} <= set(saved)
        and isinstance(saved["slots"], (list, tuple))
        and isinstance(saved["param_groups"], (list, tuple))
        and all(isinstance(group, Mapping) and "tables" in group for group in saved["param_groups"])
        and isinstance(saved["state"], Mapping)
        and all(isinstance(state, Mapping) for state in saved["state"].values())
        and all(type(step := state.get("step")) is int and step >= 0 for state in saved["state"].values())
    )


def as_list(tables: Any) -> list[Any]:
    if isinstance(tables, HashTable):
        return [tables]
    if not isinstance(tables, Iterable):
        raise TypeError(f"a sparse optimizer takes tables, found a {type(tables).__name__}: {REMEDY}")
    return list(tables.values() if isinstance(tables, Mapping) else tables)


class SparseOptimizer(Optimizer):
    """A ``torch.optim.Optimizer`` over tables: a rule for the rows that had a gradient.

    Learning-rate schedulers, parameter groups, gradient accumulation, ``torch.amp.GradScaler`` and clipping by
    ``torch.nn.utils`` over ``param_groups`` work as with any optimizer. A table is known by its ``name``. State of rows
    is in slots of the tables and saved with them; ``state_dict()`` holds the step of each table and the
    hyper-parameters, as plain scalars.

    Args:
        tables: ``{name: table}``, a list of tables, or a list of groups ``{"tables": ..., "lr": ...}``.
        defaults: hyper-parameters of groups that do not name their own.

    Attributes:
        slot_names: the slots of every table that belong to this optimizer.
    """

    slot_names: ClassVar[tuple[str, ...]] = ()
    _numbers: ClassVar[tuple[str, ...]] = ("lr",)  # hyper-parameters of at least 0

    def __init__(self, tables: Tables, defaults: Group) -> None:
        self._tables: dict[str, HashTable] = {}
        self._mark = object()  # on its tables; copied with them
        self._n_accumulated, self._n_since = 1, 0  # steps that make one update, and those since the last one
        self._under_way: dict[TableParameter, tuple[int, Int64s]] = {}  # steps begun, and whether they are done
        items = as_list(tables)
        if not items:
            raise ValueError(f"a sparse optimizer needs a table, found none: {REMEDY}")
        super().__init__(items if isinstance(items[0], dict) else [{"tables": items}], options(defaults))
        made[id(self)] = self

    @property
    def tables(self) -> dict[str, HashTable]:
        """The tables by name."""
        return dict(self._tables)

    def trains(self, table: HashTable) -> bool:
        """Say whether this optimizer gets the gradients of a table, as the last one made for the table does."""
        return table.trained_by is self._mark

    def add_param_group(self, param_group: Group) -> None:
        """Add tables with hyper-parameters of their own: ``{"tables": ..., "lr": ...}``.

        Raises:
            TypeError: something is not a table.
            ValueError: a table is here already, or holds integers; a hyper-parameter is out of range.
        """
        if not isinstance(param_group, dict) or "tables" not in param_group:
            keys = sorted(param_group) if isinstance(param_group, dict) else type(param_group).__name__
            raise TypeError(f"a group is a dict with the key 'tables', found {keys}: {REMEDY}")
        tables = as_list(param_group["tables"])
        self._check_tables(tables)
        group = {**self.defaults, **options(param_group, "tables")}
        self._check(group)
        super().add_param_group({**group, **self._taken_over(tables, group)})
        for table in tables:
            table._train_by(self._mark)

    def add_params(self, params: Tables) -> None:
        """Add tables to the first group, with its hyper-parameters.

        Args:
            params: ``{name: table}``, or a list of tables.

        Raises:
            TypeError, ValueError: as in :meth:`add_param_group`; nothing has been added.
        """
        tables, first = as_list(params), self.param_groups[0]
        self._check_tables(tables)
        for key, added in self._taken_over(tables, first).items():
            first[key] += added
        for table in tables:
            table._train_by(self._mark)

    def _taken_over(self, tables: list[HashTable], group: Group) -> dict[str, list[Any]]:
        for table in tables:
            self._add_slots(table, group)
            self._tables[table.name] = table
        return {"params": [TableParameter(table) for table in tables], "tables": [table.name for table in tables]}

    def set_grad_accum_steps(self, steps: int) -> None:
        """Update rows at every ``steps``-th :meth:`step` only, with the sum of the gradients since the last update.

        The calls in between do nothing, and neither do their calls of :meth:`zero_grad`, so a loop may call both after
        each batch; divide the loss by ``steps`` for a mean. This method and :meth:`load_state_dict` restart the count.

        With more than one step, :meth:`step` refuses a ``torch.amp.GradScaler``, which would divide the sum by the
        scale at each batch: leave ``steps`` at 1 then, and call ``scaler.step(optimizer)``, ``scaler.update()`` and
        :meth:`zero_grad` at each n-th batch only. Do not clip in between either, since that clips the sum so far again
        at each batch; clip before the call that updates.

        Args:
            steps: at least 1; with 1 each call updates.

        Raises:
            ValueError: ``steps`` is not an int of at least 1.
        """
        self._n_accumulated, self._n_since = positive_int("set_grad_accum_steps: steps", steps), 0

    @property
    def grad_accum_steps(self) -> int:
        """How many calls of :meth:`step` make one update, as set by :meth:`set_grad_accum_steps`."""
        return self._n_accumulated

    @property
    def is_due(self) -> bool:
        """Whether the next call of :meth:`step` updates rows."""
        return self._n_since == self._n_accumulated - 1

    @property
    def has_gradients_waiting(self) -> bool:
        """Whether gradients of earlier steps wait for the next update."""
        return self._n_since > 0

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True lets a ``GradScaler`` set ``found_inf`` here instead of unscaling; the step then refuses it."""
        return self._n_accumulated > 1 or is_stepped_by_accelerate()

    @opaque
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the backward passes so far, unless they are being accumulated."""
        if self._n_since:
            return
        for table in self._tables.values():
            table.zero_grad(set_to_none)

    @opaque
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the rows that had a gradient since the last step, except in frozen tables.

        Args:
            closure: computes the loss again, with its backward pass, and returns it.

        Returns:
            What ``closure`` returned.

        Raises:
            ValueError: another sparse optimizer has been made for one of the tables since; a ``GradScaler`` or
                accelerate steps an optimizer that accumulates (:meth:`set_grad_accum_steps`); or accelerate uses fp16,
                where it can scale one optimizer only (:class:`JointOptimizer`). Nothing has been changed.
        """
        self._refuse_scaler()
        taken_over = [name for name, table in self._tables.items() if table.trained_by is not self._mark]
        if taken_over:
            raise ValueError(
                f"{type(self).__name__}: another sparse optimizer has been made since for {taken_over}, and the "
                "gradients of a table go to one: keep either of them"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups if self._n_since == self._n_accumulated - 1 else ():
            for parameter in group["params"]:
                self._step_table(parameter, options(group))
        self._n_since = (self._n_since + 1) % self._n_accumulated  # last: a step that was interrupted is one to repeat
        return loss

    def _refuse_scaler(self) -> None:
        """Refuse a step that a scaler or accelerate would count or scale a second time."""
        has_scaler = self.__dict__.pop("found_inf", None) is not None  # then the gradients are still scaled
        self.__dict__.pop("grad_scale", None)
        n = self._n_accumulated
        if has_scaler and n > 1:  # it would unscale the sum so far with each of them
            raise ValueError(
                f"found a GradScaler and set_grad_accum_steps({n}), expected one of them: leave it at 1, and "
                "accumulate by calling scaler.step and update on each n-th batch"
            )
        if n > 1 and is_stepped_by_accelerate():
            raise ValueError(
                f"found set_grad_accum_steps({n}) of an optimizer that accelerate has prepared, which counts "
                "batches too: leave it at 1, and give Accelerator(gradient_accumulation_steps=...)"
            )
        if has_scaler:
            raise ValueError(
                "accelerate updates the scale after the step of each optimizer that it has prepared, so with fp16 the "
                "gradients of a second one would be unscaled twice: prepare recckpt.sparse.JointOptimizer(dense, "
                "sparse) in place of the two, or use mixed_precision='bf16'"
            )

    def _step_table(self, parameter: TableParameter, group: Group) -> None:
        """Update the rows of a table, use up its gradients and count the step: all of it or nothing."""
        table = parameter.table
        with table.store.lock:
            self._count_step(parameter)
            taken = table.pending_gradients.of_rows(table.store) if table.requires_grad else None
            if taken is None:
                return
            if taken.n_lost and not table.training:
                n_ids = taken.n_lost + len(taken.rows)
                warn_once(table, "eval mode", _IN_EVAL_MODE.format(taken.n_lost, n_ids))
            step, columns = self.state.get(parameter, {}).get("step", 0) + 1, table.store.columns
            weights = columns[EMBEDDING].gather(taken.rows).to(taken.grads.dtype)  # float32 at least
            slots = [columns[name].gather(taken.rows) for name in self.slot_names]
            self._apply(weights, taken, slots, step, group)
            self._under_way[parameter] = step, taken.used
            values = {EMBEDDING: weights, **dict(zip(self.slot_names, slots, strict=True))}
            table.store.write(taken.rows, values, flag=taken.used)
            self._count_step(parameter)

    def _count_step(self, parameter: TableParameter) -> None:
        """Count the last step of a table if it is done, even if an exception followed. Under the table's lock."""
        step, is_done = self._under_way.get(parameter, (0, np.zeros(1, np.int64)))
        if is_done[0]:
            self.state[parameter] = {**self.state.get(parameter, {}), "step": step}
            self._under_way.pop(parameter, None)

    def _count_steps(self) -> None:
        for parameter in list(self._under_way):
            with parameter.table.store.lock:
                self._count_step(parameter)

    def state_dict(self) -> dict[str, Any]:
        """Return the steps by table name and the groups, in plain scalars; everything else is in the tables."""
        self._count_steps()
        packed = super().state_dict()
        names = [name for group in packed["param_groups"] for name in group["tables"]]
        return {
            "slots": list(self.slot_names),
            "state": {names[index]: dict(state) for index, state in packed["state"].items()},
            "param_groups": [options(group) for group in packed["param_groups"]],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the steps and hyper-parameters of a ``state_dict()`` over the same tables, in any order.

        Raises:
            StateMismatchError: it has other tables, another rule or other groups. Nothing has been changed.
        """
        known = [key for key in self.defaults if key != "differentiable"]  # torch adds it at the first load
        groups = match(state_dict, self.param_groups, self.slot_names, known)
        for group in groups:
            self._check(group)
        self._under_way.clear()
        self._n_since = 0
        names = [name for group in groups for name in group["tables"]]
        number = {name: i for i, name in enumerate(names)}
        super().load_state_dict(
            {
                "state": {number[name]: dict(state) for name, state in state_dict["state"].items()},
                "param_groups": [{**group, "params": [number[name] for name in group["tables"]]} for group in groups],
            }
        )

    def __getstate__(self) -> dict[str, Any]:
        self._count_steps()
        return {
            **super().__getstate__(),
            "_tables": self._tables,
            "_mark": self._mark,
            "_under_way": {},
            "_n_accumulated": self._n_accumulated,
            "_n_since": self._n_since,
        }

    def _check_tables(self, tables: list[Any]) -> None:
        seen = dict(self._tables)
        for table in tables:
            if not isinstance(table, HashTable):
                kind = type(table).__name__
                raise TypeError(f"a sparse optimizer takes recckpt.sparse.HashTable, found a {kind}: {REMEDY}")
            if not table.dtype.is_floating_point:
                raise ValueError(f"table {table.name!r} of {table.dtype} has no gradients: leave it out")
            if not table.is_trained:
                raise ValueError(f"table {table.name!r} is an average, or holds counts: leave it out")
            if table.name in seen:
                same = seen[table.name] is table
                wrong = "is here twice: list it once" if same else "shares its name with another table: rename one"
                raise ValueError(f"table {table.name!r} {wrong}")
            seen[table.name] = table

    def _add_slots(self, table: HashTable, group: Group) -> None:
        """Declare the slots of this optimizer: by default shaped like embeddings, starting at zero."""
        dtype = torch.promote_types(table.dtype, torch.float32)  # for moments and arithmetic
        for name in self.slot_names:
            table.add_slot(name, table.embedding_shape, dtype)

    def _check(self, group: Group) -> None:
        for name in self._numbers:
            check_number(group, name)
        betas = group.get("betas", (0.0, 0.0))
        if not isinstance(betas, (list, tuple)) or len(betas) != 2:
            raise ValueError(f"found betas={betas!r}, expected two numbers of [0, 1)")
        for number, beta in enumerate(betas):
            check_number({f"betas[{number}]": beta}, f"betas[{number}]", below=1.0)

    def _apply(self, weights: Tensor, taken: RowGradients, slots: list[Tensor], step: int, group: Group) -> None:
        """Apply the rule; rules that need only the summed gradients override :meth:`_update` instead."""
        self._update(weights, taken.grads, slots, step, group)

    def _update(self, weights: Tensor, grads: Tensor, slots: list[Tensor], step: int, group: Group) -> None:
        """Apply the rule in place; all tensors have one row an id."""
        raise NotImplementedError


def is_stepped_by_accelerate() -> bool:
    """Say whether accelerate's optimizer makes this step; it leaves no other mark on the inner one."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "accelerate.optimizer":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
