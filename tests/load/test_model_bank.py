"""Warm start: state of other runs, before the own run begins or resumes."""

import logging
import shutil

import pytest
import torch
from support.bank_runs import run, saved, slots_of, table, values_of
from support.builders import Run, flip_bit, state_of, table_state, tree
from support.thread_ranks import ThreadGroup, Wire, on_ranks
from torch import nn

from recckpt import CheckpointManager
from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, LoadConfError, StateMismatchError
from recckpt.parallel.ranks import Connection, Ranks
from recckpt.sparse import gen_slice


@pytest.fixture
def bank(tmp_path):
    """Two runs of other seeds, each with a checkpoint."""
    runs = [Run(tmp_path / name, interval=5, seed=seed) for seed, name in ((11, "first"), (12, "second"))]
    for n_steps, each in zip((5, 10), runs, strict=True):
        each.train(n_steps)
    return runs


def managed(url, *tables, interval=1, **options):
    saver = run(url, *tables, **options)
    return CheckpointManager(saver, interval)


# what comes from where


def test_later_entries_win_over_earlier_ones_and_a_warm_start_is_no_resume(tmp_path, bank):
    first, second = bank
    before = [tree(tmp_path / name) for name in ("first", "second")]
    new = Run(tmp_path / "own", interval=1, seed=1)
    random = state_of(new)["rng"]
    report = new.manager.load_model_bank(
        [{"path": first.saver.output_dir}, {"path": second.saver.output_dir, "load": ["sparse", "sparse_opt"]}]
    )
    own = state_of(new)
    for name in ("item", "user/1", "sparse optimizer"):
        assert own[name] == state_of(second)[name] != state_of(first)[name]
    for name in ("dense", "dense optimizer"):
        assert own[name] == state_of(first)[name] != state_of(second)[name]
    assert (new.manager.global_step, report.global_step, new.stream.position) == (0, None, 0)
    assert own["rng"] == random
    assert new.manager.save().ckpt_id == "ckpt_0"
    new.train(2)
    assert [tree(tmp_path / name) for name in ("first", "second")] == before, "a bank is only read"


def test_step_and_positions_are_taken_where_they_are_named(tmp_path, bank):
    path = bank[1].saver.output_dir
    for names, expected in (
        (["io_state"], (0, 10)),
        (["global_step"], (10, 0)),
        (["*", "global_step", "stream"], (10, 10)),
    ):
        new = Run(tmp_path / "own", seed=1)
        new.manager.load_model_bank([{"path": path, "load": names}])
        assert (new.manager.global_step, new.stream.position) == expected
    assert new.manager.save().ckpt_id == "ckpt_10"


def test_the_own_run_wins_over_every_bank_and_the_bank_stays_where_it_has_nothing(tmp_path, bank):
    every = [{"path": each.saver.output_dir, "load": ["*", "global_step", "io_state", "dense"]} for each in bank]
    new = Run(tmp_path / "nothing", interval=5, seed=1)
    new.manager.load_model_bank([{"path": bank[0].saver.output_dir}])
    assert new.manager.restore() == 0
    assert table_state(new.model.items) == table_state(bank[0].model.items)
    expected = state_of(Run(tmp_path / "own", interval=5).train(5))
    for _ in range(2):
        new = Run(tmp_path / "own", interval=5, seed=1)
        report = new.manager.load_model_bank(every)
        assert {item.offer for item in report.taken} == {2}
        assert new.manager.global_step == 5
        assert state_of(new) == expected
        assert new.manager.restore() == 5, "which has nothing left to do"
        assert state_of(new) == expected
        assert new.manager.save() is None, "since the checkpoint holds all of it"


def test_what_the_own_checkpoint_lacks_comes_from_the_bank(tmp_path):
    other = saved(tmp_path / "other", table("t", [1], 5.0), table("new", [2], 6.0), value=5.0, top=nn.Linear(1, 1))
    managed(tmp_path / "own", table("t", [1], 1.0)).step()
    t, new, top = table("t"), table("new"), nn.Linear(1, 1)
    manager = managed(tmp_path / "own", t, new, top=top)
    report = manager.load_model_bank([{"path": other, "load": ["new", "dense"]}])
    assert (values_of(t), values_of(new), top.weight.item()) == ({1: 1.0}, {2: 6.0}, 5.0)
    assert manager.global_step == 1
    assert {item.offer for item in report.items} == {0, 1}
    assert manager.save().ckpt_id == "ckpt_1", "which now has the new table too"


