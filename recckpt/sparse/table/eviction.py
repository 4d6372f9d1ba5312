"""Eviction while a table is trained: a part of its ids at a time, so that no step has to wait for all of them.

What goes at a step follows from the rows, the step and nothing else: no clock cuts the work, and nothing is remembered
from one step to the next. So a run on other ranks, and one that was resumed, evict the same rows at the same steps.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from recckpt.format.distinct import distinct
from recckpt.policies.evict import NORM, Evict, Mask
from recckpt.sparse.table.column import Column
from recckpt.sparse.table.eviction_plan import ALL, HashRange, Plan, plan_of
from recckpt.sparse.table.kernels import row_norms
from recckpt.sparse.table.nn_module import TableModule, erase_rows
from recckpt.sparse.table.recomputation import is_in_backward
from recckpt.sparse.table.row_store import RowStore
from recckpt.sparse.table.tracking import Now, TableTime
from recckpt.types import EMBEDDING

Int64s = npt.NDArray[np.int64]
_PATIENCE = 1000  # training look-ups of one step, after which somebody seems to have forgotten to count steps
_PIECE = 1 << 15  # rows whose columns are looked at together
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


class EvictionScan(NamedTuple):
    """The ids of a part that the rules evict; the other ids, and the values by which a capacity orders them."""

    gone: Int64s
    ids: Int64s
    by: npt.NDArray[Any]
    n_rows: int  # of the table


_NONE = np.empty(0, np.int64)
_NOTHING = EvictionScan(_NONE, _NONE, _NONE, 0)


class Eviction:
    """What a table evicts as it is trained, up to which step that is done, and how many rows went.

    Args:
        table_time: that of the table.
        plan: what is evicted when; an empty one where only :meth:`evict` is called.

    Attributes:
        n_evicted: rows that policies have evicted since the table was made, on this rank.
    """

    def __init__(self, table_time: TableTime, plan: Plan | None = None) -> None:
        self.plan = plan or Plan()
        self.n_evicted = 0
        self._table_time = table_time
        self._evicted_to: tuple[object, int | None] = (None, None)  # the era of the rows, and the step
        self._n_looked_up = 0  # times since

    def __deepcopy__(self, memo: dict[int, Any]) -> Eviction:
        twin = Eviction(copy.deepcopy(self._table_time, memo), copy.deepcopy(self.plan, memo))
        twin.n_evicted, twin._n_looked_up = self.n_evicted, self._n_looked_up
        twin._evicted_to = self._evicted_to  # with the era itself, which is that of the copied rows too
        return twin

    def evicted_to(self, store: RowStore) -> int | None:
        """Return the step up to which eviction is done; None where it has not begun with these rows."""
        era, step = self._evicted_to
        return step if era is store.era else None

    def set_evicted_to(self, store: RowStore, step: int | None) -> None:
        """Take the rows for ones in which eviction is done up to a step."""
        self._evicted_to = (store.era, step)

    def check_batch(self, table: TableModule, ids: Int64s) -> None:
        """Raise ValueError where a look-up has more different ids than the table may have rows."""
        capacity = self.plan.capacity
        if capacity is not None and len(ids) > capacity.n and (n_ids := len(distinct(ids))) > capacity.n:
            raise ValueError(
                f"table {table.name!r}: found a look-up of {n_ids} different ids, expected at most those that "
                f"{capacity} holds: give a larger n, or smaller batches"
            )

    def evict_due(self, table: TableModule) -> None:
        """Evict what is due before the first training look-up of a step. Collective among ranks with a capacity."""
        if self.plan.is_empty or not table.training or is_in_backward():
            return
        step, before = self._table_time.step or 0, self.evicted_to(table.store)
        if step == before:
            self._n_looked_up += 1
            if self._n_looked_up == _PATIENCE:
                table.warned_of.once(table.name, "step", _NO_STEPS.format(step, _PATIENCE))
            return
        begin = time.thread_time()
        self._evict_at(table, step, before)
        self.set_evicted_to(table.store, step)
        self._n_looked_up = 0
        spent_ms, budget_ms = 1e3 * (time.thread_time() - begin), self.plan.budget_ms
        if budget_ms is not None and spent_ms > budget_ms:
            longer = int(self.plan.every * spent_ms / budget_ms) + 1
            table.warned_of.once(
                table.name, "budget", _TOO_LONG.format(spent_ms, step, budget_ms, longer, self.plan.every)
            )

    def evict(self, table: TableModule, policies: Sequence[Any]) -> int:
        """Drop all rows that any of these policies evicts, and return how many. Collective with a capacity."""
        plan = plan_of(table.name, policies, set(table.store.columns), every=1, budget_ms=None)
        return self._evict(table, plan, [ALL], target=None if plan.capacity is None else plan.capacity.n)

    def _evict_at(self, table: TableModule, step: int, before: int | None) -> None:
        plan, pace = self.plan, 1
        if plan.capacity is not None:
            what = f"evicting from {table.name!r} at step {step}"
            n_rows = sum(table.sharing.numbers(what, len(table.store)))
            pace = plan.capacity.pace(n_rows)
            if plan.capacity.is_crowded(n_rows):
                table.warned_of.once(table.name, "capacity", _CROWDED.format(n_rows, step, plan.capacity, plan.every))
                self._evict(table, plan, [ALL])
                return
        self._evict(table, plan, plan.due(before, step, pace))

    def _evict(self, table: TableModule, plan: Plan, parts: Sequence[HashRange], target: int | None = None) -> int:
        """Drop what goes of some parts; of all rows, more than a ``target``, if there is one."""
        gone, n_gone = [_NONE], 0
        for part in parts:
            gone += self._gone_of(table, plan, part, n_gone, target)
            n_gone = sum(map(len, gone))
        n_evicted = erase_rows(table, np.concatenate(gone)) if n_gone else 0
        self.n_evicted += n_evicted
        return n_evicted

    def _gone_of(
        self, table: TableModule, plan: Plan, part: HashRange, n_gone: int, target: int | None
    ) -> list[Int64s]:
        """Return what goes of a part, where so many rows of others go before."""
        problem: Exception | None = None
        try:
            scan = _scan(table, plan, part, self._table_time.now)
        except Exception as error:
            scan, problem = _NOTHING, error
        if plan.capacity is None:
            if problem is not None:
                raise problem
            return [scan.gone]
        what, n_left = f"evicting from {table.name!r}", scan.n_rows - n_gone - len(scan.gone)
        n_left, n_in_part = (sum(table.sharing.numbers(what, n, problem)) for n in (n_left, len(scan.ids)))
        excess = plan.capacity.excess(n_left, n_in_part, part.share) if target is None else n_left - target
        return [scan.gone, scan.ids[table.sharing.first_rows(scan.by, scan.ids, excess)]]


def eviction_of(table: TableModule, table_time: TableTime, evict: Any, every: Any, budget_ms: Any) -> Eviction:
    """Return what a table is to evict, as its arguments say, or raise ValueError."""
    if not isinstance(evict, Iterable) or isinstance(evict, str):
        evict = [evict]
    policies = list(evict)
    if policies and every is None:
        raise ValueError(
            f"table {table.name!r}: found evict={policies} and no evict_every: give the number of steps in which "
            "all rows are looked at, such as evict_every=1000"
        )
    if not policies and (every is not None or budget_ms is not None):
        raise ValueError(f"table {table.name!r}: found evict_every or budget_ms and nothing in evict to go by them")
    if not policies:
        return Eviction(table_time)
    plan = plan_of(table.name, policies, set(table.store.columns), every=every, budget_ms=budget_ms)
    return Eviction(table_time, plan)


def _scan(table: TableModule, plan: Plan, part: HashRange, now: Now) -> EvictionScan:
    """Ask the rules, a piece of the rows after the other, which of a part go."""
    store, capacity = table.store, plan.capacity
    gone, left, by = [_NONE], [_NONE], [_NONE]
    with store.lock:
        for rows, ids in _pieces(store, part, table.padding_id):
            columns = {name: _values(store.columns, name, rows) for name in plan.needs}
            goes = np.zeros(len(rows), np.bool_)
            for rule in plan.rules:
                goes |= _checked_mask(rule, rule.evicted(columns, now), len(rows))
            gone.append(ids[goes])
            if capacity is not None:
                left.append(ids[~goes])
                by.append(columns[capacity.by][~goes])
        return EvictionScan(np.concatenate(gone), np.concatenate(left), np.concatenate(by), len(store))


def _pieces(store: RowStore, part: HashRange, padding_id: int | None) -> Iterator[tuple[Int64s, Int64s]]:
    """Yield the rows of a part and their ids, but for padding: as many as a cache holds what is looked at of."""
    some = None if part == ALL else store.rows.index.part(*part)
    for begin in range(0, len(store) if some is None else len(some[0]), _PIECE):
        end = min(begin + _PIECE, len(store))
        if some is None:
            rows = np.arange(begin, end)
            ids = store.ids.gather(rows).numpy()
        else:
            rows, ids = (each[begin:end] for each in some)
        if padding_id is not None:
            rows, ids = rows[ids != padding_id], ids[ids != padding_id]
        yield rows, ids


def _values(columns: Any, name: str, rows: Int64s) -> npt.NDArray[Any]:
    """Return a scalar slot of rows, or the norms of their embeddings."""
    if name != NORM:
        values: npt.NDArray[Any] = columns[name].gather(rows).cpu().numpy()
        return values
    column: Column = columns[EMBEDDING]
    norms = np.empty(len(rows), np.float64)
    row_norms(column.gather(rows).cpu().to(torch.float64).flatten(1).numpy(), norms)
    return norms


def _checked_mask(rule: Evict, mask: Any, n_rows: int) -> Mask:
    """Return the answer of a policy, or raise ValueError where it is not a mask of so many rows."""
    checked: Mask = np.asarray(mask)
    if checked.dtype != np.bool_ or checked.shape != (n_rows,):
        raise ValueError(f"{rule}: found a mask of {checked.dtype} {checked.shape}, expected bool ({n_rows},)")
    return checked
