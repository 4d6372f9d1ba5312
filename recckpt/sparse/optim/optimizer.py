"""The base class of sparse optimizers: tables take the place of parameters, and slots the place of state."""

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
    "recckpt.recis.filter_out_sparse_param(model) returns a model's tables; a dense optimizer takes model.parameters()"
)
Int64s = npt.NDArray[np.int64]
made: WeakValueDictionary[int, SparseOptimizer] = WeakValueDictionary()  # living optimizers of this process, by id()
_IN_EVAL_MODE = (
    "{} of the {} ids with gradients in this step have no row and are not trained, because they were looked up in eval "
    "mode, which makes no rows; call model.train() before training goes on, for example after a validation"
)
_FROM_1 = (
    "the slots of {} hold values of earlier steps, but it counts the steps of this table from 1, because another "
    "optimizer made these values, or the checkpoint did not have their step, as if a file of rows was imported: its "
    "bias correction, or its learning rate, is that of a first step; call load_state_dict with the state of the other "
    "optimizer, or exclude 'sparse_opt' from the load to start the slots fresh"
)
Tables = Mapping[str, types.SavableTable] | Iterable[types.SavableTable] | Iterable[Group]


class TableParameter(Tensor):
    """An empty tensor whose ``grad`` is the table's waiting gradients.

    torch identifies parameters by tensor, and needs of a parameter only that it is a tensor with a ``grad``.
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
    """Return scalar tensors and numpy scalars as Python numbers, including those in lists and tuples."""
    if isinstance(value, (Tensor, np.generic)):
        return value.item()
    if isinstance(value, (list, tuple)):
        return type(value)(plain(item) for item in value)
    return value


def options(group: Mapping[str, Any], *without: str) -> Group:
    """Return the entries of a group as plain values, except its tensors and the keys in ``without``."""
    return {key: plain(value) for key, value in group.items() if key != "params" and key not in without}


def check_number(group: Group, name: str, below: float = float("inf")) -> None:
    value = group[name]
    if not isinstance(value, (int, float)) or not 0 <= value < below:
        raise ValueError(f"found {name}={value!r}, expected a number of [0, {below})")


def match(saved: Mapping[str, Any], live: Sequence[Group], slots: Sequence[str], keys: Iterable[str]) -> list[Group]:
    """Return the groups of a saved ``state_dict()`` in the live order. Raises StateMismatchError if they differ."""
    if not _is_well_formed(saved):
        raise StateMismatchError(
            "the state dict", remedy="it is not of a recckpt sparse optimizer: load one that such an optimizer saved"
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
    """A ``torch.optim.Optimizer`` over tables, which applies a rule to the rows that had a gradient.

    Learning-rate schedulers, parameter groups, gradient accumulation, ``torch.amp.GradScaler`` and clipping by
    ``torch.nn.utils`` over ``param_groups`` work as with any optimizer. Tables are identified by their ``name``. State
    of rows is in slots of the tables and saved with them; ``state_dict()`` holds the step of each table and the
    hyper-parameters, as plain scalars.

    Args:
        tables: ``{name: table}``, a list of tables, or a list of groups ``{"tables": ..., "lr": ...}``.
        defaults: hyper-parameters of groups that do not set their own.

    Attributes:
        slot_names: the slots that this optimizer has in every table.
    """

    slot_names: ClassVar[tuple[str, ...]] = ()
    _numbers: ClassVar[tuple[str, ...]] = ("lr",)  # hyper-parameters that must be 0 or more

    def __init__(self, tables: Tables, defaults: Group) -> None:
        self._tables: dict[str, HashTable] = {}
        self._mark = object()  # set as ``trained_by`` of its tables; a deep copy copies both
        self._n_accumulated, self._n_since = 1, 0  # step() calls per update, and calls since the last update
        self._under_way: dict[TableParameter, tuple[int, Int64s]] = {}  # a begun step, and a flag set when it is done
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
        """Say whether this is the last optimizer made for a table, and so the one that gets the table's gradients."""
        return table.trained_by is self._mark

    def add_param_group(self, param_group: Group) -> None:
        """Add tables with hyper-parameters of their own: ``{"tables": ..., "lr": ...}``.

        Raises:
            TypeError: an argument is not a table.
            ValueError: a table was already added, or holds integers; a hyper-parameter is out of range.
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
            TypeError, ValueError: as :meth:`add_param_group` raises; nothing has been added.
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
        """Make only every ``steps``-th call of :meth:`step` update rows, with the gradients summed since the last one.

        The other calls do nothing, and :meth:`zero_grad` between them does nothing, so a loop may call both after each
        batch; divide the loss by ``steps`` for a mean. This method and :meth:`load_state_dict` restart the count.

        With more than one step, :meth:`step` refuses a ``torch.amp.GradScaler``, which would divide the sum by the
        scale at each batch: leave ``steps`` at 1 then, and call ``scaler.step(optimizer)``, ``scaler.update()`` and
        :meth:`zero_grad` at each n-th batch only. Likewise, clip only before the call that updates: at other batches
        clipping would clip the sum so far again and again.

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
        """Whether gradients accumulated by earlier calls of :meth:`step` wait for the next update."""
        return self._n_since > 0

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True makes a ``GradScaler`` set ``found_inf`` here without unscaling; the next step then refuses it."""
        return self._n_accumulated > 1 or is_stepped_by_accelerate()

    @opaque
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, unless :meth:`set_grad_accum_steps` is accumulating them."""
        if self._n_since:
            return
        for table in self._tables.values():
            table.zero_grad(set_to_none)

    @opaque
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the rows that had a gradient since the last step, except in frozen tables.

        Args:
            closure: computes the loss anew, runs its backward pass, and returns the loss.

        Returns:
            What ``closure`` returned.

        Raises:
            ValueError: another sparse optimizer was made later for one of the tables; a ``GradScaler`` or accelerate
                steps an optimizer that accumulates (:meth:`set_grad_accum_steps`); or accelerate uses fp16, where it
                can scale only one optimizer (:class:`JointOptimizer`). Nothing has been changed.
        """
        self._refuse_scaler()
        taken_over = [name for name, table in self._tables.items() if table.trained_by is not self._mark]
        if taken_over:
            raise ValueError(
                f"{type(self).__name__}: another sparse optimizer was made later for {taken_over}, and only the last "
                "one gets the gradients of a table: make one optimizer for each table"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups if self._n_since == self._n_accumulated - 1 else ():
            for parameter in group["params"]:
                self._step_table(parameter, options(group))
        self._n_since = (self._n_since + 1) % self._n_accumulated  # last, so that an interrupted step can be repeated
        return loss

    def _refuse_scaler(self) -> None:
        """Refuse a step if a GradScaler would unscale gradients twice, or accelerate would count batches twice."""
        has_scaler = self.__dict__.pop("found_inf", None) is not None  # set only if the gradients are still scaled
        self.__dict__.pop("grad_scale", None)
        n = self._n_accumulated
        if has_scaler and n > 1:  # the scaler would unscale the sum so far at each batch
            raise ValueError(
                f"found a GradScaler and set_grad_accum_steps({n}), expected only one of the two: leave it at 1, and "
                "accumulate by calling scaler.step and scaler.update on each n-th batch only"
            )
        if n > 1 and is_stepped_by_accelerate():
            raise ValueError(
                f"found set_grad_accum_steps({n}) of an optimizer that accelerate has prepared, but accelerate counts "
                "batches itself: leave it at 1, and pass Accelerator(gradient_accumulation_steps=...)"
            )
        if has_scaler:
            raise ValueError(
                "accelerate updates the scale after the step of each optimizer that it has prepared, so with fp16 it "
                "would unscale a second optimizer's gradients twice: prepare recckpt.sparse.JointOptimizer(dense, "
                "sparse) instead of both optimizers, or use mixed_precision='bf16'"
            )

    def _step_table(self, parameter: TableParameter, group: Group) -> None:
        """Update the rows of a table, use up its gradients and count the step, either all of this or nothing."""
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
            weights = columns[EMBEDDING].gather(taken.rows).to(taken.grads.dtype)  # at least float32
            slots = [columns[name].gather(taken.rows) for name in self.slot_names]
            if step == 1 and ("betas" in group or group.get("lr_decay")):  # rules that use the step
                initial = table.store.rows.initial
                if any((slot != initial[name]).any() for name, slot in zip(self.slot_names, slots, strict=True)):
                    warn_once(table, "steps", _FROM_1.format(type(self).__name__))
            self._apply(weights, taken, slots, step, group)
            self._under_way[parameter] = step, taken.used
            values = {EMBEDDING: weights, **dict(zip(self.slot_names, slots, strict=True))}
            table.store.write(taken.rows, values, flag=taken.used)
            self._count_step(parameter)

    def _count_step(self, parameter: TableParameter) -> None:
        """Count a table's last step if its rows were written, even if an exception followed. Under the table's lock."""
        step, is_done = self._under_way.get(parameter, (0, np.zeros(1, np.int64)))
        if is_done[0]:
            self.state[parameter] = {**self.state.get(parameter, {}), "step": step}
            self._under_way.pop(parameter, None)

    def _count_steps(self) -> None:
        for parameter in list(self._under_way):
            with parameter.table.store.lock:
                self._count_step(parameter)

    def state_dict(self) -> dict[str, Any]:
        """Return each table's step and the groups, as plain scalars; all other state is in the tables' slots."""
        self._count_steps()
        packed = super().state_dict()
        names = [name for group in packed["param_groups"] for name in group["tables"]]
        return {
            "slots": list(self.slot_names),
            "state": {names[index]: dict(state) for index, state in packed["state"].items()},
            "param_groups": [options(group) for group in packed["param_groups"]],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load steps and hyper-parameters from a ``state_dict()`` of the same tables, in any order.

        Raises:
            StateMismatchError: the tables, the rule or the groups differ. Nothing has been changed.
        """
        known = [key for key in self.defaults if key != "differentiable"]  # torch adds this key at the first load
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

    def declare_slots(self) -> None:
        """Internal: declare all slots again, after the groups got other settings, from which new rows begin."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._add_slots(parameter.table, options(group))

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
                raise ValueError(f"table {table.name!r} of {table.dtype} has no gradients: leave out this table")
            if not table.is_trained:
                raise ValueError(f"table {table.name!r} is an average, or holds counts: leave out this table")
            if table.name in seen:
                same = seen[table.name] is table
                wrong = "is listed twice: list it once" if same else "shares its name with another table: rename one"
                raise ValueError(f"table {table.name!r} {wrong}")
            seen[table.name] = table

    def _add_slots(self, table: HashTable, group: Group) -> None:
        """Add this optimizer's slots to a table: by default with the shape of embeddings, starting at zero."""
        dtype = torch.promote_types(table.dtype, torch.float32)  # dtype of the moments, and of the arithmetic
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
        """Apply the rule in place; all tensors have one row per id."""
        raise NotImplementedError


def is_stepped_by_accelerate() -> bool:
    """Say whether the call comes from accelerate's optimizer, which leaves no other trace on the wrapped optimizer."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "accelerate.optimizer":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
