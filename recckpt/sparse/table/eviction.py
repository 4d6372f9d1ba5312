"""Rows that a table lets go while it is trained: a part of its ids at a time, so that no step stands for all of them.

What goes at a step follows from the rows, the step and nothing else: no clock cuts the work, and nothing is remembered
from one step to the next. So a run on other ranks, and one that was resumed, evict the same rows at the same steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from recckpt.format.distinct import distinct
from recckpt.policies.evict import NORM, Capacity, Columns, Evict, Mask, first_rows, is_evict
from recckpt.sparse.table.column import Column
from recckpt.sparse.table.id_index import N_PARTS
from recckpt.sparse.table.kernels import row_norms
from recckpt.sparse.table.nn_module import opaque
from recckpt.sparse.table.tracking import TRACKED, TrackedTable
from recckpt.types import EMBEDDING, positive_int, positive_number

log = logging.getLogger("recckpt")

Int64s = npt.NDArray[np.int64]
Policy = Evict | Capacity

_MIN_PART_ROWS = 1024  # of a capacity: parts of fewer would differ too much in how many rows they hold
_PATIENCE = 1000  # training look-ups of one step, after which somebody seems to have forgotten to count steps
_PIECE = 1 << 16  # rows whose columns are looked at together
_NO_STEPS = (
    "still at step {} after {} training look-ups, and it evicts as steps are counted: call CheckpointManager.step() "
    "or set table.step"
)
_TOO_LONG = (
    "evicting took {:.3g} ms at step {}, expected budget_ms={:g}: evict_every={} in place of {} spreads it over more "
    "steps"
)
_CROWDED = (
    "found {} rows at step {}, where {} has half of its room left: more ids come than go part by part, so that this "
    "step looks at all rows; give less than evict_every={}, or more room"
)


class Part(NamedTuple):
    """The ids whose hashes end on 16 bits in [begin, end)."""

    begin: int
    end: int

    @property
    def share(self) -> float:
        """Which part of all ids it is."""
        return (self.end - self.begin) / N_PARTS


ALL = Part(0, N_PARTS)


@dataclass(frozen=True)
class Plan:
    """What a table evicts, and in how many steps it has looked at all rows.

    Attributes:
        rules: look at one row each.
        capacity: looks at all; None without one.
    """

    rules: tuple[Evict, ...] = ()
    capacity: Capacity | None = None
    every: int = 1
    budget_ms: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is ever evicted."""
        return not self.rules and self.capacity is None

    @property
    def n_parts(self) -> int:
        """Parts that the ids are cut into."""
        most = N_PARTS if self.capacity is None else max(1, self.capacity.n // _MIN_PART_ROWS)
        return min(self.every, N_PARTS, most)

    def due(self, before: int | None, step: int) -> Iterator[Part]:
        """Yield the parts that are due at a step, where those up to the step ``before`` are done; None is the last."""
        n_parts = self.n_parts
        if before is None or not before < step:
            before = step - 1
        first, last = (at * n_parts // self.every for at in (before, step))
        for number in range(max(first, last - n_parts) + 1, last + 1):
            part = number % n_parts
            yield Part(part * N_PARTS // n_parts, (part + 1) * N_PARTS // n_parts)


class EvictingTable(TrackedTable):
    """A table that evicts rows, when it is told to and as it is trained."""

    _plan = Plan()
    _evicted_to: tuple[object, int | None] = (None, None)  # the step up to which parts are done, in an era of the rows
    _n_looked_up = 0  # times since
    _n_evicted = 0
    _warned: frozenset[str] = frozenset()

    @property
    def evicts(self) -> tuple[Policy, ...]:
        """The policies by which rows go as the table is trained."""
        return (*self._plan.rules, *([self._plan.capacity] if self._plan.capacity else []))

    @property
    def n_evicted(self) -> int:
        """Rows that policies have evicted since the table was made, on this rank."""
        return self._n_evicted

    @opaque
    def evict(self, *policies: Policy) -> int:
        """Drop all rows that any of these policies evicts, now, and return how many. Collective with a capacity.

        An id that comes back starts anew. The row of ``padding_id`` stays.

        Args:
            policies: of :mod:`recckpt.policies.evict`.

        Raises:
            ValueError: something is no policy, or looks at a slot that the table does not have; nothing has changed.
        """
        plan = plan_of(self.name, policies, set(self._store.columns), every=1, budget_ms=None)
        return self._evict_part(plan, ALL, target=None if plan.capacity is None else plan.capacity.n)

    def _begin_evicting(self, evict: Any, every: Any, budget_ms: Any) -> None:
        """Take note of what the table is to evict, or raise ValueError."""
        if not isinstance(evict, Iterable) or isinstance(evict, str):
            evict = [evict]
        policies = list(evict)
        if policies and every is None:
            raise ValueError(
                f"table {self.name!r}: found evict={policies} and no evict_every: give the number of steps in which "
                "all rows are looked at, such as evict_every=1000"
            )
        if not policies and (every is not None or budget_ms is not None):
            raise ValueError(f"table {self.name!r}: found evict_every or budget_ms and nothing in evict to go by them")
        if policies:
            self._plan = plan_of(self.name, policies, set(self._store.columns), every=every, budget_ms=budget_ms)

    def _evict_due(self) -> None:
        """Evict what is due before the first training look-up of a step. Collective among ranks with a capacity."""
        if self._plan.is_empty or not self.training:
            return
        step, (era, before) = self.step, self._evicted_to
        if era is not self._store.era:
            before = None  # other rows, of another step: loaded, or moved to another device
        if step == before:
            self._n_looked_up += 1
            if self._n_looked_up == _PATIENCE:
                self._warn_once("step", _NO_STEPS.format(step, _PATIENCE))
            return
        begin = time.thread_time()
        self._evict_at(step, before)
        self._evicted_to, self._n_looked_up = (self._store.era, step), 0
        spent_ms, budget_ms = 1e3 * (time.thread_time() - begin), self._plan.budget_ms
        if budget_ms is not None and spent_ms > budget_ms:
            longer = int(self._plan.every * spent_ms / budget_ms) + 1
            self._warn_once("budget", _TOO_LONG.format(spent_ms, step, budget_ms, longer, self._plan.every))

    def _evict_at(self, step: int, before: int | None) -> None:
        plan = self._plan
        if plan.capacity is not None:
            n_rows = sum(self._of_ranks(f"evicting from {self.name!r} at step {step}", len(self._store)))
            if plan.capacity.is_crowded(n_rows):
                self._warn_once("capacity", _CROWDED.format(n_rows, step, plan.capacity, plan.every))
                self._evict_part(plan, ALL)
                return
        for part in plan.due(before, step):
            self._evict_part(plan, part)

    def _evict_part(self, plan: Plan, part: Part, target: int | None = None) -> int:
        """Drop what goes of a part; of all rows, more than a ``target``, if there is one."""
        with self._store.lock:
            ids, columns = self._columns(plan, part)
            n_rows = len(self._store)
        now = self.now
        gone = np.zeros(len(ids), np.bool_)
        for rule in plan.rules:
            gone |= _checked_mask(rule, rule.evicted(columns, now), len(ids))
        if plan.capacity is not None:
            left = np.flatnonzero(~gone)
            by = columns[plan.capacity.by][left]
            n_left = n_rows - int(gone.sum())
            gone[left[self._beyond(plan.capacity, part, n_left, by, ids[left], target)]] = True
        n_evicted = self._erase(ids[gone])
        self._n_evicted += n_evicted
        return n_evicted

    def _columns(self, plan: Plan, part: Part) -> tuple[Int64s, Columns]:
        """Return the ids of a part, without that of padding, and what the policies look at; under the lock."""
        store = self._store
        rows = np.arange(len(store)) if part == ALL else store.rows.index.part(*part)
        ids = store.ids.gather(rows).numpy()
        if self.padding_id is not None:
            rows, ids = rows[ids != self.padding_id], ids[ids != self.padding_id]
        needs = {name for policy in (*plan.rules, plan.capacity) if policy is not None for name in policy.needs}
        return ids, {name: _values(store.columns, name, rows) for name in needs}

    def _beyond(  # noqa: PLR0917  # of which another table asks all ranks
        self, capacity: Capacity, part: Part, n_rows: int, by: npt.NDArray[Any], ids: Int64s, target: int | None
    ) -> Mask:
        """Return which rows of a part go, so that the table has room again."""
        excess = capacity.excess(n_rows, len(ids), part.share) if target is None else n_rows - target
        return first_rows(by, ids, excess)

    def _of_ranks(self, what: str, number: int) -> list[int]:
        """Return the number of each rank."""
        return [number]

    def _check_batch(self, ids: Int64s) -> None:
        """Raise ValueError where a look-up has more different ids than the table may have rows."""
        capacity = self._plan.capacity
        if capacity is not None and len(ids) > capacity.n and (n_ids := len(distinct(ids))) > capacity.n:
            raise ValueError(
                f"table {self.name!r}: found a look-up of {n_ids} different ids, expected at most those that "
                f"{capacity} holds: give a larger n, or smaller batches"
            )

    def _warn_once(self, about: str, text: str) -> None:
        if about not in self._warned:
            self._warned |= {about}
            log.warning("table %r: %s", self.name, text)


def plan_of(table: str, policies: Sequence[Any], slots: set[str], *, every: Any, budget_ms: Any) -> Plan:
    """Return what these policies ask for, or raise ValueError where a table of these slots cannot do it."""
    capacities = [policy for policy in policies if isinstance(policy, Capacity)]
    rules = [policy for policy in policies if not isinstance(policy, Capacity)]
    strange = [policy for policy in rules if not is_evict(policy)]
    if strange or not policies:
        raise ValueError(f"table {table!r}: expected policies of recckpt.policies.evict, found {strange or 'none'}")
    if len(capacities) > 1:
        raise ValueError(f"table {table!r}: found {capacities}, expected one capacity: rows are ordered by one slot")
    for policy in policies:
        missing = {*policy.needs} - slots - {NORM}
        tracks = tuple(track for track, spec in TRACKED.items() if spec.name in missing)
        if missing:
            remedy = f"add track={tracks} where the table is made" if tracks else "declare it with add_slot"
            raise ValueError(
                f"table {table!r}: {policy} goes by {sorted(missing)}, found the slots {sorted(slots)}: {remedy}"
            )
    budget = None if budget_ms is None else positive_number(f"table {table!r}: budget_ms", budget_ms)
    return Plan(
        tuple(rules), next(iter(capacities), None), positive_int(f"table {table!r}: evict_every", every), budget
    )


def _values(columns: Any, name: str, rows: Int64s) -> npt.NDArray[Any]:
    """Return a scalar slot of rows, or the norms of their embeddings."""
    if name != NORM:
        values: npt.NDArray[Any] = columns[name].gather(rows).cpu().numpy()
        return values
    column: Column = columns[EMBEDDING]
    norms = np.empty(len(rows), np.float64)
    for begin in range(0, len(rows), _PIECE):
        piece = column.gather(rows[begin : begin + _PIECE]).cpu().to(torch.float64).flatten(1)
        row_norms(piece.numpy(), norms[begin : begin + _PIECE])
    return norms


def _checked_mask(rule: Evict, mask: Any, n_rows: int) -> Mask:
    """Return what a policy said, or raise ValueError where it is no mask."""
    found: Mask = np.asarray(mask)
    if found.dtype != np.bool_ or found.shape != (n_rows,):
        raise ValueError(f"{rule}: found a mask of {found.dtype} {found.shape}, expected bool ({n_rows},)")
    return found
