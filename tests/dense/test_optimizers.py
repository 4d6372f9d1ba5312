"""Dense optimizers find their state again by the names of the parameters."""

import copy
from functools import partial

import pytest
import torch
from support.builders import frozen
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.dense.optimizers import NAMES, SHAPES, NamedOptimizer, is_named, states_by_name
from recckpt.errors import StateMismatchError
from recckpt.live import live_tables
from recckpt.sparse import HashTable, SparseAdam

OPTIMIZERS = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9, centered=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
}
any_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def layers(**sizes):
    return nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})


def trained(model, optimizer, steps=3, seed=0):
    """Give every parameter a state of its own."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        optimizer.step()
    return optimizer


def named(optimizer, model):
    return NamedOptimizer(optimizer, partial(model.named_parameters, remove_duplicate=False))


def states(optimizer, model):
    """Return the state of each parameter by its name."""
    return {name: frozen(optimizer.state.get(parameter, {})) for name, parameter in model.named_parameters()}


def loaded(saved, model, optimizer):
    """Give an optimizer what was saved of its parameters, by their names; return those that start fresh."""
    wrapped, saved = named(optimizer, model), copy.deepcopy(saved)
    if not is_named(saved):
        wrapped.load_state_dict(saved)
        return []
    shapes = {name: tuple(parameter.shape) for name, parameter in wrapped.parameters.items()}
    found = {name: state for name, (shape, state) in states_by_name(saved).items() if shape == shapes.get(name)}
    wrapped.load_state_dict(wrapped.composed({name: found.get(name, {}) for name in shapes}, saved["param_groups"]))
    return [name for name in shapes if name not in found]


@any_optimizer
def test_the_same_model_takes_back_the_same_state(make):
    model = layers(a=(2, 3), b=(3, 1))
    optimizer = trained(model, make(model.parameters()))
    saved = named(optimizer, model).state_dict()
    twin = layers(a=(2, 3), b=(3, 1))
    twin_optimizer = make(twin.parameters())
    assert loaded(saved, twin, twin_optimizer) == []
    assert frozen(twin_optimizer.state_dict()) == frozen(optimizer.state_dict())


@any_optimizer
def test_layers_may_be_added_removed_and_reordered(make):
    model = layers(a=(2, 3), b=(3, 3), c=(3, 1))
    optimizer = trained(model, make(model.parameters()))
    other = layers(c=(3, 1), new=(3, 3), a=(2, 3))
    other_optimizer = make(other.parameters())
    fresh = loaded(named(optimizer, model).state_dict(), other, other_optimizer)
    assert fresh == ["new.weight", "new.bias"]
    before, after = states(optimizer, model), states(other_optimizer, other)
    assert {name: after[name] for name in ("a.weight", "a.bias", "c.weight", "c.bias")} == {
        name: before[name] for name in ("a.weight", "a.bias", "c.weight", "c.bias")
    }
    assert after["new.weight"] == after["new.bias"] == {}
    trained(other, other_optimizer)  # and it goes on


def test_a_parameter_of_another_shape_starts_fresh():
    model, other = layers(a=(2, 3), b=(3, 1)), layers(a=(2, 5), b=(3, 1))
    optimizer = trained(model, torch.optim.Adafactor(model.parameters()))
    other_optimizer = torch.optim.Adafactor(other.parameters())
    fresh = loaded(named(optimizer, model).state_dict(), other, other_optimizer)
    assert fresh == ["a.weight", "a.bias"]
    assert states(other_optimizer, other)["b.weight"] == states(optimizer, model)["b.weight"]


def test_what_never_had_a_gradient_has_no_state_and_is_not_fresh_and_a_load_forgets_what_there_was():
    model = layers(a=(2, 3))
    saved = named(torch.optim.Adam(model.parameters()), model).state_dict()
    for optimizer in (torch.optim.Adam(model.parameters()), trained(model, torch.optim.Adam(model.parameters()))):
        assert loaded(saved, model, optimizer) == []
        assert states(optimizer, model) == {"a.weight": {}, "a.bias": {}}


# param groups


def test_groups_may_be_reordered_split_and_merged():
    model = layers(a=(2, 3), b=(3, 1))
    a, b = model["a"], model["b"]
    groups = [{"params": a.parameters(), "lr": 0.1}, {"params": b.parameters(), "lr": 0.2}]
    optimizer = trained(model, torch.optim.AdamW(groups, weight_decay=0.5))
    saved = named(optimizer, model).state_dict()
    for build, rates in [
        ([{"params": b.parameters()}, {"params": a.parameters()}], [0.2, 0.1]),
        ([{"params": [a.weight]}, {"params": [b.weight, b.bias]}, {"params": [a.bias]}], [0.1, 0.2, 0.1]),
        ([{"params": [a.weight, b.weight, b.bias]}], [0.2]),
    ]:
        other = torch.optim.AdamW(build)
        assert loaded(saved, model, other) == []
        assert [group["lr"] for group in other.param_groups] == rates
        assert all(group["weight_decay"] == 0.5 for group in other.param_groups)
        names = {name for name, state in states(other, model).items() if state}
        assert {name: states(optimizer, model)[name] for name in names} == {n: states(other, model)[n] for n in names}


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_live_table_that_is_listed_twice_as_a_tied_weight_leaves_nothing_behind_in_the_state(tmp_path):
    def made():
        model = nn.ModuleDict({"words": nn.Embedding(20, 3), "top": nn.Linear(3, 20)})
        model["top"].weight = model["words"].weight
        optimizer = trained(model, torch.optim.Adam([*model["words"].parameters(), *model["top"].parameters()]))
        saver = Saver(model, output_dir=tmp_path, tables=live_tables(model, optimizer, min_rows=1))
        saver.register_for_checkpointing("optim", optimizer)
        return saver, optimizer

    made()[0].save("1")
    saver, optimizer = made()
    saver.load()
    assert all(isinstance(key, nn.Parameter) for key in optimizer.state)


class Slow(torch.optim.Optimizer):
    """A wrapper whose state has a form of its own, as Lookahead of pytorch-optimizer."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.optimizer, self.count = optimizer, 0
        self.param_groups = optimizer.param_groups

    def step(self):
        self.optimizer.step()
        self.count += 1

    def state_dict(self):
        return {"count": self.count, "inner": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.count = state["count"]
        self.optimizer.load_state_dict(state["inner"])


def test_a_wrapper_with_a_form_of_its_own_around_the_optimizer_of_a_live_table_is_saved_whole(tmp_path):
    def made(seed):
        model = nn.ModuleDict({"words": nn.Embedding(20, 3), "top": nn.Linear(3, 20)})
        optimizer = trained(model, Slow(torch.optim.Adam(model.parameters())), seed=seed)
        saver = Saver(model, output_dir=tmp_path, tables=live_tables(model, optimizer, min_rows=1))
        saver.register_for_checkpointing("optim", optimizer)
        return saver, optimizer, model

    saver, old, model = made(0)
    saver.save("1")
    other, new, twin = made(1)
    other.load()
    assert (new.count, states(new.optimizer, twin)) == (old.count, states(old.optimizer, model))


def test_a_group_of_new_parameters_keeps_its_own_settings():
    model = layers(a=(2, 3))
    saved = named(trained(model, torch.optim.Adam(model.parameters(), lr=0.1)), model).state_dict()
    other = layers(a=(2, 3), new=(1, 1))
    groups = [{"params": other["new"].parameters(), "lr": 0.7}, {"params": other["a"].parameters()}]
    optimizer = torch.optim.Adam(groups, lr=0.3)
    loaded(saved, other, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.7, 0.1]


def test_what_a_scheduler_needs_to_go_on_comes_back():
    model = layers(a=(2, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(3):
        trained(model, optimizer, 1)
        scheduler.step()
    saved = named(optimizer, model).state_dict()
    other = torch.optim.SGD(model.parameters(), lr=9.0)
    loaded(saved, model, other)
    again = torch.optim.lr_scheduler.StepLR(other, 1, gamma=0.5, last_epoch=3)
    assert (other.param_groups[0]["initial_lr"], again.get_last_lr()) == (1.0, [0.0625])


# other formats


def test_the_names_stand_beside_torchs_own_indices():
    model = layers(a=(2, 3))
    optimizer = trained(model, torch.optim.Adam(model.parameters()))
    saved = named(optimizer, model).state_dict()
    assert saved["param_groups"][0][NAMES] == ["a.weight", "a.bias"]
    assert saved["param_groups"][0][SHAPES] == [[3, 2], [3]]
    plain = torch.optim.Adam(model.parameters())
    plain.load_state_dict(saved)
    assert states(plain, model) == states(optimizer, model)
    assert loaded(named(plain, model).state_dict(), model, torch.optim.Adam(model.parameters())) == []


@any_optimizer
def test_torchs_own_format_loads(make):
    model = layers(a=(2, 3), b=(3, 1))
    optimizer = trained(model, make(model.parameters()))
    other = make(model.parameters())
    assert loaded(optimizer.state_dict(), model, other) == []
    assert frozen(other.state_dict()) == frozen(optimizer.state_dict())
    fewer = make(model["a"].parameters())
    with pytest.raises(ValueError, match="parameter group"):
        named(fewer, model).load_state_dict(optimizer.state_dict())


def test_an_optimizer_made_of_named_parameters_is_like_any_other():
    model, other = layers(a=(2, 3), b=(3, 1)), layers(b=(3, 1), a=(2, 3))
    optimizer = trained(model, torch.optim.Adam(model.named_parameters()))
    torchs_own = optimizer.state_dict()
    saved = named(optimizer, model).state_dict()
    other_optimizer = torch.optim.Adam(other.named_parameters())
    assert loaded(saved, other, other_optimizer) == []
    assert states(other_optimizer, other) == states(optimizer, model)
    assert other_optimizer.param_groups[0]["param_names"] == ["b.weight", "b.bias", "a.weight", "a.bias"]
    again = torch.optim.Adam(model.named_parameters())
    loaded(torchs_own, model, again)
    assert states(again, model) == states(optimizer, model)
    # names of a part of the model, which the saver knows by longer ones
    part = trained(model, torch.optim.Adam(model["a"].named_parameters()))
    assert named(part, model).state_dict()["param_groups"][0][NAMES] == ["a.weight", "a.bias"]


def test_parameters_that_the_model_does_not_have_go_by_their_place():
    model, loss = layers(a=(2, 3)), nn.Linear(2, 2)
    both = nn.ModuleList([model, loss])
    optimizer = trained(both, torch.optim.Adam([*model.parameters(), *loss.parameters()]))
    other = torch.optim.Adam([*model.parameters(), *loss.parameters()])
    assert loaded(named(optimizer, model).state_dict(), model, other) == []
    assert states(other, both) == states(optimizer, both)


# through the saver


def saver_of(url, model, optimizer, name="opt"):
    saver = Saver(model, output_dir=str(url))
    saver.register_for_checkpointing(name, optimizer)
    return saver


def test_what_starts_fresh_is_in_the_report_and_in_the_log(tmp_path, caplog):
    model, other = layers(a=(2, 3), b=(3, 1)), layers(b=(3, 1), new=(4, 4))
    optimizer = trained(model, torch.optim.Adam(model.parameters()))
    saver_of(tmp_path, model, optimizer).save("c")
    other_optimizer = torch.optim.Adam(other.parameters())
    report = saver_of(tmp_path, other, other_optimizer).load(load_conf={})
    assert report.fresh_parameters == ("opt: new.bias", "opt: new.weight")
    assert f"from scratch: 'new.bias', 'new.weight': not in {tmp_path}/c" in caplog.text
    assert states(other_optimizer, other)["b.weight"] == states(optimizer, model)["b.weight"]


def test_a_wrapped_model_has_the_names_of_the_bare_one(tmp_path):
    model = layers(a=(2, 3))
    optimizer = trained(model, torch.optim.Adam(model.parameters()))
    saver_of(tmp_path, nn.DataParallel(model), optimizer).save("c")
    other = torch.optim.Adam(model.parameters())
    assert saver_of(tmp_path, model, other).load().fresh_parameters == ()
    assert states(other, model) == states(optimizer, model)


def test_another_kind_of_state_is_refused_and_nothing_changes(tmp_path):
    model = layers(a=(2, 3))
    saver = Saver(model, output_dir=str(tmp_path))
    saver.register_for_checkpointing("opt", 3)
    saver.save("c")
    optimizer = trained(model, torch.optim.Adam(model.parameters()))
    before = frozen(optimizer.state_dict())
    with pytest.raises(StateMismatchError, match="'opt'"):
        saver_of(tmp_path, model, optimizer).load()
    assert frozen(optimizer.state_dict()) == before


def test_an_optimizer_of_tables_is_given_to_the_saver_and_not_registered(tmp_path):
    table = HashTable(2, name="t")
    optimizer = SparseAdam([table])
    with pytest.raises(ValueError, match=r"'opt' is an optimizer of tables, .* pass it to Saver"):
        saver_of(tmp_path, table, optimizer)
    saver = Saver(nn.ModuleDict({"t": table}), optimizer, output_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"'opt' is an optimizer of tables, which the saver already saves"):
        saver.register_for_checkpointing("opt", optimizer)


def test_a_run_resumes_with_a_layer_more(tmp_path):
    model = layers(a=(2, 3))
    optimizer = torch.optim.Adam(model.parameters())
    manager = CheckpointManager(saver_of(tmp_path, model, optimizer), 1)
    trained(model, optimizer)
    manager.step()
    other = layers(a=(2, 3), b=(3, 1))
    other_optimizer = torch.optim.Adam(other.parameters())
    resumed = CheckpointManager(saver_of(tmp_path, other, other_optimizer), 1)
    assert resumed.restore(load_conf={"strict": False}) == 1
    assert states(other_optimizer, other)["a.weight"] == states(optimizer, model)["a.weight"]
    assert states(other_optimizer, other)["b.weight"] == {}


def test_a_load_does_not_ask_an_optimizer_for_its_state():
    class Unasked(torch.optim.Adam):
        def state_dict(self):
            raise AssertionError("asked for its state")

    layer = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    saved = NamedOptimizer(optimizer, layer.named_parameters).state_dict()
    unasked = Unasked(layer.parameters())
    NamedOptimizer(unasked, layer.named_parameters).load_state_dict(saved)
    assert all(unasked.state[parameter]["exp_avg"].any() for parameter in layer.parameters())
