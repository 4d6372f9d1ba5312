"""Rows of runs whose steps give the times of events: none of them keeps a date of the clock."""

import math

import numpy as np
import polars
import pytest
import torch

from recckpt import CheckpointManager, CheckpointReader, Saver
from recckpt.policies.evict import UnseenFor
from recckpt.sparse import HashTable, SparseSGD

DAY = 24 * 3600.0


class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table = HashTable(2, name="user", **{"track": ("count", "time"), **options})


def run_at(where, deltas=False, event_time=None, **options):
    """Return a manager and its table."""
    model = Model(**options)
    saver = Saver(model, SparseSGD([model.table], lr=0.1), str(where), deltas=deltas)
    return CheckpointManager(saver, save_interval=1, event_time=event_time), model.table


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


@pytest.mark.parametrize("truth", [True, False, np.True_, torch.tensor(True)])
def test_a_truth_value_is_no_event_time(tmp_path, truth):
    manager, table = run_at(tmp_path)
    with pytest.raises(TypeError, match=r"event_time must be a number .* found .*(True|False)"):
        manager.step(event_time=truth)
    with pytest.raises(TypeError, match=r"event_time must be a number .* found .*(True|False)"):
        run_at(tmp_path, event_time=truth)
    with pytest.raises(ValueError, match="event_time is in seconds since 1970, found"):
        table.event_time = truth
    assert (manager.global_step, table.event_time) == (0, None)
    manager.close()


def test_what_is_no_time_at_all_is_passed_over(tmp_path):
    manager, table = run_at(tmp_path, event_time=math.nan)
    assert table.event_time is None
    manager.close()
