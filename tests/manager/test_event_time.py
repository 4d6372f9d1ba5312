"""The time of the data in a run: given by steps, kept with checkpoints, and what tables evict by it after a resume."""

import math
import tempfile
import time

import numpy as np
import polars
import pytest
import torch
from hypothesis import strategies as st
from support.drawn import drawn
from support.sweeps import mostly_slow

from recckpt import CheckpointManager, CheckpointReader, Saver, list_checkpoints
from recckpt.output_dir.listing import list_checkpoints as listing_of
from recckpt.policies.evict import Capacity, LowCount, Unseen, UnseenFor
from recckpt.policies.when import EveryEventTime
from recckpt.sparse import Constant, HashTable, SparseSGD
from recckpt.sparse.table import eviction

DAY = 24 * 3600.0
N_STEPS = 40
POLICIES = [Unseen(steps=12), LowCount(2) & Unseen(steps=3), Capacity(60, room=0.2)]


class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table = HashTable(2, name="user", **{"track": ("count", "time"), **options})


def run_at(where, deltas=False, event_time=None, **options):
    """Return a manager and its table."""
    model = Model(**options)
    saver = Saver(model, SparseSGD([model.table], lr=0.1), str(where), deltas=deltas)
    manager = CheckpointManager(saver, save_interval=1)
    if event_time is not None:
        manager.event_time = event_time
    return manager, model.table


def dates(table):
    return dict(zip(table.ids().tolist(), table.slots["last_time"].tolist(), strict=True))


def insert(table, *ids):
    table.insert(torch.tensor(ids), torch.ones(len(ids), 2))


def test_rows_of_the_first_batch_are_dated_with_the_first_event_time_and_expire_in_a_replay(tmp_path):
    manager, table = run_at(tmp_path, evict=UnseenFor(days=2), evict_every=1)
    insert(table, 5)
    table(torch.tensor([1, 2]))
    manager.step(event_time=1.0 * DAY)
    assert dates(table) == dict.fromkeys([5, 1, 2], DAY)
    for day in range(2, 5):
        table(torch.tensor([2]))
        manager.step(event_time=day * DAY)
    table(torch.tensor([2]))
    assert table.ids().tolist() == [2]
    manager.close()


def test_the_first_event_time_may_be_given_to_the_manager(tmp_path):
    manager, table = run_at(tmp_path, event_time=7 * DAY)
    table(torch.tensor([1]))
    assert dates(table) == {1: 7 * DAY}
    manager.step()
    table(torch.tensor([2]))
    manager.step(event_time=8 * DAY)
    assert dates(table) == {1: 7 * DAY, 2: 7 * DAY}
    manager.close()
    again, table = run_at(tmp_path, event_time=1 * DAY)
    again.restore()
    assert table.event_time == 8 * DAY
    again.close()


def test_an_event_time_of_a_table_stays_where_nothing_is_restored_and_no_step_gives_one(tmp_path):
    model = Model()
    model.table.event_time = 3 * DAY
    manager = CheckpointManager(Saver(model, output_dir=str(tmp_path)), save_interval=1)
    assert (manager.restore(), model.table.event_time) == (0, 3 * DAY)
    model.table(torch.tensor([1]))
    manager.step()
    assert (model.table.event_time, dates(model.table)) == (3 * DAY, {1: 3 * DAY})
    manager.close()


@mostly_slow()
@pytest.mark.parametrize("deltas", [False, True])
@pytest.mark.parametrize("stop", [1, 2])
def test_a_run_that_is_resumed_before_its_first_event_time_dates_as_one_that_never_stopped(tmp_path, deltas, stop):
    def train(manager, table, steps):
        for step in steps:
            table(torch.tensor([step, 10]))
            manager.step(event_time=None if step < 2 else step * DAY)

    straight, expected = run_at(tmp_path / "a", deltas)
    train(straight, expected, range(4))
    straight.close()
    first, table = run_at(tmp_path / "b", deltas)
    train(first, table, range(stop))
    first.close()
    again, table = run_at(tmp_path / "b", deltas)
    assert again.restore() == stop
    train(again, table, range(stop, 4))
    again.close()
    assert dates(table) == dates(expected) == {0: 2 * DAY, 10: 2 * DAY, 1: 2 * DAY, 2: 2 * DAY, 3: 2 * DAY}
    with CheckpointReader(tmp_path / "b" / "latest") as reader:
        assert set(polars.from_arrow(reader.table("user"))["last_time"]) == {2 * DAY}


