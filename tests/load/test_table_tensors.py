"""Checkpoints of live tables in a process that has their weights as dense tensors."""

import pytest
import torch
from support.builders import flip_bit
from support.live_runs import DIM, N_ROWS, OPTIMIZERS, Run, assert_same
from support.sweeps import mostly_slow
from torch import nn, optim

from recckpt import CheckpointManager, Saver
from recckpt.errors import CorruptCheckpointError, StateMismatchError
from recckpt.live import live_tables
from recckpt.sparse import HashTable


def saved(tmp_path, rule="SparseAdam", **options):
    """Return a run whose live tables were saved at step 3, as a delta."""
    run = Run(tmp_path / "run", rule, seed=1, deltas=True, max_keep=None, **options)
    run.saver.save("ckpt_0", step=0)
    run.row_optim.param_groups[0]["lr"] = 0.2
    run.train(3)
    run.saver.save("ckpt_3", step=3)
    return run


@mostly_slow()
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_a_run_without_live_tables_goes_on_from_a_checkpoint_of_them_bit_for_bit(tmp_path, rule):
    run, other = saved(tmp_path, rule), Run(tmp_path / "other", rule)
    other.train(2)
    assert CheckpointManager(other.dense_saver(tmp_path / "run"), 10).restore() == 3
    assert_same(other.state(), run.state())
    other.random.set_state(run.random.get_state())
    for each in (run, other):
        each.train(3)
    assert_same(other.state(), run.state())


def test_a_plan_says_which_tables_become_tensors(tmp_path):
    saved(tmp_path)
    plan = Run(tmp_path / "other", "SparseAdam").dense_saver(tmp_path / "b").plan({"path": str(tmp_path / "run")})
    items = {item.name.text: item for item in plan.items}
    assert items["users.weight"].conversion == "rows of table 'users' -> dense tensor"
    assert items["users.weight@row_optim"].conversion == "rows of table 'users' -> state of dense tensor"
    assert "not in the model" not in str(plan)


def test_a_rename_says_which_table_a_tensor_is_of(tmp_path):
    run = saved(tmp_path)
    model = nn.ModuleDict({"people": nn.Embedding(N_ROWS, DIM)})
    saver = Saver(model, output_dir=str(tmp_path / "new"))
    saver.load_by_config({"path": str(tmp_path / "run"), "oname": {"people.weight": "users"}})
    assert torch.equal(model["people"].weight, run.model.users.weight)


@pytest.mark.parametrize("of", [optim.Adagrad, optim.AdamW])
def test_an_optimizer_that_trains_all_of_the_model_gets_the_states_of_the_tables_back(tmp_path, of):
    def made():
        torch.manual_seed(0)
        model = nn.ModuleDict({"users": nn.Embedding(N_ROWS, DIM), "top": nn.Linear(DIM, 1)})
        return model, of(model.parameters(), lr=0.1)

    model, optimizer = made()
    saver = Saver(model, output_dir=str(tmp_path), tables=live_tables(model, optimizer, min_rows=1))
    saver.register_for_checkpointing("optim", optimizer)
    model["top"](model["users"](torch.tensor([1, 2]))).square().sum().backward()
    optimizer.step()
    saver.save("a")
    other, other_optimizer = made()
    saver = Saver(other, output_dir=str(tmp_path))
    saver.register_for_checkpointing("optim", other_optimizer)
    saver.load()
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert_same(other_optimizer.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("is_first", [True, False])
def test_a_tied_weight_gets_its_rows_back_under_each_of_its_names(tmp_path, is_first):
    def made(*, is_first):
        modules = {"word": nn.Embedding(N_ROWS, DIM), "head": nn.Linear(DIM, N_ROWS, bias=False)}
        model = nn.ModuleDict(modules if is_first else dict(reversed(modules.items())))
        model["head"].weight = model["word"].weight
        return model, optim.Adam(model["word"].parameters())

    def trained(model, optimizer):
        model["head"](model["word"](torch.tensor([1, 2]))).square().sum().backward()
        optimizer.step()

    model, optimizer = made(is_first=True)
    trained(model, optimizer)
    Saver(model, output_dir=str(tmp_path), tables=live_tables(model, optimizer, min_rows=1)).save("a")
    other, other_optimizer = made(is_first=is_first)
    saver = Saver(other, output_dir=str(tmp_path))
    saver.register_for_checkpointing("row_optim", other_optimizer)
    saver.load()
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert_same(other_optimizer.state_dict()["state"], optimizer.state_dict()["state"])


def test_moments_of_another_class_start_fresh(tmp_path):
    saved(tmp_path, "Adagrad")
    other = Run(tmp_path / "other", "Adam")
    report = other.dense_saver(tmp_path / "run").load()
    assert "row_optim: users.weight" in report.fresh_parameters
    assert other.row_optim.param_groups[0]["lr"] == 0.1


def test_a_table_whose_ids_are_not_row_numbers_is_refused_before_anything_changes(tmp_path):
    ours = nn.ModuleDict({"users": HashTable(DIM, name="users")})
    ours["users"](torch.arange(N_ROWS) + 1)
    Saver(ours, output_dir=str(tmp_path / "ours")).save("a")
    run = Run(tmp_path / "run")
    before = run.state()
    with pytest.raises(StateMismatchError, match=r"'users@id': found 60, expected the numbers of 60 rows"):
        run.dense_saver(tmp_path / "b").load_by_config({"path": str(tmp_path / "ours")})
    assert_same(run.state(), before)


def test_a_table_of_another_size_is_not_taken_for_the_tensor(tmp_path):
    saved(tmp_path)
    model = nn.ModuleDict({"users": nn.Embedding(N_ROWS + 1, DIM)})
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    saver = Saver(model, output_dir=str(tmp_path / "run"))
    saver.register_for_checkpointing("row_optim", optimizer)
    with pytest.raises(StateMismatchError, match=r"(?s)missing.*'users\.weight'.*not in the model.*'users'"):
        saver.load()


def test_a_damaged_table_is_refused_before_anything_changes(tmp_path):
    saved(tmp_path)
    run = Run(tmp_path / "other", "SparseAdam")
    [part] = (tmp_path / "run" / "ckpt_3").rglob("*.arrow")
    flip_bit(part, part.stat().st_size // 2)
    before = run.state()
    with pytest.raises(CorruptCheckpointError, match="checksum"):
        run.dense_saver(tmp_path / "b").load(str(tmp_path / "run" / "ckpt_3"), direct_path=True)
    assert_same(run.state(), before)
