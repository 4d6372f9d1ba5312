"""The model of chains, offers and rotation, in every state within bounds; and that it needs each of its rules."""

from dataclasses import fields, replace

import pytest
from faults.all_states import Lost
from faults.delta_protocol_model import Bounds, Habits, Model
from faults.delta_states import Rules
from support.sweeps import mostly_slow

ADOPTER = None  # in place of a number of saves: `recckpt compact --adopt`
DELTAS = Habits(deltas_only=True, any_step=False)

QUICK = {
    "ephemerals, and a policy that wants nothing": Bounds((3,), (1,), ephemerals=1, failures=1, habits=Habits(keep=0)),
    "a restore of any step": Bounds((2, 1)),
    "a takeover beside a compactor": Bounds((1, 1), (1,)),
    "a reader": Bounds((2,), (1,), reads=True, habits=Habits(deltas_only=True)),
    "one trainer beside a compactor": Bounds((2,), (1,), habits=DELTAS),
    "one id saved anew": Bounds((2,), (1,), habits=Habits(overwrite=True)),
    "two compactors, and a takeover": Bounds((0, 1), (1, 1), habits=DELTAS),
    "an adopter": Bounds((1, ADOPTER), (1,), habits=DELTAS),
    "an adopter, and full saves": Bounds((2, ADOPTER), (1,), habits=Habits(any_step=False)),
    "two takeovers": Bounds((0, 1, 1), (1,), habits=DELTAS),
    "a compaction that is damaged": Bounds((2, 1), (1,), damages=1, habits=DELTAS),
}
LARGER = {"two takeovers", "a compaction that is damaged"}  # which rules need that are dropped
FULL = {
    "from one full, two trainers": Bounds(
        (2, 2), from_delta=False, failures=1, ephemerals=1, habits=Habits(any_step=False)
    ),
    "two saves, a takeover, any step, a compactor": Bounds((2, 1), (1,)),
    "ephemerals and failures, two trainers, a compactor": Bounds((1, 1), (1,), ephemerals=1, failures=1),
    "a compaction that is damaged, and offered again": Bounds((2, 1), (2,), damages=1, habits=DELTAS),
    "max_keep=2": Bounds((2, 1), (1,), habits=Habits(keep=2, deltas_only=True)),
    "two compactors": Bounds((1, 1), (1, 1), habits=DELTAS),
    "a reader and a takeover": Bounds((1, 1), (1,), reads=True, habits=DELTAS),
    "two trainers and an adopter": Bounds((1, ADOPTER, 1), (1,), habits=DELTAS),
}

# rule -> the bounds within which it is missed, and what becomes of it
NEEDED = {
    "base_is_newest_at_takeover": ("a restore of any step", "a base is gone under its owner"),
    "sync_base": ("a restore of any step", "its chain is broken after a power cut"),
    "parent_is_name": ("a compaction that is damaged", "a base is gone under its owner"),
    "ephemeral_keeps_base": ("ephemerals, and a policy that wants nothing", r"restores .*, was"),
    "failed_keeps_marks": ("ephemerals, and a policy that wants nothing", r"restores .*, was"),
    "closure": ("one trainer beside a compactor", "its chain is broken"),
    "keep_own_base": ("ephemerals, and a policy that wants nothing", "a base is gone under its owner"),
    "dependents_first": ("one trainer beside a compactor", "its chain is broken"),
    "superseded_first": ("a compaction that is damaged", "its chain is broken"),
    "sync_before_drop": (
        "ephemerals, and a policy that wants nothing",
        "its chain is broken after a power cut",
    ),
    "owner_adopts": ("a takeover beside a compactor", "brings back A1, which does not count"),
    "only_owner_removes": ("one trainer beside a compactor", "its chain is broken after a power cut"),
    "unique_names": ("two compactors, and a takeover", "its chain is broken"),
    "synced_before_whole": ("one trainer beside a compactor", "its chain is broken after a power cut"),
    "adopt_what_counts": ("a takeover beside a compactor", "brings back A1, which does not count"),
    "keeps_place": ("one trainer beside a compactor", "an adoption changes what a restore gives"),
    "last_whole": ("a compaction that is damaged", "its chain is broken"),
    "look_again": ("a reader", "calls damaged what is whole"),
}
NEEDED_BY_THREE = {
    "check_before_removal": ("two trainers and an adopter", "was acknowledged, and readers get"),
}
NO_LOSS = {
    "adopt_own_epoch": "a takeover sweeps what earlier owners were offered; what comes later lacks files",
    "adopt_whole": "readers, and rotation, pass over what lacks files: see the test of both",
    "keeps_flags": "what is compacted of an ephemeral counts for max_keep then; nothing that others need goes for that",
}


def is_caught(figures, rules, bounds, what):
    with pytest.raises(Lost, match=what) as lost:
        Model(rules, bounds).check()
    figures.add("delta protocol, a rule dropped", rules=1, steps_to_the_loss=len(str(lost.value).splitlines()) - 1)


@pytest.mark.parametrize(
    "bounds", [pytest.param(QUICK[name], id=name, marks=pytest.mark.slow if name in LARGER else ()) for name in QUICK]
)
def test_nothing_is_lost_with_chains_and_offers(figures, bounds):
    figures.add("delta protocol", states=Model(Rules(), bounds).check(), lost=0)


def test_nothing_is_lost_where_a_late_file_of_a_compactor_makes_its_directory_anew(figures):
    bounds = QUICK["an adopter"]
    figures.add("delta protocol", states=Model(Rules(objects=True), bounds).check(), lost=0)


@pytest.mark.slow
@pytest.mark.parametrize("objects", [False, True], ids=["local", "objects"])
@pytest.mark.parametrize("bounds", FULL.values(), ids=FULL)
def test_nothing_is_lost_within_wider_bounds(figures, bounds, objects):
    figures.add("delta protocol", states=Model(Rules(objects=objects), bounds).check(), lost=0)


@mostly_slow()
@pytest.mark.parametrize("rule", NEEDED)
def test_without_any_one_rule_of_chains_and_offers_something_is_lost(figures, rule):
    name, what = NEEDED[rule]
    is_caught(figures, replace(Rules(), **{rule: False}), QUICK[name], what)


@pytest.mark.slow
@pytest.mark.parametrize("rule", NEEDED_BY_THREE)
def test_without_a_rule_that_only_three_owners_need_something_is_lost(figures, rule):
    name, what = NEEDED_BY_THREE[rule]
    is_caught(figures, replace(Rules(), **{rule: False}), FULL[name], what)


def test_an_offer_that_lacks_a_file_is_kept_from_readers_by_three_rules_of_which_one_would_do(figures):
    bounds, rules = QUICK["two compactors, and a takeover"], ("adopt_whole", "last_whole", "adopt_own_epoch")
    for kept in rules:
        dropped = dict.fromkeys({*rules} - {kept}, False)
        assert Model(replace(Rules(objects=True), **dropped), bounds).check()
    is_caught(figures, replace(Rules(objects=True), **dict.fromkeys(rules, False)), bounds, "its chain is broken")


def test_no_rule_of_chains_and_offers_is_in_the_model_without_need():
    assert {*NEEDED, *NEEDED_BY_THREE, *NO_LOSS} == {field.name for field in fields(Rules)} - {"objects"}