def test_the_plan_of_a_manager_counts_the_own_run_and_changes_nothing(tmp_path, bank):
    entries = [{"path": bank[0].saver.output_dir}]

    def planned():
        new = Run(tmp_path / "own", interval=5, seed=1)
        before = state_of(new)
        plan = new.manager.plan(entries)
        assert state_of(new) == before
        assert new.manager.load_model_bank(entries).items == plan.items
        return {plan.source_of(item) for item in plan.taken}

    assert planned() == {f"{tmp_path}/first/ckpt_5"}
    Run(tmp_path / "own", interval=5).train(5)
    assert planned() == {f"{tmp_path}/own/ckpt_5"}


def test_a_restore_after_the_bank_still_goes_back(tmp_path, bank):
    Run(tmp_path / "own", interval=5).train(5)
    new = Run(tmp_path / "own", interval=5, seed=1)
    new.manager.load_model_bank([{"path": bank[0].saver.output_dir}])
    expected = state_of(new)
    assert new.manager.restore() == 5
    new.train(3)
    assert new.manager.restore() == 5
    assert state_of(new) == expected
    new.model.items.clear()
    assert new.manager.restore() == 5
    assert state_of(new) == expected


def test_the_own_output_dir_may_be_in_the_bank_too(tmp_path):
    t = table("t", [1])
    managed(tmp_path / "own", t).step()
    again = table("t")
    manager = managed(tmp_path / "own", again)
    report = manager.load_model_bank([{"path": str(tmp_path / "own")}, {"path": str(tmp_path / "own" / "ckpt_1")}])
    assert values_of(again) == values_of(t)
    assert {item.offer for item in report.taken} == {2}
    assert manager.global_step == 1


def test_a_load_from_the_own_output_dir_by_its_path_is_no_warm_start(tmp_path):
    Run(tmp_path, interval=5).train(5)
    for options in ({}, {"ckpt_path": str(tmp_path)}, {"ckpt_path": f"{tmp_path}/ckpt_5", "direct_path": True}):
        new = Run(tmp_path, seed=1)
        assert new.saver.load(**options).global_step == 5
        assert new.stream.position == 5
    other = Run(tmp_path / "other", seed=1)
    assert other.saver.load(str(tmp_path)).global_step is None
    assert other.stream.position == 0


# what is wrong


def test_all_entries_are_checked_before_the_first_is_loaded(tmp_path, bank):
    new = Run(tmp_path / "own", seed=1)
    before = state_of(new)
    good = {"path": bank[0].saver.output_dir}
    with pytest.raises(LoadConfError, match="did you mean 'exclude'"):
        new.manager.load_model_bank([good, {**good, "exlude": ["dense"]}])
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        new.manager.load_model_bank([good, {"path": str(tmp_path / "nowhere")}])
    with pytest.raises(LoadConfError, match="2 problems") as caught:
        new.manager.load_model_bank([{"path": "nosuch://x"}, {"path": str(tmp_path / "nowhere")}])
    assert "bank[0]['path']" in caught.value.problems[0]
    assert state_of(new) == before
    assert not (tmp_path / "nowhere").exists()


def test_a_run_resumes_without_a_bank_that_is_gone_where_it_has_all_that_was_asked_of_it(tmp_path, bank, caplog):
    entries = [{"path": bank[0].saver.output_dir}]
    expected = state_of(Run(tmp_path / "own", interval=5).train(5))
    shutil.rmtree(tmp_path / "first")
    new = Run(tmp_path / "own", interval=5, seed=1)
    new.manager.load_model_bank(entries)
    assert state_of(new) == expected
    assert "not needed, since the run resumes" in caplog.text
    with pytest.raises(CheckpointNotFoundError, match="first"):
        Run(tmp_path / "another").manager.load_model_bank(entries)
    wider = Run(tmp_path / "own", seed=1)
    wider.saver.register_for_checkpointing("more", 3)
    with pytest.raises(CheckpointNotFoundError, match="first"):
        wider.manager.load_model_bank(entries)


