"""The sparse optimizers of RecIS: converts names of slots and steps in both directions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from recckpt.convert.source import Array, LeftOut, SourceTensor
from recckpt.errors import ConversionError
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.types import is_optimizer_slot

_SCALAR = re.compile(r"sparse_\w+_(step|beta1|beta2)", re.DOTALL)
_BETAS = ("beta1", "beta2")
Slots = Mapping[str, Sequence[str]]  # table -> recckpt's names of its slots


@dataclass(frozen=True)
class Rule:
    prefix: str  # prefix of its slots and scalars in RecIS
    slots: Mapping[str, str]  # RecIS's name of a slot -> recckpt's name, in the order of recckpt's optimizer
    # whether it keeps one value per row, of shape (1,) in RecIS and () here, and counts steps per table
    is_row_wise: bool = False
    beta_dtype: type[np.floating[Any]] | None = None  # dtype of betas in RecIS; None without betas

    @property
    def here(self) -> tuple[str, ...]:
        return tuple(self.slots.values())


_ADAMS = (("sparse_adamw_tf", np.float32), ("sparse_adamw", np.float32), ("sparse_adam", np.float64))
RULES = (
    *(
        Rule(f"{kind}_", {name: name for name in (f"{kind}_exp_avg", f"{kind}_exp_avg_sq")}, beta_dtype=beta_dtype)
        for kind, beta_dtype in _ADAMS
    ),
    Rule("sparse_adagrad_", {"sparse_adagrad_state_sum": "sparse_adagrad_sum"}),
    Rule("sparse_row_wise_adagrad_", {"sparse_row_wise_adagrad_state_sum": "sparse_rowwise_adagrad_sum"}, True),
    Rule(
        "sparse_row_wise_adagrad_sum_",
        {"sparse_row_wise_adagrad_sum_state_sum": "sparse_rowwise_adagrad_sum_by_rank"},
        True,
    ),
)
SLOT_THERE = {here: there for rule in RULES for there, here in rule.slots.items()}
SLOT_HERE = {there: here for here, there in SLOT_THERE.items()}
ROW_WISE = {here for rule in RULES if rule.is_row_wise for here in rule.here}


class _Step(NamedTuple):
    name: str
    rule: Rule
    table: str | None  # None for all tables
    n: int


def state_here(
    dense: Mapping[str, SourceTensor], tables: Slots, left: list[LeftOut], url: str
) -> tuple[dict[str, Any], list[SourceTensor]]:
    """Return the sparse optimizer's state in recckpt's form, and the dense blocks that belong to other state."""
    users = {rule.prefix: [t for t, slots in tables.items() if set(rule.here) <= set(slots)] for rule in RULES}
    steps, others = [], []
    for name, tensor in dense.items():
        owner = _owner(name, tables, users)
        if owner is not None:
            steps.append(_Step(name, *owner, _number(tensor, name, url)))
        elif not _SCALAR.fullmatch(name):
            others.append(tensor if tensor.name == name else replace(tensor, name=name))
        elif name.endswith(_BETAS):
            left.append(LeftOut(name, "follows from the step and the optimizer's betas"))
        else:
            left.append(LeftOut(name, "counts the steps of an optimizer that recckpt does not have"))
    unknown = "belongs to an optimizer that recckpt does not have: a slot of this name, which no optimizer reads"
    for table, slots in tables.items():
        names = (slot for slot in slots if is_optimizer_slot(slot) and slot not in SLOT_THERE)
        left += [LeftOut(f"table {table}, slot {slot}", unknown) for slot in names]
    rule = max(RULES, key=lambda each: len(users[each.prefix]))
    own = users[rule.prefix]
    for step in steps:
        if not own:
            left.append(LeftOut(step.name, "no table has the slots of its optimizer"))
        elif step.rule is not rule:
            left.append(LeftOut(step.name, f"a checkpoint has one sparse optimizer, that of {rule.prefix}"))
    if not own:
        return {}, others
    left.append(LeftOut("hyper-parameters of the sparse optimizer", "RecIS saves none: pass the same here"))
    state = _by_table([step for step in steps if step.rule is rule], own, left)
    return {"slots": list(rule.here), "state": state, "param_groups": [{"tables": own}]}, others


def _owner(name: str, tables: Slots, users: Mapping[str, Sequence[str]]) -> tuple[Rule, str | None] | None:
    """Return the optimizer whose steps a dense block counts, and the table if it counts per table; None for others.

    A name can be ambiguous (does ``..._sum_step`` belong to a table ``sum``?); if so, prefers one whose slots exist.
    """
    owners: list[tuple[Rule, str | None]] = []
    for rule in RULES:
        table = name.removeprefix(rule.prefix).removesuffix("_step")
        if name == f"{rule.prefix}step":
            owners.append((rule, None))
        elif rule.is_row_wise and name == f"{rule.prefix}{table}_step":
            owners.append((rule, table))
    return max(owners, key=lambda one: (bool(users[one[0].prefix]), one[1] is None or one[1] in tables), default=None)


def _number(tensor: SourceTensor, name: str, url: str) -> int:
    value = tensor.whole().reshape(-1)[0] if tensor.shape in ((), (1,)) else None
    if value is None or not (0 <= value < 2**63 and value % 1 == 0):  # False also for NaN
        found = f"{tensor.dtype} of {tensor.shape}" if value is None else f"{value}"
        raise ConversionError(url, f"dense {name!r}", found=found, expected="a number of steps")
    return int(value)


def _by_table(steps: Sequence[_Step], names: Sequence[str], left: list[LeftOut]) -> dict[str, Any]:
    """Return table -> step: the table's own step, else the common step, else the highest step of the merged tables."""
    own = {step.table: step.n for step in steps if step.table in names}
    merged = [step for step in steps if step.table is not None and step.table not in names]
    shared = next((step.n for step in steps if step.table is None), max((step.n for step in merged), default=None))
    for step in merged:
        reason = (
            f"of tables that RecIS merged without recording which; tables without their own step start from {shared}"
        )
        left.append(LeftOut(step.name, reason))
    by_table = {name: {"step": own.get(name, shared)} for name in names if own.get(name, shared) is not None}
    for name in names:
        if name not in by_table:
            left.append(LeftOut(f"table {name}, steps", "are missing: the optimizer counts from 0"))
    return by_table


