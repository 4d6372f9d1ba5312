"""T11 of deltas: each rule of their models is planted as a bug in the code, and found.

By the kills, the power cuts and the failing operations, and by tests that show one thing, run here with the bug.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
from compaction import test_compact
from faults import test_delta_operations, test_interleavings
from faults.conftest import Figures
from faults.delta_marks_table import MarkRules
from faults.delta_plants import DELTA_PLANTS, OF_CHAINS, OF_MARKS, WITHOUT
from faults.delta_states import Rules
from faults.plants import plant
from faults.test_power_cuts import History, try_all
from load import test_chains as test_loading_chains
from load.test_chains import make  # noqa: F401, a fixture
from output_dir import test_chains, test_delta_listing, test_expired_links, test_offers
from output_dir.test_delta_listing import chain  # noqa: F401
from output_dir.test_offers import run  # noqa: F401
from save import test_delta_base, test_deltas, test_full_or_delta
from save.test_deltas import training  # noqa: F401
from sparse.table import test_marks
from support.spec_reader import DamagedError
from support.sweeps import mostly_slow

between = test_marks.test_what_changes_before_and_during_a_save_is_in_the_delta_after_it
WRONG = (AssertionError, DamagedError)


@dataclass(frozen=True)
class By:
    """What finds a bug.

    Attributes:
        test: a test, run with the bug.
        given: its parameters that are no fixtures.
        error: what it raises.
    """

    test: Callable[..., object]
    given: Mapping[str, Any] = field(default_factory=dict)
    error: type[Exception] | tuple[type[Exception], ...] = WRONG


def during(before, meanwhile, end="committed"):
    """Return what finds a wrong delta after a save during which a table changes."""
    return By(between, {"before": before, "during": meanwhile, "end": end})


FOUND = {
    "base_is_newest_at_takeover": By(test_delta_base.test_what_another_writer_has_gone_on_from_is_no_base),
    "parent_is_origin": By(test_delta_base.test_a_delta_on_a_restored_form_stands_on_what_that_is_a_form_of),
    "ephemeral_keeps_base": By(test_deltas.test_nothing_stands_on_an_ephemeral_delta),
    "failed_keeps_marks": By(
        test_delta_operations.test_after_a_fault_the_next_save_holds_all_that_has_changed,
        {"habit": "goes on", "stride": 7},
    ),
    "closure": By(test_deltas.test_rotation_leaves_what_a_delta_stands_on, {"max_keep": 1}),
    "keep_own_base": By(test_delta_base.test_a_base_stays_though_no_policy_wants_it),
    "dependents_first": By(test_expired_links.test_the_links_of_what_is_kept_stay_and_do_not_count),
    "delta_before_its_forms": By(test_expired_links.test_what_a_form_stands_for_goes_and_the_pin_holds_the_form),
    "unique_names": By(
        test_compact.test_an_unfinished_offer_does_not_keep_another_from_being_made, error=FileExistsError
    ),
    "adopt_whole": By(
        test_offers.test_an_offer_that_is_not_whole_is_refused, {"file": "sparse/00000-of-00002.g0.00.arrow"}
    ),
    "adopt_young": By(test_offers.test_an_old_offer_is_not_adopted_and_goes_only_when_it_is_two_days_old),
    "adopt_what_counts": By(test_offers.test_an_offer_of_a_delta_whose_chain_is_broken_is_refused),
    "adoption_is_an_attempt": By(test_offers.test_an_owner_that_adopts_too_late_brings_nothing_back),
    "failed_adoption_removes_nothing": By(test_offers.test_a_failed_adoption_removes_nothing),
    "form_keeps_place": By(test_offers.test_an_offer_becomes_a_form_that_readers_take),
    "form_has_flags": By(test_offers.test_a_form_of_an_ephemeral_checkpoint_is_ephemeral),
    "whole_before_full": By(test_chains.test_a_damaged_form_is_passed_over_for_the_delta),
    "look_again": By(test_delta_listing.test_a_missing_link_is_looked_for_again_before_that_is_damage),
    "marks_kept_until_commit": during("write", "erase", "failed"),
    "second_set": during("write", "write"),
    "second_set_is_told": during("write", "write"),
    "erase_moves_marks": during("write and erase", "erase", "failed"),
    "erase_moves_second": during("write", "write and erase"),
    "tombstones_kept_on_failure": during("erase", "write", "failed"),
    "tombstones_in_both": during("write", "erase"),
    "replaced_kept_on_failure": during("clear", "write", "failed"),
    "replaced_in_both": during("write", "clear"),
    "present_are_not_deleted": By(test_deltas.test_erased_ids_are_deleted_and_those_that_are_back_are_rows),
    "new_slot_replaces": By(test_deltas.test_a_table_that_was_cleared_moved_or_got_a_slot_is_replaced),
    "new_store_replaces": By(test_marks.test_a_store_that_is_no_longer_used_is_not_kept),
    "replaced_is_agreed": By(test_full_or_delta.test_a_table_that_is_replaced_on_one_rank_is_on_all),
    "ephemeral_keeps_marks": By(test_deltas.test_nothing_stands_on_an_ephemeral_delta),
    "marks_know_their_base": By(test_marks.test_marks_since_another_base_are_of_no_use),
    "upserts_beat_deletes": By(
        test_loading_chains.test_an_id_that_has_moved_to_another_shard_has_its_row_there, error=Exception
    ),
}


@mostly_slow()
@pytest.mark.parametrize("rule", FOUND)
def test_a_test_finds_what_keeps_to_a_rule_no_longer(request, figures, monkeypatch, rule):
    by = FOUND[rule]
    asked = [name for name in inspect.signature(by.test).parameters if name not in by.given]
    given = {**by.given, **{name: request.getfixturevalue(name) for name in asked}}
    figures.add("T11", planted=1, found=0)
    plant(rule, monkeypatch.setattr)
    with pytest.raises(by.error):
        by.test(**given)
    figures.add("T11", found=1)


BY_A_POWER_CUT = {
    "sync_base": "delta in doubt",
    "sync_form_before_drop": "form in doubt",
    "synced_before_whole": "offer and form",
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", BY_A_POWER_CUT)
def test_a_power_cut_finds_what_keeps_to_a_rule_no_longer(worker, ram, finding, rule):
    history = History(worker, ram, BY_A_POWER_CUT[rule], rule)
    with finding("a power cut after .*left is"):
        try_all(history, Figures(), ram, {len(history.ops) - 1}, n_random=0)


@pytest.mark.slow
@pytest.mark.parametrize("scene", BY_A_POWER_CUT.values())
def test_a_power_cut_where_all_rules_are_kept_to_loses_nothing(worker, ram, figures, scene):
    history = History(worker, ram, scene)
    try_all(history, figures, ram, {len(history.ops) - 1}, n_random=0)


@pytest.mark.slow
def test_a_writer_that_is_held_up_finds_a_removal_without_a_check(ram, monkeypatch, finding):
    plant("check_before_removal", monkeypatch.setattr)
    with finding("a checkpoint was touched|the owner keeps all of its checkpoints, and .* are gone"):
        test_interleavings.hold_rotations_up(Figures(), str(ram))


def test_each_rule_is_planted_and_found_or_has_none_to_plant():
    assert {field.name for field in fields(Rules)} == {*OF_CHAINS, *WITHOUT}
    assert {field.name for field in fields(MarkRules)} == {*OF_MARKS}
    assert {*FOUND, *BY_A_POWER_CUT, "check_before_removal"} == {*DELTA_PLANTS}
