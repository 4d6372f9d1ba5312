"""A load of dense state is all or nothing, whatever the model does with it."""

import numpy as np
import pytest
import torch
from support.builders import frozen
from support.forked import outcomes
from support.sweeps import mostly_slow
from torch import nn

from recckpt import Saver
from recckpt.errors import LiveTableError, StateMismatchError
from recckpt.live import live_tables
from recckpt.sparse import HashTable, SparseAdamW


class Refusing(nn.Module):
    """Gives extra state, and refuses to take it."""

    def __init__(self, refuses=False):
        super().__init__()
        self.weight, self.refuses, self.extra = nn.Parameter(torch.zeros(2)), refuses, 0

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        if self.refuses and state and type(self) is Refusing:
            raise KeyError("no such state")
        self.extra = state


def hooked(refuses):
    module = Refusing()
    if refuses:
        module.register_load_state_dict_post_hook(lambda module, keys: 1 / 0)
    return module


class Overriding(Refusing):
    def load_state_dict(self, *args, **kwargs):
        super().load_state_dict(*args, **kwargs)
        if self.refuses:
            raise OSError("not today")


def run(tmp_path, module, value, n_rows):
    """Return a run of a table, layers and an optimizer, all of that value."""
    table = HashTable(2, name="t")
    if n_rows:
        table.insert(torch.arange(n_rows), torch.full((n_rows, 2), value))
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "own": module, "t": table, "last": nn.Linear(2, 2)})
    dense = [parameter for parameter in model.parameters() if parameter.numel()]
    optim, sparse = torch.optim.SGD(dense, lr=value, momentum=0.5), SparseAdamW([table], lr=value)
    module.extra = value
    with torch.no_grad():
        for parameter in dense:
            parameter.fill_(value)
            parameter.grad = torch.zeros_like(parameter)
    optim.step()
    saver = Saver(model, sparse, output_dir=str(tmp_path))
    saver.register_for_checkpointing("optim", optim)
    return saver, optim


@pytest.mark.parametrize("n_rows", [0, 3], ids=["no rows", "rows"])
@pytest.mark.parametrize("make", [Refusing, hooked], ids=["extra state", "hook"])
def test_what_a_model_refuses_leaves_all_as_it_was(tmp_path, make, n_rows):
    run(tmp_path, make(refuses=False), 1.0, 5)[0].save("c")
    saver, optim = run(tmp_path, make(refuses=True), 2.0, n_rows)
    before = frozen(saver), optim.state_dict()["param_groups"]
    with pytest.raises(StateMismatchError, match=r"refused it: (KeyError|ZeroDivisionError)"):
        saver.load()
    assert (frozen(saver), optim.state_dict()["param_groups"]) == before
    assert saver.loader.model["own"].extra == 2.0


def test_a_model_that_overrides_its_load_and_refuses_is_as_it_was(tmp_path):
    Saver(Overriding(refuses=False), output_dir=str(tmp_path)).save("c")
    model = Overriding(refuses=True)
    model.extra = 2.0
    model.weight.data.fill_(2.0)
    with pytest.raises(StateMismatchError, match="refused it: OSError: not today"):
        Saver(model, output_dir=str(tmp_path)).load()
    assert (model.weight.tolist(), model.extra) == ([2.0, 2.0], 2.0)


def with_buffer(make):
    model = nn.BatchNorm1d(2)
    model.register_buffer("own", make())
    return model


def in_inference(shape, value):
    with torch.inference_mode():
        return torch.full(shape, value)


BUFFERS = {
    "expanded": lambda value: torch.full((1, 3), value).expand(2, 3),
    "of inference": lambda value: in_inference((2, 3), value),
    "of inference, expanded": lambda value: in_inference((1, 3), value).expand(2, 3),
}


@pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS.keys())
def test_buffers_that_torch_does_not_fill_are_loaded(tmp_path, make):
    Saver(with_buffer(lambda: make(1.0)), output_dir=str(tmp_path)).save("c")
    model = with_buffer(lambda: make(2.0))
    Saver(model, output_dir=str(tmp_path)).load()
    assert torch.equal(model.own, torch.ones(2, 3))


@pytest.mark.parametrize("make", [lambda: nn.Parameter(torch.ones(1).expand(3)), nn.Parameter])
def test_parameters_that_torch_does_not_fill_are_loaded_where_their_optimizer_knows_them(tmp_path, make):
    def made(value):
        model = nn.Module()
        with torch.inference_mode(make is nn.Parameter):
            model.weight = nn.Parameter(
                torch.full((1,), value).expand(3) if make is not nn.Parameter else torch.full((3,), value)
            )
        return model

    Saver(made(1.0), output_dir=str(tmp_path)).save("c")
    model = made(2.0)
    weight = model.weight
    Saver(model, output_dir=str(tmp_path)).load()
    assert model.weight is weight
    assert model.weight.tolist() == [1.0] * 3


def test_a_load_in_inference_mode_makes_state_that_trains(tmp_path):
    run(tmp_path, Refusing(), 1.0, 5)[0].save("c")
    saver, optim = run(tmp_path, Refusing(), 2.0, 0)
    with torch.inference_mode():
        saver.load()
    assert not any(values["momentum_buffer"].is_inference() for values in optim.state.values())
    optim.step()
    assert len(saver.loader.model["t"]) == 5


def test_a_lazy_module_is_loaded_before_its_first_batch(tmp_path):
    def made():
        model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 1))
        saver, optim = Saver(model, output_dir=str(tmp_path)), torch.optim.Adam(model.parameters())
        saver.register_for_checkpointing("optim", optim)
        return saver, model, optim

    saver, model, optim = made()
    model(torch.ones(1, 4)).sum().backward()
    optim.step()
    saver.save("c")
    other_saver, other, other_optim = made()
    other_saver.load()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    batch = torch.ones(3, 4)
    assert torch.equal(model(batch), other(batch))
    for one, its_optim in ((model, optim), (other, other_optim)):
        its_optim.zero_grad()
        one(batch).sum().backward()
        its_optim.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def resumed(case):
    """Save and load a frozen embedding in memory that is mapped for reading; return what is refused."""
    path, is_live, differs = case
    rows = np.memmap(path / "rows", np.float32, "w+", shape=(2000, 4))
    rows[:] = 1

    def made():
        weight = torch.from_numpy(np.memmap(path / "rows", np.float32, "r", shape=(2000, 4)))
        model = nn.ModuleDict({"frozen": nn.Embedding.from_pretrained(weight), "top": nn.Linear(4, 1)})
        return model, Saver(model, output_dir=str(path), tables=live_tables(model) if is_live else None)

    with made()[1] as saver:
        saver.save("c")
    rows[7] = 2 if differs else 1
    model, saver = made()
    before = model["top"].weight.clone()
    try:
        saver.load()
    except (LiveTableError, StateMismatchError) as error:
        assert torch.equal(model["top"].weight, before)
        return str(error)
    assert not torch.equal(model["top"].weight, before)
    return "loaded"


@mostly_slow()
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("is_live", [False, True], ids=["dense", "live"])
def test_a_frozen_embedding_in_memory_that_is_read_only_is_left_or_named(tmp_path, is_live):
    (tmp_path / "other").mkdir()
    same, other = outcomes(resumed, [(tmp_path, is_live, False), (tmp_path / "other", is_live, True)])
    assert same == "loaded"
    assert "frozen" in other
    assert "read-only" in other