def test_rows_of_another_run_that_the_clock_has_dated_get_the_event_time_of_this_one_and_others_keep_theirs(tmp_path):
    other, table = run_at(tmp_path / "other")
    table.insert(torch.tensor([7]), torch.ones(1, 2), {"last_time": torch.tensor([3.0], dtype=torch.float64)})
    table(torch.tensor([1]))
    other.step()
    other.close()
    bank = [{"path": str(tmp_path / "other"), "load": ["sparse"]}]
    known, table = run_at(tmp_path / "known", event_time=5 * DAY)
    known.load_model_bank(bank)
    assert dates(table) == {7: 3.0, 1: 5 * DAY}
    known.close()
    later, table = run_at(tmp_path / "later")
    later.load_model_bank(bank)
    table(torch.tensor([2]))
    later.step(event_time=6 * DAY)
    assert dates(table) == {7: 3.0, 1: 6 * DAY, 2: 6 * DAY}
    later.close()


def test_a_copy_dates_what_it_has_taken_over(tmp_path):
    table, copied = HashTable(2, name="t", track="time"), HashTable(2, name="t", track="time")
    table(torch.tensor([1]))
    copied.event_time = DAY
    copied.load_state_dict(table.state_dict())
    assert dates(copied) == {1: DAY}


def test_event_times_that_lie_ahead_of_the_clock_are_not_taken_for_its_dates(tmp_path):
    manager, table = run_at(tmp_path, event_time=9e9)
    for step in range(3):
        table(torch.tensor([step]))
        manager.step(event_time=9e9 + step)
    manager.close()
    again, table = run_at(tmp_path)
    again.restore()
    assert dates(table) == {0: 9e9, 1: 9e9, 2: 9e9 + 1}
    again.close()


def test_what_is_no_time_is_refused_or_passed_over(tmp_path):
    manager, table = run_at(tmp_path)
    for truth in (True, False, np.True_, torch.tensor(True)):
        with pytest.raises(TypeError, match=r"event_time must be a number .* found .*(True|False)"):
            manager.step(event_time=truth)
        with pytest.raises(TypeError, match=r"event_time must be a number .* found .*(True|False)"):
            manager.event_time = truth
        with pytest.raises(ValueError, match="event_time is in seconds since 1970, found"):
            table.event_time = truth
    assert (manager.global_step, table.event_time) == (0, None)
    manager.step(event_time=math.nan)
    assert table.event_time is None
    manager.event_time = 7.0
    for value, error in (("now", TypeError), (math.nan, ValueError), (1e15, ValueError)):
        with pytest.raises(error, match="event_time must be"):
            manager.event_time = value
    assert manager.event_time == 7.0
    manager.close()


YEAR = 365 * DAY


def test_one_record_that_is_years_ahead_changes_nothing_and_is_said_once(tmp_path, caplog):
    now = time.time()
    model = Model(evict=UnseenFor(days=30), evict_every=1)
    saver = Saver(model, SparseSGD([model.table], lr=0.1), str(tmp_path), max_keep=10)
    manager = CheckpointManager(saver, EveryEventTime(3600))
    manager.event_time = now - DAY
    for hour, wrong in ((1, 0.0), (2, 7 * YEAR), (3, 0.0), (4, 8 * YEAR), (5, 0.0)):
        model.table(torch.tensor([hour]))
        manager.step(event_time=now - DAY + hour * 3600 + wrong)
    assert sorted(model.table.ids().tolist()) == [1, 2, 3, 4, 5]
    assert manager.event_time == now - DAY + 5 * 3600
    assert [entry.ckpt_id for entry in list_checkpoints(tmp_path)] == ["ckpt_1", "ckpt_3", "ckpt_5"]
    [message] = [record.message for record in caplog.records if "event_time" in record.message]
    assert "days ahead of the clock and of the last event_time: this and similar values are ignored" in message
    manager.close()


