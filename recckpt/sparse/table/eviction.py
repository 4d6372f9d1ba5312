"""Evicts rows while a table trains, by how often and when they were looked up; each step scans a part of the ids.

Which rows are evicted depends on the rows and the step alone, never on a clock or on earlier steps. So runs on other
numbers of ranks and resumed runs evict the same rows at the same steps.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from recckpt.format.tables import ClockDates
from recckpt.policies.evict import COUNT, LAST_STEP, LAST_TIME, NORM, Capacity, Evict, Mask, is_evict
from recckpt.sparse.table.gradients import is_in_backward
from recckpt.sparse.table.id_index import N_PARTS
from recckpt.sparse.table.kernels import row_norms
from recckpt.sparse.table.nn_module import TableModule, erase_rows, warn_once
from recckpt.sparse.table.row_store import RowStore
from recckpt.sparse.table.rows import Visit
from recckpt.types import EMBEDDING, SlotSpec, count_of, positive_number

log = logging.getLogger("recckpt")
Int64s = npt.NDArray[np.int64]
TRACKED = {  # values that ``track`` accepts
    "count": SlotSpec(COUNT, "int64", ()),
    "step": SlotSpec(LAST_STEP, "int64", ()),
    "time": SlotSpec(LAST_TIME, "float64", ()),
}
MAX_EVENT_TIME = 1e11  # seconds: the year 5138. The same number in milliseconds is the year 1973
Policy = Evict | Capacity
OnEvict = Callable[[str, torch.Tensor], object]
MIN_PART_ROWS = 1024  # with a capacity; the row counts of smaller parts would differ too much
_PATIENCE = 1000  # training look-ups in one step after which a missing step count is reported
_WORTH_A_WORD = 100  # rows; no warning if more than half of a smaller table is evicted
_PIECE = 1 << 15  # rows whose columns are read together
_NO_STEPS = (
    "still at step {} after {} training look-ups, but eviction needs a step count: call CheckpointManager.step() "
    "or set table.step"
)
_GROWS = (
    "found {} rows{}, more than the limit {}, while step {} goes on: rows are evicted between steps only, because a "
    "backward pass of this step may need them; call CheckpointManager.step() after each step, or set table.step"
)
_TOO_LONG = (
    "evicting took {:.3g} ms at step {}, expected budget_ms={:g}: evict_every={} instead of {} spreads the work over "
    "more steps"
)
_CROWDED = (
    "found {} rows at step {}, where half of the room of {} is used up: ids arrive faster than rows are evicted part "
    "by part, so this step scans all rows; set evict_every to less than {}, or give more room"
)
_HALF_GONE = (
    "evicted {} of the {} rows that were there at step {}, by {}; now is step {} and time {:.0f}: if either is "
    "wrong, as after a bad record, set it back by manager.event_time or table.step before all rows are gone"
)
_NONE = np.empty(0, np.int64)


class Now(NamedTuple):
    step: int
    time: float


@dataclass
class TableTime:
    """The step and the event time that a table was last given; each is None if it was never given."""

    step: int | None = None
    event_time: float | None = None

    def reach(self, step: int) -> None:
        self.step = step

    def stand_at(self, event_time: float | None) -> None:
        self.event_time = event_time

    @property
    def now(self) -> Now:
        return Now(self.step or 0, time.time() if self.event_time is None else self.event_time)


class Tracking:
    """Updates the slots that record how often and when training looked rows up.

    Attributes:
        clock_dates: the time span in which the clock dated rows, saved with them; None once an event time replaced it.
    """

    def __init__(self, names: tuple[str, ...], table_time: TableTime) -> None:
        self.names = names
        self.clock_dates: ClockDates | None = None
        self._slots = frozenset(TRACKED[name].name for name in names)
        self.counts = COUNT in self._slots  # whether occurrences are counted
        self._table_time = table_time

    def set_event_time(self, store: RowStore, event_time: float | None) -> None:
        """Date rows with this time from now on, including rows that the clock has dated; None for the clock."""
        with store.lock:
            self._table_time.stand_at(event_time)
            self._date_again(store)
            self.date_new_rows(store)

    def note_clock(self, store: RowStore, dates: ClockDates | None) -> None:
        """Record the time span in which a clock dated rows that were loaded into this table; None if no row was."""
        if dates is None or "time" not in self.names:
            return
        with store.lock:
            self.clock_dates = dates.joined(self.clock_dates)
            self._date_again(store)

    def date_new_rows(self, store: RowStore) -> None:
        """Give new rows the current date, also rows never looked up, so that a row's age counts from its creation."""
        with store.lock:  # another thread may set an event time now
            store.rows.initial.update(self._stamps())

    def visit(self, occurrences: Int64s) -> Visit:
        """Return what a look-up writes to its rows. Call this method under the lock of the store."""
        return Visit(occurrences, COUNT if self.counts else "", self._stamps())

    def _date_again(self, store: RowStore) -> None:
        dates, event_time = self.clock_dates, self._table_time.event_time
        if dates is None or event_time is None:
            return
        begin = 0
        for times in list(store.columns[LAST_TIME].pieces(0, len(store))):
            is_of_clock = (times >= dates.first) & (times <= dates.last)
            rows = begin + is_of_clock.nonzero().flatten().cpu().numpy()
            if len(rows):
                store.write(rows, {LAST_TIME: times.new_full((len(rows),), event_time)})
            begin += len(times)
        self.clock_dates = None  # last, so that after an exception the next event time dates the rest

    def _stamps(self) -> dict[str, int | float]:
        now = self._table_time.now
        if self._table_time.event_time is None and LAST_TIME in self._slots:
            self.clock_dates = ClockDates(now.time, now.time).joined(self.clock_dates)
        return {name: value for name, value in ((LAST_STEP, now.step), (LAST_TIME, now.time)) if name in self._slots}


