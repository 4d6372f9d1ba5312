"""What a save takes is checked in full, so that nothing is written of a state that cannot be saved."""

import random

import numpy as np
import pytest
import torch
from support.builders import OPTIMIZERS, ClickModel
from support.foreign import ForeignTable
from torch import nn

from recckpt.dense.registered import extra_registry, io_registry
from recckpt.dense.state_copy import DenseBuffers
from recckpt.errors import StateMismatchError
from recckpt.save.choice import Choice
from recckpt.save.job import Live
from recckpt.save.stage import stage
from recckpt.save.trainers import Trainers
from recckpt.sparse import HashTable
from recckpt.sparse.split import state_of


def staged(model, sparse_optim=None, *, extra=None, state=None, buffers=None, rank=0):
    extra = extra or extra_registry()
    trainers = Trainers(model, sparse_optim, extra, Choice())
    live = Live(model, sparse_optim, extra, io_registry(), Choice(), trainers)
    return stage(live, *state_of(model), state=state, buffers=buffers, rank=rank, digest=None, freeze=None)


def test_rows_and_bytes_are_counted():
    model = ClickModel(dim=4)
    model.users.insert(torch.arange(3), torch.ones(3, 4))
    taken = staged(model, OPTIMIZERS["adam"](model.tables))
    assert taken.sparse_bytes == 3 * (8 + 3 * 16)
    assert {table.name: table.n_rows for table in taken.tables} == {"user/1": 3, "item": 0}


def test_tables_and_large_tensors_are_not_copied():
    model = nn.ModuleDict({"top": nn.Linear(4, 4)})
    assert staged(model).dense["top.weight"].data_ptr() == model["top"].weight.data_ptr()


def test_a_rank_that_is_not_the_first_checks_what_is_the_same_on_all_and_copies_nothing_of_it():
    model, extra, buffers = nn.Linear(1 << 10, 1 << 10), extra_registry(), DenseBuffers()
    extra.add("optim", torch.optim.Adam(model.parameters()))
    model(torch.ones(1 << 10)).sum().backward()
    extra.get("optim").step()

    def taken(rank):
        return staged(model, extra=extra, buffers=buffers, rank=rank)

    elsewhere = taken(1)
    assert (elsewhere.dense, elsewhere.extra, buffers._buffers) == ({}, {}, {})
    assert taken(0).dense["weight"].shape == (1 << 10, 1 << 10)
    assert sum(buffer.nbytes for buffer in buffers._buffers.values()) > 3 * model.weight.nbytes
    model.register_buffer("bad", torch.empty(2, device="meta"))
    with pytest.raises(ValueError, match="bad"):
        taken(1)


def test_taking_the_state_draws_no_random_numbers():
    model = ClickModel()
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    staged(model)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_what_readers_want_to_know_is_kept_as_numbers_and_strings():
    state = {"auc": np.float32(0.5), "loss": torch.tensor(2.0), "n": 3, "note": "x", "done": True, "none": None}
    assert staged(nn.Linear(1, 1), state=state).state == {
        "auc": 0.5,
        "loss": 2.0,
        "n": 3,
        "note": "x",
        "done": True,
        "none": None,
    }


def test_a_metric_that_is_no_number_any_more_does_not_stop_a_save():
    state = {"a": float("nan"), "b": float("inf"), "c": torch.tensor(-float("inf"))}
    assert staged(nn.Linear(1, 1), state=state).state == {"a": "nan", "b": "inf", "c": "-inf"}


@pytest.mark.parametrize("value", [[1j], {"a": b"x"}, object(), torch.ones(2), b"x", 1j])
def test_a_metric_of_another_kind_is_refused_by_name(value):
    with pytest.raises(ValueError, match=r"state\['auc'\]"):
        staged(nn.Linear(1, 1), state={"auc": value})


def test_the_learning_rates_of_the_tables_are_kept_for_readers():
    table = HashTable(2, name="t")
    assert staged(nn.ModuleDict({"t": table}), OPTIMIZERS["sgd"]([table])).state == {"sparse_lr_0": 0.05}


class Holder(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = table

    def state_dict(self, *args, **kwargs):
        return {"table": self.table}


def test_whatever_fits_the_protocol_is_a_table():
    taken = staged(Holder(ForeignTable("foreign", torch.arange(3), torch.ones(3, 2), {"sum": torch.ones(3)})))
    assert [(t.name, t.n_rows, [s.name for s in t.slots]) for t in taken.tables] == [
        ("foreign", 3, ["embedding", "sum"])
    ]


def test_a_foreign_table_that_does_not_fit_the_protocol_is_refused():
    with pytest.raises(StateMismatchError, match="table 'foreign'") as caught:
        staged(Holder(ForeignTable("foreign", torch.arange(3), torch.ones(2, 2))))
    assert list(caught.value.mismatched) == ["embedding"]


def test_a_tensor_that_one_file_cannot_hold_is_refused_by_name():
    model = nn.Module()
    model.register_buffer("odd", torch.ones(2).to_sparse())
    with pytest.raises(ValueError, match="odd"):
        staged(model)
    with pytest.raises(ValueError, match=r"0\.weight: a parameter of a lazy module has no values"):
        staged(nn.Sequential(nn.LazyLinear(1)))
