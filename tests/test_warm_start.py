"""Warm start: state of other runs, before the own run begins or resumes."""

import pytest
import torch
from builders import Run, state_of, table_state, tree

from recckpt import CheckpointManager, CheckpointNotFoundError, LoadConfError, Saver, StateMismatchError
from recckpt.sparse import HashTable


@pytest.fixture
def bank(tmp_path):
    """Two runs of other seeds, each with a checkpoint."""
    runs = [Run(tmp_path / name, interval=5, seed=seed) for seed, name in ((11, "first"), (12, "second"))]
    for n_steps, run in zip((5, 10), runs, strict=True):
        run.train(n_steps)
    return runs


def test_later_entries_win_over_earlier_ones(tmp_path, bank):
    first, second = bank
    run = Run(tmp_path / "own", seed=1)
    run.manager.load_model_bank(
        [{"path": first.saver.output_dir}, {"path": second.saver.output_dir, "load": ["sparse", "sparse_opt"]}]
    )
    own = state_of(run)
    for name in ("item", "user/1", "sparse optimizer"):
        assert own[name] == state_of(second)[name] != state_of(first)[name]
    for name in ("dense", "dense optimizer"):
        assert own[name] == state_of(first)[name] != state_of(second)[name]


def test_a_warm_start_is_no_resume(tmp_path, bank):
    run = Run(tmp_path / "own", seed=1)
    before = state_of(run)
    run.manager.load_model_bank([{"path": bank[1].saver.output_dir}])
    assert run.manager.global_step == 0
    assert run.stream.position == 0, "dataset positions of other runs are left out"
    assert state_of(run)["rng"] == before["rng"]
    assert run.manager.save().ckpt_id == "ckpt_0"


def test_dataset_positions_are_taken_where_they_are_named(tmp_path, bank):
    run = Run(tmp_path / "own", seed=1)
    run.manager.load_model_bank([{"path": bank[1].saver.output_dir, "load": ["io_state"]}])
    assert run.stream.position == 10


def test_the_own_run_wins_over_the_bank(tmp_path, bank):
    expected = state_of(Run(tmp_path / "own", interval=5).train(5))
    run = Run(tmp_path / "own", interval=5, seed=1)
    run.manager.load_model_bank([{"path": bank[0].saver.output_dir}])
    assert run.manager.restore() == 5
    assert state_of(run) == expected


def test_the_bank_stays_where_the_own_run_has_nothing(tmp_path, bank):
    run = Run(tmp_path / "own", interval=5, seed=1)
    run.manager.load_model_bank([{"path": bank[0].saver.output_dir}])
    assert run.manager.restore() == 0
    assert table_state(run.model.items) == table_state(bank[0].model.items)


def test_the_bank_is_read_only(tmp_path, bank):
    before = tree(tmp_path / "first")
    run = Run(tmp_path / "own", interval=1)
    run.manager.load_model_bank([{"path": bank[0].saver.output_dir}])
    run.train(2)
    assert tree(tmp_path / "first") == before


def test_all_entries_are_checked_before_the_first_is_loaded(tmp_path, bank):
    run = Run(tmp_path / "own", seed=1)
    before = state_of(run)
    good = {"path": bank[0].saver.output_dir}
    with pytest.raises(LoadConfError, match="did you mean 'exclude'"):
        run.manager.load_model_bank([good, {**good, "exlude": ["dense"]}])
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        run.manager.load_model_bank([good, {"path": str(tmp_path / "nowhere")}])
    assert state_of(run) == before
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("conf", [{"path": "x"}, "x", None, 3])
def test_a_bank_is_a_list(tmp_path, conf):
    with pytest.raises(LoadConfError, match="expected a list of dicts"):
        Run(tmp_path).manager.load_model_bank(conf)


def test_an_empty_bank_loads_nothing(tmp_path):
    run = Run(tmp_path)
    before = state_of(run)
    run.manager.load_model_bank([])
    assert state_of(run) == before


def test_one_entry_may_be_for_one_table(tmp_path, bank):
    """Until names can be given, a model of fewer tables takes its part with ``strict`` off."""
    table = HashTable((4,), name="item")
    saver = Saver(torch.nn.ModuleDict({"t": table}), output_dir=str(tmp_path / "own"))
    manager = CheckpointManager(saver, 1)
    entry = {"path": bank[0].saver.output_dir, "load": ["sparse"]}
    with pytest.raises(StateMismatchError, match="user/1"):
        manager.load_model_bank([entry])
    manager.load_model_bank([{**entry, "strict": False}])
    assert table_state(table)["embedding"] == table_state(bank[0].model.items)["embedding"]