def test_a_damaged_own_checkpoint_is_passed_over_for_the_one_before(tmp_path, bank):
    expected = state_of(Run(tmp_path / "own", interval=5, max_keep=2).train(5))
    longer = Run(tmp_path / "own", interval=5, max_keep=2)
    longer.manager.restore()
    longer.train(5)
    flip_bit(tmp_path / "own" / "ckpt_10" / "model.pt")
    new = Run(tmp_path / "own", seed=1)
    report = new.manager.load_model_bank([{"path": bank[0].saver.output_dir, "load": ["*", "nothing*"]}])
    assert state_of(new) == expected
    assert len([text for text in report.warnings if "nothing*" in text]) == 1


# extra objects


def test_plain_values_and_names_that_nobody_registered_come_as_they_were_loaded_unless_damaged(tmp_path):
    source = run(tmp_path / "a", top=nn.Linear(1, 1), value=3.0)
    for name, value in (("epoch", 3), ("note", {"who": "me"}), ("secret", 4)):
        source.register_for_checkpointing(name, value)
    source.save("c")
    saver = run(tmp_path / "b", top=nn.Linear(1, 1))
    for name in ("epoch", "renamed"):
        saver.register_for_checkpointing(name, 0)
    bank = [{"path": str(tmp_path / "a"), "exclude": ["secret"], "oname": {"renamed": "epoch"}}]
    saver.load_by_config(bank)
    found = {name: saver.get_extra_data(name) for name in ("epoch", "renamed", "note", "secret", "nothing")}
    assert found == {"epoch": 3, "renamed": 3, "note": {"who": "me"}, "secret": None, "nothing": None}
    other = run(tmp_path / "b", top=nn.Linear(1, 1))
    other.load_by_config([{"path": str(tmp_path / "a"), "load": ["dense"]}])
    assert other.get_extra_data("note") is None
    flip_bit(tmp_path / "a" / "c" / "extra.pt")
    saver = run(tmp_path / "b", top=nn.Linear(1, 1))
    with pytest.raises(CorruptCheckpointError, match=r"extra\.pt"):
        saver.load_by_config([{"path": str(tmp_path / "a")}])
    assert saver.model.top.weight.item() == 0.0


def test_extra_data_has_the_global_step_of_a_load_and_of_a_manager_that_counts_on(tmp_path):
    run(tmp_path / "a", top=nn.Linear(1, 1)).save("c", step=300)
    saver = run(tmp_path / "a", top=nn.Linear(1, 1))
    assert saver.get_extra_data("global_step") is None
    saver.load()
    assert saver.get_extra_data("global_step") == 300
    manager = CheckpointManager(saver, 1000)
    assert saver.get_extra_data("global_step") == 300
    manager.restore()
    manager.step()
    assert saver.get_extra_data("global_step") == manager.global_step == 301
    other = run(tmp_path / "b", top=nn.Linear(1, 1))
    other.load_by_config([{"path": tmp_path / "a"}])
    assert other.get_extra_data("global_step") is None
    other.load_by_config([{"path": tmp_path / "a", "load": ["global_step"]}])
    assert other.get_extra_data("global_step") == 300


# entries that are looked at again


def test_a_dynamic_entry_is_loaded_when_there_is_a_newer_checkpoint_also_by_a_step_that_saves(tmp_path):
    source_table = table("hot", [1], 1.0)
    source = managed(tmp_path / "a", source_table, table("cold", [1], 1.0))
    source.step()
    hot, cold = table("hot"), table("cold")
    manager = managed(tmp_path / "own", hot, cold, interval=2)
    manager.load_model_bank([{"path": str(tmp_path / "a"), "load": ["hot"], "is_dynamic": True}])
    assert manager.reload_dynamic() == []
    source_table.insert(torch.tensor([1, 2]), torch.full((2, 4), 2.0))
    source.step()
    hot.clear()
    [report] = manager.reload_dynamic()
    assert values_of(hot) == {1: 2.0, 2: 2.0}
    assert len(cold) == 0
    assert report.sources == (f"{tmp_path}/a/ckpt_2",)
    assert manager.reload_dynamic() == []
    source_table.insert(torch.tensor([1]), torch.full((1, 4), 3.0))
    source.step()
    manager.step()
    assert values_of(hot) == {1: 2.0, 2: 2.0}
    manager.step()
    assert values_of(hot) == {1: 3.0, 2: 2.0}
    assert manager.save().ckpt_id == "ckpt_2", "which holds the older rows still"