def checked_event_time(table: str, event_time: Any) -> float | None:
    """Return a time in seconds since 1970, or None. Raises ValueError if the number suggests other units."""
    is_number = isinstance(event_time, int | float) and not isinstance(event_time, bool)
    if event_time is not None and not (is_number and -math.inf < event_time <= MAX_EVENT_TIME):  # refuses NaN
        raise ValueError(
            f"table {table!r}: event_time is in seconds since 1970, found {event_time!r:.100}; divide "
            "milliseconds by 1000, nanoseconds by 1e9"
        )
    return None if event_time is None else float(event_time)


HashRange = tuple[int, int]  # the ids whose hashes have their last 16 bits in [begin, end)
ALL: HashRange = (0, N_PARTS)


@dataclass(frozen=True)
class Plan:
    """Which rows a table evicts and when: a function of steps and row counts alone."""

    rules: tuple[Evict, ...] = ()
    capacity: Capacity | None = None
    every: int = 1
    budget_ms: float | None = None

    @property
    def policies(self) -> tuple[Policy, ...]:
        return (*self.rules, *([self.capacity] if self.capacity else []))

    def due(self, before: int | None, step: int, pace: int = 1) -> list[HashRange]:
        """Return the parts due at a step after the step ``before``; None stands for the previous step.

        With a ``pace`` of 2, scanning all parts takes half as many steps.
        """
        most = N_PARTS if self.capacity is None else max(1, self.capacity.n // MIN_PART_ROWS)
        n_parts = min(self.every, N_PARTS, most)
        if before is None or not before < step:
            before = step - 1
        first, last = (at * n_parts // self.every for at in (before, step))
        numbers = range(max(first, last - n_parts) + 1, last + 1)
        # Parts scanned in one step are n_parts / pace apart, so each was last scanned equally long ago.
        due = {(number + n * n_parts // pace) % n_parts: None for number in numbers for n in range(pace)}
        return [(part * N_PARTS // n_parts, (part + 1) * N_PARTS // n_parts) for part in due]


def plan_of(table: str, policies: Sequence[Any], slots: set[str], *, every: Any, budget_ms: Any) -> Plan:
    capacities = [policy for policy in policies if isinstance(policy, Capacity)]
    rules = [policy for policy in policies if not isinstance(policy, Capacity)]
    strange = [policy for policy in rules if not is_evict(policy)]
    if strange or not policies:
        raise ValueError(f"table {table!r}: expected policies of recckpt.policies.evict, found {strange or 'none'}")
    if len(capacities) > 1:
        raise ValueError(f"table {table!r}: found {capacities}, expected one capacity: only one slot orders the rows")
    for policy in policies:
        missing = {*policy.needs} - slots - {NORM}
        tracks = tuple(track for track, spec in TRACKED.items() if spec.name in missing)
        if missing:
            remedy = f"add track={tracks} where the table is made" if tracks else "declare it with add_slot"
            raise ValueError(
                f"table {table!r}: {policy} needs {sorted(missing)}, found the slots {sorted(slots)}: {remedy}"
            )
    budget = None if budget_ms is None else positive_number(f"table {table!r}: budget_ms", budget_ms)
    every = count_of(f"table {table!r}: evict_every", every)
    return Plan(tuple(rules), next(iter(capacities), None), every, budget)


# Of one part: the ids that rules evict; the other ids, and the values by which a capacity orders them; the row count.
_Scan = tuple[Int64s, Int64s, npt.NDArray[Any], int]


class _Pass(NamedTuple):
    """A full scan of the rows over several steps: its first step and row count, and how many rows it has evicted."""

    number: int = -1
    step: int = 0
    n_rows: int = 0
    n_gone: int = 0


class Eviction:
    """Evicts rows while a table trains, and remembers the step up to which eviction is done."""

    def __init__(self, table_time: TableTime, plan: Plan | None = None, on_evict: OnEvict | None = None) -> None:
        self.plan, self._on_evict = plan or Plan(), on_evict
        self.n_evicted = 0
        self._table_time = table_time
        self._evicted_to: tuple[object, int | None] = (None, None)  # era of the rows, and last step of their eviction
        self._n_looked_up = 0  # look-ups since that step
        self._pass = _Pass()

    def __deepcopy__(self, memo: dict[int, Any]) -> Eviction:
        twin = Eviction(copy.deepcopy(self._table_time, memo), copy.deepcopy(self.plan, memo), self._on_evict)
        twin.n_evicted, twin._n_looked_up = self.n_evicted, self._n_looked_up
        twin._pass = self._pass
        twin._evicted_to = self._evicted_to  # not deep-copied: the copied rows have the same era object
        return twin

    def evicted_to(self, store: RowStore) -> int | None:
        """Return the step up to which eviction is done; None if these rows have not been evicted from."""
        era, step = self._evicted_to
        return step if era is store.rows.era else None

    def set_evicted_to(self, store: RowStore, step: int | None) -> None:
        self._evicted_to = (store.rows.era, step)

    def evict_due(self, table: TableModule) -> None:
        """Evict the rows due at the first training look-up of a step. Collective if there is a capacity."""
        if not (self.plan.rules or self.plan.capacity) or not table.training or is_in_backward():
            return
        step, before = self._table_time.step or 0, self.evicted_to(table.store)
        if step == before:
            self._n_looked_up += 1
            if self._n_looked_up == _PATIENCE:
                warn_once(table, "step", _NO_STEPS.format(step, _PATIENCE))
            n_rows, n_ranks, capacity = len(table.store), table.sharing.n_ranks, self.plan.capacity
            if capacity is not None and n_rows * n_ranks > capacity.n:
                where = f" on one of {n_ranks} ranks" if n_ranks > 1 else ""
                warn_once(table, "step", _GROWS.format(n_rows, where, capacity, step))
            return
        begin = time.thread_time()
        self._evict_at(table, step, before)
        self.set_evicted_to(table.store, step)
        self._n_looked_up = 0
        spent_ms, budget_ms = 1e3 * (time.thread_time() - begin), self.plan.budget_ms
        if budget_ms is not None and spent_ms > budget_ms:
            longer = int(self.plan.every * spent_ms / budget_ms) + 1
            warn_once(table, "budget", _TOO_LONG.format(spent_ms, step, budget_ms, longer, self.plan.every))

    def evict(self, table: TableModule, policies: Sequence[Any]) -> int:
        """Evict all rows that any policy selects, and return how many. Collective if there is a capacity."""
        plan = plan_of(table.name, policies, set(table.store.columns), every=1, budget_ms=None)
        return self._evict(table, plan, [ALL], target=None if plan.capacity is None else plan.capacity.n)

    def _evict_at(self, table: TableModule, step: int, before: int | None) -> None:
        plan, pace = self.plan, 1
        if plan.capacity is not None:
            what = f"evicting from {table.name!r} at step {step}"
            n_rows = sum(table.sharing.numbers(what, len(table.store)))
            pace = plan.capacity.pace(n_rows)
            if plan.capacity.is_crowded(n_rows):
                warn_once(table, "capacity", _CROWDED.format(n_rows, step, plan.capacity, plan.every))
                self._evict(table, plan, [ALL])
                return
        number, n_before = step // plan.every, len(table.store)
        if number != self._pass.number:
            self._pass = _Pass(number, step, n_before)
        n_evicted = self._evict(table, plan, plan.due(before, step, pace))
        seen = self._pass = self._pass._replace(n_gone=self._pass.n_gone + n_evicted)
        if plan.rules and seen.n_rows >= _WORTH_A_WORD and 2 * seen.n_gone > seen.n_rows:
            now, policies = self._table_time.now, ", ".join(map(str, plan.rules))
            text = _HALF_GONE.format(seen.n_gone, seen.n_rows, seen.step, policies, now.step, now.time)
            warn_once(table, "half gone", text)

    def _evict(self, table: TableModule, plan: Plan, parts: Sequence[HashRange], target: int | None = None) -> int:
        """Evict rows from each part in order; with a ``target``, until that many rows are left."""
        gone, n_gone, capacity, what = [_NONE], 0, plan.capacity, f"evicting from {table.name!r}"
        for part in parts:
            problem: Exception | None = None
            try:
                goes, ids, by, n_rows = _scan(table, plan, part, self._table_time.now)
            except Exception as error:
                goes, ids, by, n_rows, problem = _NONE, _NONE, _NONE, 0, error
            gone.append(goes)
            if capacity is not None:
                n_left, n_in_part = n_rows - n_gone - len(goes), len(ids)
                n_left, n_in_part = (sum(table.sharing.numbers(what, n, problem)) for n in (n_left, n_in_part))
                share = (part[1] - part[0]) / N_PARTS
                excess = capacity.excess(n_left, n_in_part, share) if target is None else n_left - target
                gone.append(ids[table.sharing.first_rows(by, ids, excess)])
            elif problem is not None:
                raise problem
            n_gone = sum(map(len, gone))
        n_evicted = erase_rows(table, ids := np.concatenate(gone)) if n_gone else 0
        self.n_evicted += n_evicted
        if self._on_evict is not None and n_evicted:
            try:
                self._on_evict(table.name, torch.from_numpy(ids))
            except Exception:  # only logged: all ranks have evicted the rows, and the other ranks do not fail
                log.exception(
                    "table %r: evicted %d rows, but on_evict=%r failed", table.name, n_evicted, self._on_evict
                )
        return n_evicted


def eviction_of(
    table: TableModule, table_time: TableTime, evict: Any, every: Any, budget_ms: Any, *, on_evict: Any
) -> Eviction:
    if on_evict is not None and not callable(on_evict):
        raise TypeError(f"table {table.name!r}: on_evict must be a function of a name and ids, found {on_evict!r:.100}")
    policies = list(evict) if isinstance(evict, Iterable) and not isinstance(evict, str) else [evict]
    if policies and every is None:
        raise ValueError(
            f"table {table.name!r}: found evict={policies} and no evict_every: pass the number of steps that one scan "
            "of all rows takes, such as evict_every=1000"
        )
    if not policies and (every is not None or budget_ms is not None):
        raise ValueError(f"table {table.name!r}: evict_every or budget_ms is set, but evict has no policy that uses it")
    if not policies:
        return Eviction(table_time, on_evict=on_evict)
    plan = plan_of(table.name, policies, set(table.store.columns), every=every, budget_ms=budget_ms)
    return Eviction(table_time, plan, on_evict)


def _scan(table: TableModule, plan: Plan, part: HashRange, now: Now) -> _Scan:
    store, capacity = table.store, plan.capacity
    needs = {name for policy in plan.policies for name in policy.needs}
    gone, left, by = [_NONE], [_NONE], [_NONE]
    with store.lock:
        for rows, ids in _pieces(store, part, table.padding_id):
            columns = {name: _values(store, name, rows) for name in needs}
            goes = np.zeros(len(rows), np.bool_)
            for rule in plan.rules:
                mask: Mask = np.asarray(rule.evicted(columns, now))
                if mask.dtype != np.bool_ or mask.shape != goes.shape:
                    expected = f"bool ({len(rows)},)"
                    raise ValueError(f"{rule}: found a mask of {mask.dtype} {mask.shape}, expected {expected}")
                goes |= mask
            gone.append(ids[goes])
            if capacity is not None:
                left.append(ids[~goes])
                by.append(columns[capacity.by][~goes])
        return np.concatenate(gone), np.concatenate(left), np.concatenate(by), len(store)


def _pieces(store: RowStore, part: HashRange, padding_id: int | None) -> Iterator[tuple[Int64s, Int64s]]:
    """Yield rows of a part and their ids, without the padding id, in pieces that fit the CPU cache."""
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


def _values(store: RowStore, name: str, rows: Int64s) -> npt.NDArray[Any]:
    if name != NORM:
        values: npt.NDArray[Any] = store.columns[name].gather(rows).cpu().numpy()
        return values
    norms = np.empty(len(rows), np.float64)
    row_norms(store.columns[EMBEDDING].gather(rows).cpu().to(torch.float64).flatten(1).numpy(), norms)
    return norms