def test_the_first_record_of_a_run_may_be_the_wrong_one_but_data_that_begins_ahead_of_the_clock_goes_on_there(
    tmp_path, caplog
):
    begin = time.time() + YEAR
    manager, table = run_at(tmp_path / "ahead", event_time=begin)
    for hour in range(3):
        manager.step(event_time=begin + hour * 3600)
    assert table.event_time == manager.event_time == begin + 2 * 3600
    assert caplog.records == []
    manager.close()
    manager, _ = run_at(tmp_path / "wrong")
    manager.step(event_time=time.time() + YEAR)
    assert manager.event_time is None
    manager.step(event_time=time.time())
    assert manager.event_time == pytest.approx(time.time(), abs=60)
    manager.close()


def test_a_leap_of_months_is_taken_and_said_and_can_be_set_back(tmp_path, caplog):
    model = Model()
    saver = Saver(model, SparseSGD([model.table], lr=0.1), str(tmp_path), max_keep=10)
    manager = CheckpointManager(saver, EveryEventTime(3600))
    manager.event_time = 100 * DAY
    manager.step(event_time=200 * DAY)  # a replay of old data: not ahead of the clock
    assert "100 days later than the last one" in caplog.text
    manager.event_time = 100 * DAY + 60
    assert model.table.event_time == manager.event_time == 100 * DAY + 60
    manager.step(event_time=100 * DAY + 120)
    manager.step(event_time=100 * DAY + 3700)
    assert [entry.ckpt_id for entry in list_checkpoints(tmp_path)] == ["ckpt_1", "ckpt_3"]
    manager.close()
    again, table = run_at(tmp_path)
    again.restore()
    assert table.event_time == again.event_time == 100 * DAY + 3700
    again.close()


class Run:
    """A table that some steps do not look up, and a manager that counts all of them."""

    def __init__(self, root, every, *evict):
        track = ("count", "step")
        self.table = HashTable(1, name="t", initializer=Constant(0), track=track, evict=evict, evict_every=every)
        self.optim = SparseSGD([self.table], lr=0.1)
        saver = Saver(torch.nn.ModuleDict({"t": self.table}), self.optim, str(root), deltas=True)
        self.manager = CheckpointManager(saver, save_interval=10**9)

    def train(self, batches, begin, end):
        for step in range(begin, end):
            if batches[step]:
                self.table(torch.tensor(batches[step])).sum().backward()
                self.optim.step()
            self.manager.step()

    @property
    def rows(self):
        slots = self.table.slots
        columns = (slots["count"], slots["last_step"], self.table.embeddings()[:, 0])
        return dict(zip(self.table.ids().tolist(), zip(*(c.tolist() for c in columns), strict=True), strict=True))


@drawn(st.integers(0, 2**32), st.integers(1, 30), st.integers(1, N_STEPS - 1), few=4, many=100)
def test_a_run_with_pauses_that_is_resumed_at_any_step_evicts_what_it_would_have(seed, every, at):
    draw = np.random.default_rng(seed)
    sizes = 12 * (draw.random(N_STEPS).cumsum().astype(int) % 2)  # pauses of several steps
    batches = [(draw.integers(0, 15, size) ** 2 + step).tolist() for step, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as root:
        patch.setattr(eviction, "MIN_PART_ROWS", 8)
        run = Run(root, every, *POLICIES)
        run.train(batches, 0, at)
        run.manager.save()
        run.train(batches, at, N_STEPS)
        resumed = Run(root, every, *POLICIES)
        assert resumed.manager.restore() == at
        resumed.train(batches, at, N_STEPS)
    assert resumed.rows == run.rows


def test_a_run_that_is_resumed_in_a_pause_makes_up_for_the_parts_of_the_steps_before(tmp_path):
    batches = [[*range(300)] if step == 0 else [300] if step in (5, 30) else [] for step in range(N_STEPS)]
    run = Run(tmp_path, 20, Unseen(steps=12))
    run.train(batches, 0, 22)
    run.manager.save()
    [entry] = next(c.manifest.tables for c in listing_of(run.manager.saver.storage).committed)
    assert (entry.rows, entry.evicted_to) == (301, 5)
    resumed = Run(tmp_path, 20, Unseen(steps=12))
    resumed.manager.restore()
    for each in (run, resumed):
        each.train(batches, 22, N_STEPS)
        assert len(each.table) == 1
    assert resumed.rows == run.rows
