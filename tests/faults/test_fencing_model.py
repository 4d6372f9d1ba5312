"""The model of the fencing, in every state that its writers can bring about; and that it needs each of its rules."""

from dataclasses import fields, replace
from itertools import product

import pytest
from faults.all_states import Lost
from faults.fencing_model import NO_STEP, Model, Rules
from support.sweeps import SWEEP_STRIDE, mostly_slow

# the steps that each writer saves: a later writer that saves a step again has rolled back
ONE_EACH = ((1,), (1,), (1,))
TWO_OF_TWO = ((1, 2), (1, 2))
ONE_ID = ((NO_STEP, NO_STEP), (NO_STEP, NO_STEP))

# rule -> what the writers save when it is dropped, what becomes of it, and the number of a list without its claim
NEEDED = {
    "check_before_sweep": (((1,), (1,)), "writer 1 removes intent of .* which is that of"),
    "claim_above_lists": (((1,), (1,)), "was acknowledged, and readers get", 7),
    "look_after_claim": (ONE_EACH, "epoch 1 is that of two writers"),
    "claim_before_list": (((1,), (1,)), "was acknowledged, and readers get"),
    "list_before_sweep": (((1,), (1,)), "writer 1 removes intent of .* which is that of"),
    "sweep_dead_epochs_only": (((1,), (1,)), "writer 1 removes intent of .* which is that of"),
    "names_not_reused": (((1,), (1,)), "writes {'data'} into .* which is that of"),
    "no_step_is_not_fresh": (((NO_STEP,), (NO_STEP,)), "writes {'data'} into .* which is that of"),
    "check_after_commit": (((1,), (1,)), "was acknowledged, and readers get"),
    "check_before_removal": (((1,), (1, 2)), "writer 1 removes manifest of .* which is that of"),
    "readers_know_epochs": (((1,), (1,)), "counts, though epoch 2 had taken over"),
    "order_by_seq": (((1, 2), (1,)), "was acknowledged, and readers get"),
}
NEEDED_BY_THREE = {
    "hand_on_steps": (ONE_EACH, "writes {'data'} into .* which is that of"),
    "check_after_intent": (ONE_EACH, "writes {'data'} into .* which is that of"),
    "claims_go_first": (ONE_EACH, "writes {'data'} into .* which is that of"),
    "lists_go_last": (ONE_EACH, "counts, though epoch 3 had taken over"),
    "tidy_own_epoch_only": (((2,), (1,), (1, 2)), "writer 2 removes intent of .* which is that of"),
}


def check(figures, scripts, failures, objects):
    figures.add("model", states=Model(Rules(objects=objects), scripts, failures).check(), lost=0)


def is_caught(figures, rule, scripts, what, orphan=0):
    with pytest.raises(Lost, match=what) as lost:
        Model(replace(Rules(), **{rule: False}), scripts, orphan=orphan).check()
    figures.add("model, a rule dropped", rules=1, steps_to_the_loss=len(str(lost.value).splitlines()) - 1)


@mostly_slow()
@pytest.mark.parametrize("objects", [False, True], ids=["local", "objects"])
@pytest.mark.parametrize(
    ("scripts", "failures"),
    [pytest.param(ONE_EACH, 0, marks=pytest.mark.slow), (TWO_OF_TWO, 0), (ONE_ID, 1)],
    ids=["three writers", "two writers", "two writers of one id"],
)
def test_nothing_is_lost_however_writers_come_between_each_other(figures, scripts, failures, objects):
    check(figures, scripts, failures, objects)


def test_nothing_is_lost_beside_a_list_whose_claim_is_gone(figures):
    states = Model(Rules(), ((1,), (1, 2)), orphan=7).check()
    figures.add("model", states=states, lost=0)


@pytest.mark.parametrize("rule", NEEDED)
def test_without_any_one_rule_something_is_lost(figures, rule):
    is_caught(figures, rule, *NEEDED[rule])


@pytest.mark.slow
@pytest.mark.parametrize("rule", NEEDED_BY_THREE)
def test_without_a_rule_that_only_three_writers_need_something_is_lost(figures, rule):
    is_caught(figures, rule, *NEEDED_BY_THREE[rule])


def test_no_rule_is_in_the_model_without_need():
    assert {*NEEDED, *NEEDED_BY_THREE} == {field.name for field in fields(Rules)} - {"objects"}


STEPS = [
    *product(product((1, 2)), repeat=3),
    *product(product((1, 2), repeat=2), repeat=2),
    (ONE_ID[0][:1],) * 3,
]


@pytest.mark.slow
@pytest.mark.parametrize("objects", [False, True], ids=["local", "objects"])
@pytest.mark.parametrize("scripts", STEPS[::SWEEP_STRIDE], ids=str)
def test_nothing_is_lost_in_any_order_of_steps_and_with_a_failure(figures, scripts, objects):
    check(figures, scripts, 1, objects)


@pytest.mark.slow
@pytest.mark.parametrize("scripts", [((2,), (1,), (1, 2)), ((1, 2), (1,), (1,))][:: 1 + SWEEP_STRIDE // 10], ids=str)
def test_nothing_is_lost_when_one_of_three_writers_saves_twice(figures, scripts):
    check(figures, scripts, 0, objects=False)