def scalars_there(state: Mapping[str, Any], tables: Slots, left: list[LeftOut]) -> Iterator[tuple[str, Array]]:
    """Yield the sparse optimizer's scalars under RecIS's names; append to ``left`` what RecIS cannot store."""
    slots = set(state.get("slots", ()))
    rule = next((each for each in RULES if slots and slots == set(each.here)), None)
    names = [name for name, its_slots in tables.items() if slots <= set(its_slots)] if rule else []
    if rule is None or not names:
        if state:
            left.append(LeftOut(SPARSE_OPTIM, "no optimizer of RecIS has this state"))
        return
    steps = {name: state["state"].get(name, {}).get("step", 0) for name in names}
    named = {f"{rule.prefix}step": max(steps.values())}
    if rule.is_row_wise and len(steps) > 1:
        named = {f"{rule.prefix}{name}_step": step for name, step in steps.items()}
        reason = "is per table; if RecIS merges tables, it looks for the name of the merged table, and starts from 0"
        left.append(LeftOut(f"{rule.prefix}step", reason))
    elif len(set(steps.values())) > 1:
        span = f"tables have steps {min(steps.values())} to {max(steps.values())}"
        left.append(LeftOut(SPARSE_OPTIM, f"{span}; RecIS has one for all, here the highest"))
    yield from ((name, np.array([step], np.int64)) for name, step in named.items())
    betas = next((group["betas"] for group in state.get("param_groups", ()) if "betas" in group), ())
    for number, beta in enumerate(betas if rule.beta_dtype else (), start=1):
        shape = [beta] if rule.beta_dtype is np.float64 else beta
        yield f"{rule.prefix}beta{number}", np.array(shape, rule.beta_dtype)
