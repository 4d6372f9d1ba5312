"""How old loaded rows are: by what their checkpoint says, in the steps of the run that loads them."""

import pytest
import torch

from recckpt import CheckpointManager, Saver
from recckpt.policies.evict import LowCount, Unseen
from recckpt.sparse import HashTable, SparseSGD


class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table = HashTable(2, name="user", **options)


def run_at(where, **options):
    """Return a manager and its table."""
    model = Model(**options)
    saver = Saver(model, SparseSGD([model.table], lr=0.1), str(where))
    return CheckpointManager(saver, save_interval=1_000_000), model.table


def train(manager, table, ids, n_steps, first_time=None):
    for _ in range(n_steps):
        table(torch.tensor(ids))
        manager.step(event_time=None if first_time is None else first_time + manager.global_step)


def dates(table, slot="last_step"):
    return dict(zip(table.ids().tolist(), table.slots[slot].tolist(), strict=True))


EVICTING = {"track": ("step",), "evict": Unseen(steps=20), "evict_every": 2}


def saved(where, n_steps, **options):
    """Leave a checkpoint with the rows 0 to 2, of which the first was seen last 5 steps before its end."""
    manager, table = run_at(where, **options)
    train(manager, table, [0, 1, 2], n_steps - 5, 1000.0)
    train(manager, table, [1, 2], 5, 1000.0)
    manager.save()
    manager.close()


@pytest.mark.parametrize("load_conf", [None, {"load": ["sparse", "global_step"]}])
def test_rows_of_a_checkpoint_that_tracks_nothing_are_as_old_as_it_and_not_as_the_run(tmp_path, load_conf):
    saved(tmp_path, 50)
    manager, table = run_at(tmp_path, **EVICTING)
    assert manager.restore(load_conf=load_conf) == 50
    assert dates(table) == {0: 50, 1: 50, 2: 50}
    train(manager, table, [7], 20)
    assert len(table) == 4
    train(manager, table, [7], 4)
    assert table.ids().tolist() == [7]


def test_rows_of_a_checkpoint_that_counted_nothing_are_not_taken_for_rows_that_were_seen_too_few_times(tmp_path):
    saved(tmp_path, 50)
    evict = [LowCount(2), LowCount(3) & Unseen(steps=10)]
    manager, table = run_at(tmp_path, track=("count", "step"), evict=evict, evict_every=1)
    manager.restore()
    assert dates(table, "count") == {0: 3, 1: 3, 2: 3}
    train(manager, table, [7], 1)
    assert dates(table, "count") == {0: 3, 1: 3, 2: 3, 7: 1}
    train(manager, table, [0], 1)
    assert dates(table, "count") == {0: 4, 1: 3, 2: 3}


def test_event_times_that_a_checkpoint_lacks_are_its_own(tmp_path):
    saved(tmp_path, 50)
    manager, table = run_at(tmp_path, track=("time",))
    manager.restore()
    assert dates(table, "last_time") == dict.fromkeys([0, 1, 2], 1049.0)


@pytest.mark.parametrize(("there", "here"), [(50, 0), (6, 300), (50, 300)])
def test_rows_of_another_run_keep_their_age_in_the_steps_of_this_one(tmp_path, there, here):
    saved(tmp_path / "other", there, track=("step",))
    manager, table = run_at(tmp_path / "own", **EVICTING)
    train(manager, table, [9], here)
    manager.load_model_bank([{"path": str(tmp_path / "other"), "load": ["sparse"]}])
    assert manager.global_step == here
    assert dates(table) == {0: here - 6, 1: here - 1, 2: here - 1}
    train(manager, table, [7], 14)
    assert len(table) == 4
    train(manager, table, [7], 8)
    assert table.ids().tolist() == [7]


def test_rows_that_are_merged_into_others_keep_their_age_and_leave_that_of_the_others(tmp_path):
    saved(tmp_path / "tracked", 50, track=("step",))
    saved(tmp_path / "old", 50)
    for name, expected in (("tracked", {0: 94, 1: 99, 2: 99}), ("old", dict.fromkeys([0, 1, 2], 100))):
        manager, table = run_at(tmp_path / "own" / name, track=("step",))
        train(manager, table, [9], 100)
        bank = [{"path": str(tmp_path / name), "load": ["sparse"], "hashtable_clear": False}]
        manager.load_model_bank(bank)
        assert dates(table) == {**expected, 9: 99}


def test_a_bank_whose_step_is_taken_and_a_load_by_nobody_who_counts_steps_leave_the_dates_as_they_are(tmp_path):
    saved(tmp_path / "other", 50, track=("step",))
    manager, table = run_at(tmp_path / "own", track=("step",))
    manager.load_model_bank([{"path": str(tmp_path / "other"), "load": ["sparse", "global_step"]}])
    assert (manager.global_step, dates(table)) == (50, {0: 44, 1: 49, 2: 49})

    model = Model(track=("step",))
    Saver(model, None, str(tmp_path / "alone")).load_by_config([{"path": str(tmp_path / "other"), "load": ["sparse"]}])
    assert dates(model.table) == {0: 44, 1: 49, 2: 49}


def test_deltas_on_a_checkpoint_that_tracked_nothing_have_the_dates_of_all_rows(tmp_path):
    saved(tmp_path, 50)

    def resumed():
        model = Model(**EVICTING)
        saver = Saver(model, SparseSGD([model.table], lr=0.1), str(tmp_path), deltas=True)
        manager = CheckpointManager(saver, save_interval=1)
        manager.restore()
        return manager, model.table

    manager, table = resumed()
    train(manager, table, [1], 3)
    manager.close()
    again, other = resumed()
    assert dates(other) == dates(table) == {0: 50, 1: 52, 2: 50}
    again.close()
