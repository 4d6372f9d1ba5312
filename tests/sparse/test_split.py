"""A state dict in two halves: tables, and everything else."""

import pytest
import torch
from builders import ClickModel
from torch import nn

from recckpt import filter_out_sparse_param, split_sparse_dense_state_dict
from recckpt.sparse import HashTable
from recckpt.sparse.split import unwrap


def test_tables_and_tensors_part_ways():
    model = ClickModel()
    sparse, dense = split_sparse_dense_state_dict(model.state_dict())
    assert sparse == {"user/1": model.users, "item": model.items}
    assert set(dense) == {"top.weight", "top.bias"} | {
        f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    assert filter_out_sparse_param(model) == sparse


def test_a_model_without_tables_is_all_dense():
    assert split_sparse_dense_state_dict(nn.Linear(2, 1).state_dict())[0] == {}
    assert split_sparse_dense_state_dict({}) == ({}, {})


def test_two_tables_of_one_name_are_refused_by_both_keys():
    model = nn.ModuleDict({"a": HashTable(2, name="t"), "b": HashTable(2, name="t")})
    with pytest.raises(ValueError, match=r"'t', at 'a\.t' and 'b\.t'"):
        split_sparse_dense_state_dict(model.state_dict())


def test_one_table_at_two_places_is_one_table():
    table = HashTable(2, name="t")
    sparse, _ = split_sparse_dense_state_dict(nn.ModuleDict({"a": table, "b": table}).state_dict())
    assert sparse == {"t": table}


def test_a_table_and_a_tensor_of_one_name_are_refused_by_name():
    with pytest.raises(ValueError, match=r"'w' is a table, at 'x\.w', and a dense tensor too"):
        split_sparse_dense_state_dict({"x.w": HashTable(2, name="w"), "w": torch.zeros(1)})


@pytest.mark.parametrize("key", [0, None, b"w"])
def test_a_key_that_is_no_name_is_refused(key):
    with pytest.raises(ValueError, match="keys of a state dict are names"):
        split_sparse_dense_state_dict({"w": torch.zeros(1), key: torch.zeros(1)})


def test_wrappers_are_looked_through_however_deep_they_lie():
    model = nn.Linear(2, 1)
    assert unwrap(model) is model
    assert unwrap(nn.DataParallel(torch.compile(model))) is model
