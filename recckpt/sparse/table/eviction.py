"""Rows that a table lets go while it is trained: a part of its ids at a time, so that no step stands for all of them.

What goes at a step follows from the rows, the step and nothing else: no clock cuts the work, and nothing is remembered
from one step to the next. So a run on other ranks, and one that was resumed, evict the same rows at the same steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from recckpt.format.distinct import distinct
from recckpt.policies.evict import NORM, Evict, Mask, first_rows
from recckpt.sparse.table.column import Column
from recckpt.sparse.table.eviction_plan import ALL, HashRange, Plan, Policy, plan_of
from recckpt.sparse.table.kernels import row_norms
from recckpt.sparse.table.opaque import opaque
from recckpt.sparse.table.recomputation import is_in_backward
from recckpt.sparse.table.tracking import TrackedTable
from recckpt.types import EMBEDDING

log = logging.getLogger("recckpt")

if TYPE_CHECKING:
    from typing_extensions import Self

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
    """What of a part goes by the rules, and the others: their ids, and what a capacity orders them by."""

    gone: Int64s
    ids: Int64s
    by: npt.NDArray[Any]
    n_rows: int  # of the table


_NONE = np.empty(0, np.int64)
_NOTHING = EvictionScan(_NONE, _NONE, _NONE, 0)


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

    @property
    def evicted_to(self) -> int | None:
        """The step up to which eviction is done, None where it has not begun with these rows; saved with them."""
        era, step = self._evicted_to
        return step if era is self._store.era else None

    @evicted_to.setter
    def evicted_to(self, step: int | None) -> None:
        self._evicted_to = (self._store.era, step)

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
        return self._evict(plan, [ALL], target=None if plan.capacity is None else plan.capacity.n)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = super().__deepcopy__(memo)
        twin.evicted_to = self.evicted_to  # the copy of an era is another one
        return twin

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

    def evict_due(self) -> None:
        """Evict what is due before the first training look-up of a step. Collective among ranks with a capacity."""
        if self._plan.is_empty or not self.training or is_in_backward():
            return
        step, before = self.step, self.evicted_to
        if step == before:
            self._n_looked_up += 1
            if self._n_looked_up == _PATIENCE:
                self.warn_once("step", _NO_STEPS.format(step, _PATIENCE))
            return
        begin = time.thread_time()
        self._evict_at(step, before)
        self.evicted_to, self._n_looked_up = step, 0
        spent_ms, budget_ms = 1e3 * (time.thread_time() - begin), self._plan.budget_ms
        if budget_ms is not None and spent_ms > budget_ms:
            longer = int(self._plan.every * spent_ms / budget_ms) + 1
            self.warn_once("budget", _TOO_LONG.format(spent_ms, step, budget_ms, longer, self._plan.every))

    def _evict_at(self, step: int, before: int | None) -> None:
        plan, pace = self._plan, 1
        if plan.capacity is not None:
            n_rows = sum(self._of_ranks(f"evicting from {self.name!r} at step {step}", len(self._store)))
            pace = plan.capacity.pace(n_rows)
            if plan.capacity.is_crowded(n_rows):
                self.warn_once("capacity", _CROWDED.format(n_rows, step, plan.capacity, plan.every))
                self._evict(plan, [ALL])
                return
        self._evict(plan, plan.due(before, step, pace))

    def _evict(self, plan: Plan, parts: Sequence[HashRange], target: int | None = None) -> int:
        """Drop what goes of some parts; of all rows, more than a ``target``, if there is one."""
        gone, n_gone = [_NONE], 0
        for part in parts:
            gone += self._gone_of(plan, part, n_gone, target)
            n_gone = sum(map(len, gone))
        n_evicted = self._erase(np.concatenate(gone)) if n_gone else 0
        self._n_evicted += n_evicted
        return n_evicted

    def _gone_of(self, plan: Plan, part: HashRange, n_gone: int, target: int | None) -> list[Int64s]:
        """Return what goes of a part, where so many rows of others go before."""
        problem: Exception | None = None
        try:
            found = self._found(plan, part)
        except Exception as error:
            found, problem = _NOTHING, error
        if plan.capacity is None:
            if problem is not None:
                raise problem
            return [found.gone]
        what, n_left = f"evicting from {self.name!r}", found.n_rows - n_gone - len(found.gone)
        n_left, n_in_part = (sum(self._of_ranks(what, n, problem)) for n in (n_left, len(found.ids)))
        excess = plan.capacity.excess(n_left, n_in_part, part.share) if target is None else n_left - target
        return [found.gone, found.ids[self._first_rows(found.by, found.ids, excess)]]

    def _found(self, plan: Plan, part: HashRange) -> EvictionScan:
        """Ask the rules, a piece of the rows after the other, which of a part go."""
        now, store, capacity = self.now, self._store, plan.capacity
        gone, left, by = [_NONE], [_NONE], [_NONE]
        with store.lock:
            for rows, ids in self._pieces(part):
                columns = {name: _values(store.columns, name, rows) for name in plan.needs}
                goes = np.zeros(len(rows), np.bool_)
                for rule in plan.rules:
                    goes |= _checked_mask(rule, rule.evicted(columns, now), len(rows))
                gone.append(ids[goes])
                if capacity is not None:
                    left.append(ids[~goes])
                    by.append(columns[capacity.by][~goes])
            return EvictionScan(np.concatenate(gone), np.concatenate(left), np.concatenate(by), len(store))

    def _pieces(self, part: HashRange) -> Iterator[tuple[Int64s, Int64s]]:
        """Yield the rows of a part and their ids, but for padding: as many as a cache holds what is looked at of."""
        store = self._store
        some = None if part == ALL else store.rows.index.part(*part)
        for begin in range(0, len(store) if some is None else len(some[0]), _PIECE):
            end = min(begin + _PIECE, len(store))
            if some is None:
                rows = np.arange(begin, end)
                ids = store.ids.gather(rows).numpy()
            else:
                rows, ids = (each[begin:end] for each in some)
            if self.padding_id is not None:
                rows, ids = rows[ids != self.padding_id], ids[ids != self.padding_id]
            yield rows, ids

    def _first_rows(self, by: npt.NDArray[Any], ids: Int64s, n: int) -> Mask:
        """Return which of these rows are among the first ``n`` to go."""
        return first_rows(by, ids, n)

    def _of_ranks(self, what: str, number: int, problem: Exception | None = None) -> list[int]:
        """Return the number of each rank, or raise the ``problem`` of one."""
        if problem is not None:
            raise problem
        return [number]

    def _check_batch(self, ids: Int64s) -> None:
        """Raise ValueError where a look-up has more different ids than the table may have rows."""
        capacity = self._plan.capacity
        if capacity is not None and len(ids) > capacity.n and (n_ids := len(distinct(ids))) > capacity.n:
            raise ValueError(
                f"table {self.name!r}: found a look-up of {n_ids} different ids, expected at most those that "
                f"{capacity} holds: give a larger n, or smaller batches"
            )

    def warn_once(self, about: str, text: str) -> None:
        """Warn of something in this table, the first time only."""
        if about not in self._warned:
            self._warned |= {about}
            log.warning("table %r: %s", self.name, text)


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
    """Return what a policy said, or raise ValueError where it is no mask."""
    found: Mask = np.asarray(mask)
    if found.dtype != np.bool_ or found.shape != (n_rows,):
        raise ValueError(f"{rule}: found a mask of {found.dtype} {found.shape}, expected bool ({n_rows},)")
    return found
