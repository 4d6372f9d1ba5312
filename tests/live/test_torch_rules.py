"""What is known of the optimizers of torch: their slots, the states of a first step, and which rows a step changes."""

import copy

import pytest
import torch
from support.devices import here, ids, skip_without_kernel
from support.live_runs import MARKED, OPTIMIZERS, SPARSE, assert_same
from torch import nn, optim

from recckpt.live.torch_rules import make_state, rule_of, set_step

N_ROWS = 20
pytestmark = pytest.mark.usefixtures("device")


def made(rule, *, sparse):
    torch.manual_seed(0)
    module = nn.Embedding(N_ROWS, 3, sparse=sparse).to(here())
    optimizer = OPTIMIZERS[rule]([module.weight])
    skip_without_kernel(optimizer)
    return module, optimizer


def train(module, optimizer, n_steps=4):
    changed = []
    for i in range(n_steps):
        before = module.weight.detach().clone()
        module(ids(i, 7, 7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        changed.append(set((before != module.weight).any(1).nonzero().flatten().tolist()))
    return changed


@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_training_goes_alike_whether_the_state_was_made_before_the_first_step_or_by_it(rule):
    states = []
    for is_made in (False, True):
        module, optimizer = made(rule, sparse=rule in SPARSE)
        if is_made:
            make_state(optimizer, optimizer.param_groups[0], module.weight, rule_of(optimizer))
        train(module, optimizer)
        states.append(copy.deepcopy([module.state_dict(), optimizer.state_dict()]))
    assert_same(*states)


@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_only_rules_without_a_reason_leave_rows_without_a_gradient_as_they_are(rule):
    module, optimizer = made(rule, sparse=rule in SPARSE)
    reason = rule_of(optimizer).reason(optimizer.param_groups[0])
    assert (reason is None) == (rule in MARKED)
    changed = train(module, optimizer)
    if reason is None:
        assert changed == [{i, 7} for i in range(4)]


@pytest.mark.parametrize("lr", [float("inf"), float("nan"), torch.tensor(float("inf"))])
@pytest.mark.parametrize("rule", ["Adagrad", "SGD"])
def test_a_learning_rate_that_is_no_number_changes_rows_without_a_gradient(rule, lr):
    module, optimizer = made(rule, sparse=False)
    optimizer.param_groups[0]["lr"] = lr
    assert "turns every row into NaN" in rule_of(optimizer).reason(optimizer.param_groups[0])
    assert len(train(module, optimizer, 1)[0]) == N_ROWS


@pytest.mark.parametrize(("eps", "n_changed"), [(1e-10, N_ROWS), (1e-6, 2)])
def test_an_eps_that_is_0_in_float16_changes_rows_without_a_gradient(eps, n_changed):
    module = nn.Embedding(N_ROWS, 3).half().to(here())
    optimizer = optim.Adagrad(module.parameters(), lr=0.1, eps=eps)
    reason = rule_of(optimizer).reason(optimizer.param_groups[0])
    assert len(train(module, optimizer, 1)[0]) == n_changed
    assert reason == ("eps=1e-10 is 0 in float16, so rows without a gradient change" if n_changed > 2 else None)


@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_the_slots_are_the_states_that_have_a_value_for_each_row(rule):
    module, optimizer = made(rule, sparse=rule in SPARSE)
    train(module, optimizer)
    state = optimizer.state[module.weight]
    of_rows = {key for key, value in state.items() if isinstance(value, torch.Tensor) and value.shape == (N_ROWS, 3)}
    assert set(rule_of(optimizer).keys(optimizer.param_groups[0])) == of_rows


def test_a_subclass_is_not_known_since_it_may_do_anything():
    class Mine(optim.Adagrad):
        pass

    assert rule_of(Mine([nn.Parameter(torch.zeros(2, 2))])) is None


@pytest.mark.parametrize("rule", ["SparseAdam", "Adam", "Adam fused", "Adagrad"])
def test_steps_are_set_as_torch_keeps_them(rule):
    module, optimizer = made(rule, sparse=rule in SPARSE)
    make_state(optimizer, optimizer.param_groups[0], module.weight, rule_of(optimizer))
    kind = type(optimizer.state[module.weight]["step"])
    set_step(optimizer, module.weight, 7)
    step = optimizer.state[module.weight]["step"]
    assert type(step) is kind
    assert int(step) == 7
    train(module, optimizer, 1)
    assert int(optimizer.state[module.weight]["step"]) == 8


def test_momentum_with_dampening_is_refused_since_its_first_step_differs():
    optimizer = optim.SGD([nn.Parameter(torch.zeros(2, 2))], momentum=0.9, dampening=0.5)
    assert "dampening" in rule_of(optimizer).refusal(optimizer.param_groups[0])
    optimizer.param_groups[0]["momentum"] = 0
    assert rule_of(optimizer).refusal(optimizer.param_groups[0]) is None
