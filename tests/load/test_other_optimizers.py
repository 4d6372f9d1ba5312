"""An optimizer of another class than the one that saved takes none of its state, and the load says so."""

import logging

import pytest
import torch
from support.bank_runs import run
from support.builders import frozen
from torch import nn

from recckpt import CheckpointManager
from recckpt.load.inventory import list_inventory, listed_inventory

SAID = "from scratch: 'dense.bias@dense_optim', 'dense.weight@dense_optim', 'dense_optim': saved by {}, this one is {}"


def manager_of(url, make):
    saver = run(url, value=1.0, dense=nn.Linear(2, 1))
    saver.optim = make(saver.model.parameters())
    saver.register_for_checkpointing("dense_optim", saver.optim)
    return CheckpointManager(saver, save_interval=1)


def stepped(manager):
    for parameter in manager.saver.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    manager.saver.optim.step()
    manager.step()
    return manager


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.25)


class Slower(torch.optim.Adam):
    """An Adam of the user's own."""


@pytest.mark.parametrize("deep", [0, 1])
@pytest.mark.parametrize(("before", "after", "names"), [(adam, sgd, ("Adam", "SGD")), (sgd, adam, ("SGD", "Adam"))])
def test_state_of_another_class_is_not_merged_in_and_the_log_says_so(tmp_path, caplog, before, after, names, deep):
    stepped(manager_of(tmp_path, before))
    manager = manager_of(tmp_path, after)
    settings = [{**group, "params": None} for group in manager.saver.optim.param_groups]
    if deep:  # it has state of its own by then
        stepped(manager_of(tmp_path / "elsewhere", after))
        manager.saver.optim.state.update({p: {"mine": 1} for p in manager.saver.model.parameters()})
    caplog.clear()
    assert manager.restore() == 1
    assert not manager.saver.optim.state
    assert [{**group, "params": None} for group in manager.saver.optim.param_groups] == settings
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [SAID.format(*names)]
    stepped(manager)  # and trains on


@pytest.mark.parametrize(("before", "after"), [(adam, Slower), (Slower, adam)])
def test_a_class_that_inherits_from_the_other_goes_on_with_its_state(tmp_path, caplog, before, after):
    old = stepped(manager_of(tmp_path, before)).saver.optim
    manager = manager_of(tmp_path, after)
    manager.restore()
    assert frozen(manager.saver.optim.state_dict()) == frozen(old.state_dict())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_after_the_next_save_the_new_class_resumes(tmp_path):
    stepped(manager_of(tmp_path, adam))
    changed = manager_of(tmp_path, sgd)
    changed.restore()
    stepped(changed)
    resumed = manager_of(tmp_path, sgd)
    assert resumed.restore() == 2
    assert frozen(resumed.saver.optim.state_dict()) == frozen(changed.saver.optim.state_dict())


def test_a_list_of_names_for_a_plan_without_the_model_has_the_class_too(tmp_path):
    stepped(manager_of(tmp_path, adam))
    live = manager_of(tmp_path, sgd).saver.loader.live_state().inventory
    listed = listed_inventory(list_inventory(live))
    assert {name.text: thing.lineage for name, thing in listed.items() if thing.lineage} == {"dense_optim": ("SGD",)}


def test_a_scheduler_of_the_new_optimizer_goes_on_from_the_place_with_the_rate_of_this_run(tmp_path):
    def scheduled(make):
        manager = manager_of(tmp_path, make)
        manager.schedule = torch.optim.lr_scheduler.LambdaLR(manager.saver.optim, lambda step: 0.5**step)
        manager.register_for_checkpointing("schedule", manager.schedule)
        return manager

    old = scheduled(adam)
    stepped(old)
    old.schedule.step()
    stepped(old)
    new = scheduled(sgd)
    new.restore()
    assert new.saver.optim.param_groups[0]["lr"] == 0.5 / 2
    stepped(new)
    new.schedule.step()
    assert new.saver.optim.param_groups[0]["lr"] == 0.5 / 4