def test_a_dynamic_entry_gives_only_what_it_won_and_others_are_not_looked_at_again(tmp_path):
    a, b = table("a", [1], 1.0), table("b", [1], 1.0)
    source = managed(tmp_path / "source", a, b)
    source.step()
    fixed = saved(tmp_path / "fixed", table("b", [1], 7.0))
    live_a, live_b = table("a"), table("b")
    manager = managed(tmp_path / "own", live_a, live_b)
    path = str(tmp_path / "source")
    manager.load_model_bank(
        [{"path": path, "is_dynamic": True}, {"path": fixed}, {"path": path, "load": ["global_step"]}]
    )
    assert manager.global_step == 1
    for each in (a, b):
        each.insert(torch.tensor([1]), torch.full((1, 4), 2.0))
    source.step()
    [report] = manager.reload_dynamic()
    assert (values_of(live_a), values_of(live_b)) == ({1: 2.0}, {1: 7.0})
    assert {item.name.table for item in report.taken} == {"a"}
    assert manager.global_step == 1


def test_a_resumed_run_goes_on_following(tmp_path):
    source_table = table("t", [1], 1.0)
    source = managed(tmp_path / "a", source_table)
    source.step()
    bank = [{"path": str(tmp_path / "a"), "is_dynamic": True}]
    managed(tmp_path / "own", table("t", [5], 5.0)).step()
    t = table("t")
    manager = managed(tmp_path / "own", t)
    manager.load_model_bank(bank)
    assert values_of(t) == {5: 5.0}
    assert manager.reload_dynamic() == []
    source.step()
    assert len(manager.reload_dynamic()) == 1
    assert values_of(t) == {1: 1.0}


def test_a_path_that_went_away_or_back_is_not_followed_and_what_does_not_fit_changes_nothing(tmp_path):
    source = CheckpointManager(run(tmp_path / "a", table("t", [1], 1.0)), 1)
    source.saver.max_keep = None
    source.step()
    source.step()
    t = table("t", [9], 9.0)
    manager = managed(tmp_path / "own", t)
    manager.load_model_bank([{"path": str(tmp_path / "a"), "is_dynamic": True}])
    t.clear()
    shutil.rmtree(tmp_path / "a" / "ckpt_2")
    assert manager.reload_dynamic() == [], "ckpt_1 is older than the one taken"
    shutil.rmtree(tmp_path / "a")
    assert manager.reload_dynamic() == []
    path, t = saved(tmp_path / "b", table("t", [1]), ckpt_id="one"), table("t")
    manager = managed(tmp_path / "other", t)
    manager.load_model_bank([{"path": path, "is_dynamic": True}])
    saved(tmp_path / "b", table("t", [2], dim=6), ckpt_id="two")
    with pytest.raises(StateMismatchError, match="t@embedding"):
        manager.reload_dynamic()
    assert values_of(t) == {1: 1.0}


# positions over another number of shards, and several ranks


class Position:
    """A dataset position without a way to merge."""

    def __init__(self, position=0):
        self.position = position

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Mergeable(Position):
    def merge_io_state(self, states, index, count):
        return {"position": (tuple(state["position"] for state in states), index, count)}


def sliced(rank, size, ids=(), value=1.0):
    own = gen_slice(rank, size)
    return table("t", [i for i in ids if own.owns(torch.tensor([i]))[0]], value, slice=own)


def save_on_two_ranks(url, dataset=Position):
    def work(rank, connect):
        saver = connect(run(url, sliced(rank, 2, range(20)), optimizer="adam", steps=1, top=nn.Linear(1, 1)))
        saver.register_io_state("data", dataset(100 + rank))
        saver.save("c", rank, 2, step=7)

    on_ranks(2, work)
    return str(url)


