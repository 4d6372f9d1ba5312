"""Calls that programs for RecIS make, and what they do here."""

import logging

import numpy as np
import pytest
import torch
from torch import nn

from recckpt import CheckpointManager, CheckpointReader, Saver
from recckpt.errors import CheckpointExistsError
from recckpt.sparse import HashTable, SparseAdam, SparseAdamW


def run(path, *, names=("user", "item"), **options):
    model = nn.ModuleDict({name: HashTable(3, name=name) for name in names})
    optimizer = SparseAdam(list(model.values()))
    return model, optimizer, Saver(model, optimizer, output_dir=path, **options)


def rows(table):
    """Return the embeddings in the order of their ids."""
    return table.embeddings()[table.ids().argsort()]


def train(model, optimizer, n_rows=5):
    for table in model.values():
        table(torch.arange(n_rows)).sum().backward()
    optimizer.step()


@pytest.fixture
def saved(tmp_path):
    model, optimizer, saver = run(tmp_path / "a", deltas=True)
    train(model, optimizer)
    saver.save("a")
    train(model, optimizer, 9)  # a delta on it
    saver.save("b")
    return tmp_path / "a", model


def test_load_and_exclude_may_be_sets(tmp_path, saved):
    path, before = saved
    model, _, saver = run(tmp_path / "b")
    names = {"load": {"user", "item@embedding", "item@id"}, "exclude": {"user@*avg*"}}
    saver.load_by_config([{"path": str(path), **names}])
    for name, table in model.items():
        assert torch.equal(rows(table), rows(before[name]))
        assert not table.slots["sparse_adam_exp_avg"].any()


def test_none_for_a_bank_loads_nothing_and_is_no_obstacle_to_a_resume(tmp_path, saved):
    path, before = saved
    model, _, saver = run(tmp_path / "b")
    assert saver.load_by_config(None).sources == saver.plan(None).sources == ()
    CheckpointManager(saver, save_interval=10).load_model_bank(None)
    assert len(model["user"]) == 0
    resumed, _, saver = run(path)
    CheckpointManager(saver, save_interval=10).load_model_bank(None)
    assert torch.equal(rows(resumed["user"]), rows(before["user"]))


def test_none_for_a_direct_path_loads_nothing_and_says_so(tmp_path, saved, caplog):
    model, _, saver = run(saved[0])
    with caplog.at_level(logging.WARNING, "recckpt"):
        assert saver.load(None, direct_path=True).sources == ()
    assert [record.message for record in caplog.records] == ["from scratch: 'item', 'user': nothing asks for it"]
    assert len(model["user"]) == 0


def test_sync_func_is_called_once_the_checkpoint_is_committed_and_not_after_a_refusal(tmp_path):
    _, _, saver = run(tmp_path)
    seen = []
    saver.save("a", sync_func=lambda: seen.append(CheckpointReader(tmp_path).manifest.ckpt_id))
    assert seen == ["a"]
    with pytest.raises(CheckpointExistsError):
        saver.save("a", sync_func=lambda: seen.append("again"))
    assert seen == ["a"]


def test_a_slot_of_a_table_is_read_by_its_name(saved):
    path, before = saved
    with CheckpointReader(path) as reader:
        ids, names = reader.read_tensor("user@id"), ["embedding", "sparse_adam_exp_avg"]
        vectors, _ = before["user"].lookup(torch.from_numpy(ids))
        assert sorted(ids) == [*range(9)]
        assert np.array_equal(reader.read_tensor("user@embedding"), vectors.numpy())
        for name in names:
            assert reader.tensor_shape(f"user@{name}") == reader.read_tensor(f"user@{name}").shape == (9, 3)
            assert reader.tensor_dtype(f"user@{name}") == "float32"
        with pytest.raises(KeyError, match=r"table 'user' has no slot 'embeding'; .* did you mean 'embedding'"):
            reader.read_tensor("user@embeding")
        with pytest.raises(KeyError, match="no dense tensor 'nobody@embedding'"):
            reader.read_tensor("nobody@embedding")


def test_a_dense_tensor_goes_before_a_slot_of_its_name_and_bfloat16_comes_as_bits(tmp_path):
    model = nn.ModuleDict({"t": HashTable(2, name="t", dtype=torch.bfloat16)})
    model["t"].insert(torch.tensor([7]), torch.tensor([[1.5, -2]], dtype=torch.bfloat16))
    model.register_buffer("t@step", torch.tensor([3]))
    Saver(model, output_dir=tmp_path).save("a")
    with CheckpointReader(tmp_path) as reader:
        assert reader.read_tensor("t@step").tolist() == [3]
        assert reader.read_tensor("t@embedding").tolist() == [[0x3FC0, 0xC000]]


def test_one_slot_is_written_by_id_and_a_delta_has_the_rows(tmp_path):
    model, optimizer, saver = run(tmp_path, names=["user"], deltas=True)
    table, name = model["user"], "sparse_adam_exp_avg"
    train(model, optimizer)
    saver.save("a")
    before = table.embeddings().clone()
    table.set_slot(name, torch.tensor([4, 1, 4]), torch.arange(9.0).view(3, 3))
    assert table.slots[name][table.ids() == 4].tolist() == [[6, 7, 8]], "the last of equal ids"
    assert table.slots[name][table.ids() == 1].tolist() == [[3, 4, 5]]
    assert torch.equal(table.embeddings(), before)
    saver.save("b")
    with CheckpointReader(tmp_path) as reader:
        assert reader.manifest.table("user").delta.upserts == 2
        assert reader.lookup("user", [1], name).values.tolist() == [[3, 4, 5]]
    table.set_slot("embedding", torch.tensor([0]), torch.ones(1, 3))
    assert table.lookup(torch.tensor([0]))[0].tolist() == [[1, 1, 1]]


@pytest.mark.parametrize(
    ("name", "ids", "values", "match"),
    [
        ("no_such", [1], torch.ones(1, 3), "has no slot 'no_such'"),
        ("sparse_adam_exp_avg", [1], torch.ones(2, 3), "expected torch.float32"),
        ("sparse_adam_exp_avg", [1, 77, 78], torch.ones(3, 3), "2 of 3 ids have no row, the first is 77"),
    ],
)
def test_a_slot_that_cannot_be_written_is_refused_and_nothing_has_changed(tmp_path, name, ids, values, match):
    model, optimizer, _ = run(tmp_path, names=["user"])
    train(model, optimizer)
    before = {slot: tensor.clone() for slot, tensor in model["user"].slots.items()}
    with pytest.raises(ValueError, match=match):
        model["user"].set_slot(name, torch.tensor(ids), values)
    assert all(torch.equal(tensor, before[slot]) for slot, tensor in model["user"].slots.items())


def test_add_params_takes_tables_into_the_first_group():
    first, second, third = (HashTable(2, name=name) for name in "abc")
    optimizer = SparseAdamW([{"tables": [first], "lr": 0.5}, {"tables": [second], "lr": 0.25}])
    optimizer.add_params({"c": third})
    assert [group["tables"] for group in optimizer.state_dict()["param_groups"]] == [["a", "c"], ["b"]]
    assert list(third.slots) == list(optimizer.slot_names)
    third(torch.tensor([1])).sum().backward()
    before = third.embeddings().clone()
    optimizer.step()
    assert (before - third.embeddings()).max().item() == pytest.approx(0.5, rel=0.01)  # the lr of the first group
    other = SparseAdamW([{"tables": [third, first]}, {"tables": [second]}])
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match="table 'a' is listed twice"):
        other.add_params([HashTable(2, name="d"), first])
    assert list(other.tables) == ["c", "a", "b"]
