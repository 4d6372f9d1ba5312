"""After an exception at any line of what changes a table, it is as before or as after, and what comes next works."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from support.paths import PYTHONPATH, SUPPORT
from support.raising import CallingAt, RaisingAt
from support.sources import read_column
from support.sweeps import SWEEP_STRIDE, mostly_slow

from recckpt.sparse import HashTable, Normal
from recckpt.sparse.optim import SparseAdamW
from recckpt.sparse.table import column as column_module
from recckpt.sparse.table import rows as rows_module
from recckpt.types import EMBEDDING

ERRORS = [KeyboardInterrupt, MemoryError]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(column_module, "BLOCK_BYTES", 1024)
    monkeypatch.setattr(column_module, "_FIRST_ROWS", 8)
    monkeypatch.setattr(rows_module, "MIN_ROWS", 8)


class Run:
    """A table that has been trained, and pending gradients."""

    def __init__(self, operation=None) -> None:
        track = ("count", "step", "time") if operation is _look_up_tracked else ()
        self.table = HashTable(2, name="t", initializer=Normal(), track=track)
        self.table.step, self.table.event_time = 7, 1.5
        self.table.add_slot("mark", (), initial=5)
        self.optim = SparseAdamW([self.table], lr=0.5)
        for _ in range(2):
            self.backward(torch.arange(45))
            self.optim.step()
        self.backward(torch.arange(0, 30, 2))
        self.table.step = 8

    def backward(self, ids: torch.Tensor) -> None:
        self.table(ids).square().sum().backward()

    def state(self):
        """All that anybody can see."""
        table = self.table
        ids = table.ids()
        assert table.store.find(ids.numpy()).tolist() == list(range(len(table)))
        slots = {EMBEDDING: table.embeddings(), **table.slots}
        rows = {i: {name: values[at].tolist() for name, values in slots.items()} for at, i in enumerate(ids.tolist())}
        assert len(rows) == len(table)
        pending = table.pending_gradients.of_rows(table.store)
        grads = {} if pending is None else dict(zip(ids[pending.rows].tolist(), pending.grads.tolist(), strict=True))
        return rows, grads, sorted(slots), self.optim.state_dict()["state"]

    def go_on(self) -> None:
        self.table.erase(torch.tensor([2, 44]))
        self.table.insert(torch.arange(40, 60), torch.ones(20, 2), {"mark": torch.arange(20.0)})
        self.backward(torch.arange(50, 70))
        self.optim.step()


def _insert(run):
    run.table.insert(torch.tensor([3, 100, 3, 101, 44]), torch.arange(10.0).view(5, 2), {"mark": torch.arange(5.0)})


def _insert_new(run):
    run.table.insert(torch.arange(200, 300), torch.ones(100, 2))


def _look_up(run):
    run.table(torch.cat([torch.arange(40, 300), torch.arange(290, 310)]))


def _look_up_tracked(run):
    _look_up(run)


def _step(run):
    run.optim.step()


def _erase(run):
    run.table.erase(torch.tensor([0, 7, 7, 20, 44, 1000]))


def _erase_most(run):
    run.table.erase(torch.arange(3, 40))


def _clear(run):
    run.table.clear()


def _load(run):
    other = HashTable(2, name="t")
    other.add_slot("new", (3,))
    other.insert(torch.tensor([1, 44, 99]), torch.ones(3, 2), {"new": torch.ones(3, 3)})
    run.table.load_state_dict({"t": other})


def _reserve(run):
    run.table.reserve(1000)


def _add_slot(run):
    run.table.add_slot("late", (2,), initial=3)


LOOK_UPS = [_look_up, _look_up_tracked]
OPERATIONS = [_insert, _insert_new, *LOOK_UPS, _step, _erase, _erase_most, _clear, _load, _reserve, _add_slot]


@mostly_slow()
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__[1:])
def test_an_exception_at_many_lines_leaves_the_table_as_before_or_as_after(operation):
    for first, error in enumerate(ERRORS):
        raise_everywhere(operation, error, 5 * first, 61)


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__[1:])
def test_an_exception_at_any_line_leaves_the_table_as_before_or_as_after(operation, error):
    raise_everywhere(operation, error, 0, SWEEP_STRIDE)


def raise_everywhere(operation, error, first, stride):
    """Raise at every so-manieth line."""
    before = Run(operation)
    after = copy.deepcopy(before.state())
    run, states, futures = Run(operation), [before.state()], []
    operation(run)
    states.append(run.state())
    assert states[0] == after
    for some in (before, run):
        some.go_on()
        futures.append(some.state())
    number, outcomes = first, set()
    while True:
        run = Run(operation)
        snapshot = run.table.store.snapshot("t")
        try:
            with RaisingAt(number, error, "sparse") as raising:
                operation(run)
        except error:
            found = run.state()
            assert found in states, raising.where
            outcomes.add(states.index(found))
            run.go_on()
            assert run.state() == futures[states.index(found)], raising.where
            check_snapshot(snapshot, states[0][0], raising.where)
        else:
            if number >= raising.n_lines:
                break
        snapshot.close()
        number += stride
    assert 0 in outcomes


def check_snapshot(snapshot, expected, where):
    """It is of its moment; where there was no memory for it, it is lost and says so."""
    ids, values = (
        np.empty(snapshot.n_rows, np.int64),
        [np.empty((snapshot.n_rows, *spec.shape), spec.dtype) for spec in snapshot.slots],
    )
    try:
        for column, some in enumerate((ids, *values)):
            read_column(
                snapshot,
                column,
                np.arange(snapshot.n_rows),
                some.reshape(-1).view(np.uint8),
                is_last=column == len(values),
            )
    except MemoryError:
        return
    for spec, some in zip(snapshot.slots, values, strict=True):
        rows = dict(zip(ids.tolist(), some.tolist(), strict=True))
        assert rows == {id_: row[spec.name] for id_, row in expected.items()}, where


def test_an_initializer_that_fails_or_changes_its_table_leaves_no_rows():
    def fail(values):
        raise KeyboardInterrupt

    def meddle(values):
        other.insert(torch.tensor([7]), torch.ones(1, 2))
        values.zero_()

    table, other = HashTable(2, name="t", initializer=fail), HashTable(2, name="t", initializer=meddle)
    with pytest.raises(KeyboardInterrupt):
        table(torch.arange(1000))
    assert len(table) == 0
    _, found = table.lookup(torch.arange(1000))
    assert not found.any()
    table.insert(torch.arange(5, 8), torch.ones(3, 2))
    assert table.ids().tolist() == [5, 6, 7]
    with pytest.raises(RuntimeError, match="initializer has changed the table"):
        other(torch.arange(5))
    assert other.ids().tolist() == [7]
    assert other.embeddings().tolist() == [[1, 1]]


def test_a_step_that_was_interrupted_may_be_taken_again():
    """A table whose rows have had the step has no gradients any more, and its step is counted."""
    straight = Run()
    straight.optim.step()
    for number in range(0, 10_000, 5):
        run = Run()
        try:
            with RaisingAt(number, KeyboardInterrupt, "sparse"):
                run.optim.step()
        except KeyboardInterrupt:
            run.optim.step()
            assert run.state() == straight.state()
        else:
            break
    assert number > 20


@pytest.mark.slow
@pytest.mark.parametrize(("how", "n_hits"), [("waited", 21), ("async", 20_000 // SWEEP_STRIDE)])
def test_a_run_that_is_interrupted_every_few_milliseconds_ends_bit_for_bit_like_one_that_is_not(tmp_path, how, n_hits):
    command = [sys.executable, SUPPORT / "interrupted_run.py", tmp_path, "100", str(n_hits), how]
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500 + n_hits / 10)
    assert done.returncode == 0, done.stderr
    assert int(re.fullmatch(r"interrupts (\d+)\n", done.stdout)[1]) >= n_hits


@pytest.mark.parametrize("read", [lambda t: t.store.snapshot("t").close(), copy.deepcopy, lambda t: t.ids()])
def test_a_signal_handler_that_reads_the_table_at_any_line_of_an_insert_takes_nothing_from_it(read):
    number, is_reached = 0, True
    while is_reached:
        table = HashTable(2, name="t")
        table.insert(torch.arange(5), torch.ones(5, 2))
        with CallingAt(number, lambda table=table: read(table), "sparse/table/row_store.py") as at:
            table.insert(torch.arange(3, 8), torch.full((5, 2), 2.0))
        is_reached, number = at.n_lines > number, number + 1
        assert table.lookup(torch.arange(8))[0][:, 0].tolist() == [1, 1, 1, 2, 2, 2, 2, 2], at.where
    assert number > 10
