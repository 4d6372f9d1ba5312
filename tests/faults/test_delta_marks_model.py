"""The model of marks, in every state within bounds; and that it needs each of its rules."""

from dataclasses import fields, replace

import pytest
from faults.all_states import Lost
from faults.delta_marks_model import MarkRules, Marks

ONE_RANK = {"ids": "xyz"}
TWO_IDS = {"ids": "xy"}
TWO_RANKS = {"ids": "xy", "n_ranks": 2, "moves": True}
TWO_SAVERS = {"ids": "xy", "savers": 2}
SWAPS = {"ids": "xy", "swaps": True}
SCENES = {"one rank": ONE_RANK, "two ranks": TWO_RANKS, "two savers": TWO_SAVERS, "swapped stores": SWAPS}

# rule -> where it is missed, and after how many steps
NEEDED = {
    "marks_kept_until_commit": (TWO_IDS, 5),
    "second_set": (TWO_IDS, 5),
    "second_set_is_told": (TWO_IDS, 5),
    "erase_moves_marks": (TWO_IDS, 4),
    "erase_moves_second": (TWO_IDS, 6),
    "tombstones_kept_on_failure": (TWO_IDS, 5),
    "tombstones_in_both": (TWO_IDS, 5),
    "replaced_kept_on_failure": (TWO_IDS, 5),
    "replaced_in_both": (TWO_IDS, 5),
    "new_slot_replaces": (TWO_IDS, 3),
    "new_store_replaces": (SWAPS, 3),
    "replaced_is_agreed": (TWO_RANKS, 3),
    "ephemeral_keeps_marks": (TWO_IDS, 5),
    "marks_know_their_base": (TWO_SAVERS, 5),
    "upserts_beat_deletes": (TWO_RANKS, 4),
}
NO_LOSS = {
    "present_are_not_deleted": "an id that is there again is marked, and a row beats a delete: see the test of both"
}


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_a_delta_makes_of_its_base_what_was_saved(figures, scene):
    figures.add("delta marks", states=Marks(MarkRules(), **scene, depth=4).check(), lost=0)


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_a_delta_makes_of_its_base_what_was_saved_after_many_steps(figures, scene):
    figures.add("delta marks", states=Marks(MarkRules(), **scene, depth=6).check(), lost=0)


@pytest.mark.parametrize("rule", NEEDED)
def test_without_any_one_rule_of_marks_a_delta_is_wrong(figures, rule):
    scene, depth = NEEDED[rule]
    with pytest.raises(Lost, match=r"restores .*, was") as lost:
        Marks(replace(MarkRules(), **{rule: False}), **scene, depth=depth).check()
    figures.add("delta marks, a rule dropped", rules=1, steps_to_the_loss=len(str(lost.value).splitlines()) - 1)


def test_an_id_erased_and_inserted_again_is_restored_by_two_rules_of_which_one_would_do():
    for rule in ("present_are_not_deleted", "upserts_beat_deletes"):
        assert Marks(replace(MarkRules(), **{rule: False}), "xy", depth=5).check()
    with pytest.raises(Lost, match=r"restores .*, was"):
        Marks(replace(MarkRules(), present_are_not_deleted=False, upserts_beat_deletes=False), "xy", depth=5).check()


def test_no_rule_of_marks_is_in_the_model_without_need():
    assert {*NEEDED, *NO_LOSS} == {field.name for field in fields(MarkRules)}
