"""Tables that a load fills, and how old loaded rows are."""

import numpy as np
import pytest
import torch
from support.foreign import ForeignTable
from support.sweeps import mostly_slow

from recckpt import CheckpointManager, Saver
from recckpt.policies.evict import LowCount, Unseen
from recckpt.sparse import HashTable, SparseSGD
from recckpt.sparse.files.table_target import target_of

IDS, ROWS = np.array([3, 5]), torch.ones(2, 2)


@pytest.fixture(params=["own", "foreign"])
def table(request):
    if request.param == "own":
        return HashTable(2, name="t")
    return ForeignTable("t", torch.empty(0, dtype=torch.int64), torch.empty(0, 2))


def rows_of(table):
    return dict(zip(table.ids().tolist(), map(tuple, table.embeddings().tolist()), strict=True))


def test_a_table_with_rows_takes_others_at_once(table):
    table.insert(torch.tensor([5, 7]), torch.zeros(2, 2))
    target = target_of(table)
    target.begin()
    assert (target.was_empty, target.aside, len(target)) == (False, None, 2)
    assert target.merge(IDS, {"embedding": ROWS}, {}) == 2
    assert rows_of(table) == {3: (1.0, 1.0), 5: (1.0, 1.0), 7: (0.0, 0.0)}


def test_what_was_empty_is_empty_again_after_an_error_and_what_had_rows_keeps_them(table):
    target = target_of(table)
    target.begin()
    table.insert(torch.from_numpy(IDS), ROWS)
    target.undo(is_cleared=False)
    assert len(table) == 0
    table.insert(torch.from_numpy(IDS), ROWS)
    target.begin()
    target.undo(is_cleared=False)
    assert len(table) == 2
    target.undo(is_cleared=True)
    assert len(table) == 0


def test_a_table_of_ours_gets_what_was_gathered_aside_when_the_load_is_over_and_one_of_others_refuses():
    table = HashTable(2, name="t")
    target = target_of(table)
    target.begin()
    rows, claimed = target.aside.claim(IDS)
    target.aside.put(claimed, rows, {"embedding": ROWS}, None)
    assert (len(target), len(table)) == (2, 0)
    target.finish()
    assert (target.aside, rows_of(table)) == (None, {3: (1.0, 1.0), 5: (1.0, 1.0)})
    target = target_of(ForeignTable("t", torch.tensor([3]), torch.zeros(1, 2)))
    for refused in (lambda: target.write_present(IDS, {}), lambda: target.erase(IDS)):
        with pytest.raises(TypeError, match="'t' is not a recckpt HashTable"):
            refused()


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
    manager, table = run_at(tmp_path, track=("count", "step", "time"), evict=evict, evict_every=1)
    manager.restore()
    assert dates(table, "count") == {0: 3, 1: 3, 2: 3}
    assert dates(table, "last_time") == dict.fromkeys([0, 1, 2], 1049.0), "that of the checkpoint"
    train(manager, table, [7], 1)
    assert dates(table, "count") == {0: 3, 1: 3, 2: 3, 7: 1}
    train(manager, table, [0], 1)
    assert dates(table, "count") == {0: 4, 1: 3, 2: 3}


@mostly_slow()
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
