"""A state dict in two halves: tables, and everything else."""

from itertools import product

import pytest
import torch
from support.builders import ClickModel
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from recckpt import CheckpointReader, Saver
from recckpt.recis import filter_out_sparse_param, split_sparse_dense_state_dict
from recckpt.sparse import HashTable
from recckpt.sparse.split import load_dense, parameters_of, state_of


def test_tables_and_tensors_part_ways():
    model = ClickModel()
    sparse, dense = split_sparse_dense_state_dict(model.state_dict())
    assert sparse == {"user/1": model.users, "item": model.items}
    assert set(dense) == {"top.weight", "top.bias"} | {
        f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    assert filter_out_sparse_param(model) == sparse
    assert split_sparse_dense_state_dict(nn.Linear(2, 1).state_dict())[0] == {}
    assert split_sparse_dense_state_dict({}) == ({}, {})
    at_two_places = nn.ModuleDict({"a": model.items, "b": model.items})
    assert split_sparse_dense_state_dict(at_two_places.state_dict())[0] == {"item": model.items}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a.t": HashTable(2, name="t"), "b.t": HashTable(2, name="t")}, r"'t', at 'a\.t' and 'b\.t'"),
        ({"x.w": HashTable(2, name="w"), "w": torch.zeros(1)}, r"'w' is a table, at 'x\.w', and a dense tensor too"),
        *(({"w": torch.zeros(1), key: torch.zeros(1)}, "keys of a state dict are names") for key in (0, None, b"w")),
    ],
)
def test_two_things_of_one_name_and_keys_that_are_no_names_are_refused(state, message):
    with pytest.raises(ValueError, match=message):
        split_sparse_dense_state_dict(state)


class Deep(nn.Module):
    """Two levels, with a table and an own attribute named as a wrapper's."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(
            nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.ModuleDict({"t": HashTable(2, name="t")})
        )
        self.module = nn.Linear(2, 1)


def compile_whole(model):
    return torch.compile(model, backend="eager")


def compile_parts(model):
    model.tower[1][0] = compile_whole(model.tower[1][0])
    model.tower = compile_whole(model.tower)
    return model


def wrap_parts(model):
    model.tower = nn.DataParallel(compile_parts(model).tower)
    model.module = nn.DataParallel(model.module)
    return model


def checkpoint_parts(model):
    """Recompute activations of parts, of which one is compiled and one has another inside."""
    model.tower[1][0] = checkpoint_wrapper(compile_whole(checkpoint_wrapper(model.tower[1][0])))
    model.tower[1] = checkpoint_wrapper(model.tower[1])
    model.tower[2] = checkpoint_wrapper(model.tower[2])
    model.tower = compile_whole(checkpoint_wrapper(model.tower))
    model.module = checkpoint_wrapper(nn.DataParallel(model.module))
    return model


def wrap_all(model):
    return nn.DataParallel(compile_whole(wrap_parts(model)))


WRAPPINGS = [compile_whole, compile_parts, wrap_parts, checkpoint_parts, wrap_all]


@pytest.mark.parametrize("wrap", WRAPPINGS)
def test_wrappers_are_looked_through_however_deep_they_lie(wrap):
    model = Deep()
    tables, dense = state_of(model)
    tensors = {name: parameter for name, parameter in model.named_parameters() if parameter.numel()}
    names = list(tensors)
    wrapped = wrap(model)
    assert state_of(wrapped)[0] == tables
    assert filter_out_sparse_param(wrapped) == tables
    found = state_of(wrapped)[1]
    assert list(found) == list(dense) == names
    assert all(found[name].data_ptr() == dense[name].data_ptr() for name in names)
    assert all(parameter is tensors[name] for name, parameter in parameters_of(wrapped) if parameter.numel())
    load_dense(wrapped, {name: torch.full_like(value, 3) for name, value in dense.items()})
    assert all(bool((parameter == 3).all()) for parameter in tensors.values())


@pytest.mark.parametrize(
    ("saves", "loads"),
    [  # by default: to and from a model without a wrapper, and to what it was
        pytest.param(saves, loads, marks=[] if Deep in (saves, loads) or saves is loads else pytest.mark.slow)
        for saves, loads in product([Deep, *WRAPPINGS], repeat=2)
    ],
)
def test_a_checkpoint_knows_nothing_of_wrappers_and_goes_from_any_to_any(tmp_path, saves, loads):
    def run(wrap):
        inner = Deep()
        parameters = [parameter for parameter in inner.parameters() if parameter.numel()]
        model = inner if wrap is Deep else wrap(inner)
        optim = torch.optim.Adam(parameters)
        saver = Saver(model, output_dir=str(tmp_path))
        saver.register_for_checkpointing("optim", optim)
        return saver, optim, parameters

    saver, optim, parameters = run(saves)
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optim.step()
    saver.save("c")
    assert "tower.1.0.weight" in CheckpointReader(str(tmp_path)).tensor_names()
    other, other_optim, other_parameters = run(loads)
    other.load()
    for one, two in zip(parameters, other_parameters, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(optim.state[one]["exp_avg"], other_optim.state[two]["exp_avg"])