def loading(url, dataset, n_ranks=1, rank=0, **conf):
    t = sliced(rank, n_ranks)
    saver = run(f"{url}-own", t, optimizer="adam", top=nn.Linear(1, 1))
    saver.register_io_state("data", dataset)
    manager = CheckpointManager(saver, 1, shard_id=rank, shard_num=n_ranks)
    group = ThreadGroup(0, Wire(1))
    saver.ranks[rank, n_ranks] = Ranks(rank, n_ranks, Connection(lambda: group))
    manager.load_model_bank([{"path": url, "load": ["*", "io_state"], **conf}])
    return t


@pytest.mark.parametrize(("n_ranks", "dataset"), [(2, Position), (1, Mergeable), (3, Mergeable)])
def test_each_shard_gets_its_position_back_and_on_another_number_an_object_may_merge_all(tmp_path, n_ranks, dataset):
    url, rows = save_on_two_ranks(tmp_path / "a"), 0
    for rank in range(n_ranks):
        data = dataset()
        rows += len(loading(url, data, n_ranks, rank))
        assert data.position == (100 + rank if n_ranks == 2 else ((100, 101), rank, n_ranks))
    assert rows == 20


class Failing(Position):
    def merge_io_state(self, states, index, count):
        raise RuntimeError("cannot")


@pytest.mark.parametrize("n_ranks", [1, 3])
def test_where_it_cannot_both_numbers_and_the_two_ways_out_are_named(tmp_path, n_ranks):
    url, dataset = save_on_two_ranks(tmp_path / "a"), Position(5)
    with pytest.raises(StateMismatchError) as caught:
        loading(url, dataset, n_ranks)
    for text in ("'io state data'", "of 2 shards", f"expected {n_ranks}:", "merge_io_state", "'exclude': ['io_state']"):
        assert text in str(caught.value)
    assert dataset.position == 5
    with pytest.raises(StateMismatchError, match=r"Failing\.merge_io_state refused it: RuntimeError: cannot"):
        loading(url, Failing(), n_ranks)
    assert len(loading(url, dataset, exclude=["io_state"])) == 20
    assert dataset.position == 5


def test_ranks_agree_on_the_checkpoints_of_a_bank_and_rank_0_logs_it(tmp_path, caplog):
    caplog.set_level(logging.INFO, "recckpt")
    url = save_on_two_ranks(tmp_path / "a")
    single = table("t")
    run(tmp_path / "b", single, optimizer="adam", top=nn.Linear(1, 1)).load_by_config([{"path": url}])
    caplog.clear()

    def work(rank, connect):
        t = sliced(rank, 2)
        saver = connect(run(tmp_path / "own", t, optimizer="adam", top=nn.Linear(1, 1)))
        manager = CheckpointManager(saver, 1, shard_id=rank, shard_num=2)
        entries = [{"path": url, "is_dynamic": True}]
        if rank == 1:  # which sees a directory that is not up to date
            entries[0] = {**entries[0], "path": str(tmp_path / "stale")}
        report = manager.load_model_bank(entries)
        assert manager.reload_dynamic() == []
        manager.step()
        return values_of(t), slots_of(t), report.sources

    (one, _, sources), (two, _, _) = on_ranks(2, work)
    assert sources == (f"{url}/c",)
    assert {**one, **two} == values_of(single)
    assert len(one) + len(two) == 20
    summaries = [record for record in caplog.records if record.getMessage().startswith(f"{url}/c: 1 table")]
    assert len(summaries) == 1


def test_a_problem_on_one_rank_is_raised_on_all_and_nothing_changes(tmp_path):
    url = save_on_two_ranks(tmp_path / "a")

    def work(rank, connect):
        t = table("t", slice=gen_slice(rank, 2), dim=4 + rank)
        saver = connect(run(tmp_path / "own", t, top=nn.Linear(1, 1)))
        manager = CheckpointManager(saver, 1, shard_id=rank, shard_num=2)
        with pytest.raises(StateMismatchError, match="t@embedding"):
            manager.load_model_bank([{"path": url}])
        return True

    assert on_ranks(2, work) == [True, True]
