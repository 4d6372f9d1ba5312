"""Each rule of near saves, left out of recckpt, is missed by a test; or why there is nothing to leave out."""

from dataclasses import fields

import pytest
from faults.near_states import Rules
from faults.plants import Plant
from near import test_moving as copies
from near import test_near_saves as tests
from support.sweeps import mostly_slow

from recckpt.errors import RecckptError

TIER, SAVES, SAVE = "recckpt.near.tier:NearTier", "recckpt.near.saves:NearSaves", "recckpt.near.one_save:NearSave"
DIR, CANDIDATES = "recckpt.near.near_dir:NearDir", "recckpt.near.views"
FENCE_CHECK = "self.tier.in_time(self.fence.check, self.job.ranks.size)"

MISSED = {
    "run_identity": (
        tests.test_a_copy_of_an_output_dir_sees_no_near_saves_of_the_first,
        [
            Plant("recckpt.near.near_dir:_place", "_canonical(url).encode()", "b''"),
            Plant(f"{DIR}.opened", "seal.place != self.place or ", ""),
        ],
    ),
    "keeps_marks": (
        tests.test_a_near_save_keeps_the_marks_for_the_next_checkpoint,
        [
            Plant(
                "recckpt.sparse.table.marks:Marks.freeze",
                "if not keeps_marks:",
                "self._since = _Since(base, (second,))\n        if not keeps_marks:",
            ),
        ],
    ),
    "check_after_seal": (
        tests.test_one_that_is_sealed_after_the_list_of_a_successor_is_not_acknowledged_and_does_not_count,
        [Plant(f"{SAVE}._acknowledged", FENCE_CHECK, "pass")],
    ),
    "two_generations": (
        tests.test_damage_of_the_newest_is_passed_over_for_the_one_before,
        [
            Plant("recckpt.near.tier:newest", "[-_GENERATIONS:]", "[-1:]"),
        ],
    ),
    "order_by_cut": (
        tests.test_who_goes_back_and_trains_again_counts_by_cut_and_not_by_step,
        [
            Plant(f"{CANDIDATES}:counting", "save.manifest.order", "save.manifest.step"),
        ],
    ),
    "one_order": (
        tests.test_a_newer_checkpoint_goes_before_an_older_near_save,
        [
            Plant(
                "recckpt.output_dir.candidates:merged",
                "while rest and rest[0].manifest.order > save.manifest.order",
                "while False",
            ),
        ],
    ),
    "cut_is_unique": (
        tests.test_who_goes_back_and_trains_again_counts_by_cut_and_not_by_step,
        [
            Plant(f"{TIER}.next_cut", "self._cut += 1", "self._cut = 2"),
        ],
    ),
    "epoch_rule": (
        tests.test_one_that_is_sealed_after_the_list_of_a_successor_is_not_acknowledged_and_does_not_count,
        [Plant("recckpt.format.near_seal:NearList.counts", "self.is_of_run(name) and not self.is_void", "True")],
    ),
    "list_names_near": (
        tests.test_a_successor_that_dies_before_its_first_save_has_named_what_counted,
        [
            Plant(f"{TIER}.near_list", "[] if is_forgetting else", "[] if True else"),
        ],
    ),
    "tools_pass_near_on": (
        tests.test_a_tool_that_takes_over_lets_count_what_counted,
        [
            Plant("recckpt.output_dir.fence:PassedOn.near_list", "before.near", "NearList(by)"),
        ],
    ),
    "payload_is_marks": (
        tests.test_what_a_near_save_held_is_in_the_next_checkpoint,
        [
            Plant("recckpt.near.changes:mark", 'payload(table.name, "rows")', "deleted[:0]"),
        ],
    ),
    "keep_near_base": (
        tests.test_rotation_keeps_what_a_newer_near_save_stands_on,
        [
            Plant("recckpt.output_dir.rotation:expired", ", *near_bases]", "]"),
        ],
    ),
    "all_pieces": (
        tests.test_an_incomplete_one_does_not_count,
        [
            Plant("recckpt.near.views:is_complete", "file.name in files", "True"),
            Plant("recckpt.near.finder:_concluded", "lacking(save, of_hosts)", "None"),
        ],
    ),
    "verify_before_choice": (
        tests.test_damage_of_the_newest_is_passed_over_for_the_one_before,
        [
            Plant("recckpt.near.finder:_concluded", "lacking(save, of_hosts)", "None"),
        ],
    ),
    "copy_checked": (
        copies.test_a_copy_that_is_spoiled_on_the_wire_ends_its_near_save_on_all_hosts_and_nothing_else,
        [Plant("recckpt.near.moving:Incoming.publish", "found != expected", "False")],
    ),
    "copies_before_ack": (
        copies.test_each_host_has_the_files_of_two_hosts_before_a_near_save_is_acknowledged,
        [Plant(f"{SAVE}._written", "not self.begun.copies", "True")],
    ),
    "forget_names_none": (
        tests.test_a_forgetting_from_outside_takes_all_near_saves_back,
        [
            Plant(
                "recckpt.output_dir.fence:NearAtTakeover.near_list",
                "replace(before.near, is_void=True)",
                "before.near",
            ),
            Plant("recckpt.output_dir.fence:Fence.close_list", "else NAMES_NONE", "else PASSED_ON"),
        ],
    ),
    "forget_in_new_epoch": (
        tests.test_a_run_that_forgets_takes_near_saves_back_though_they_are_there_still,
        [
            Plant("recckpt.output_dir.fence:Fence.close_list", "else NAMES_NONE", "else PASSED_ON"),
        ],
    ),
    "base_newest_at_takeover": (
        tests.test_what_is_restored_and_not_the_newest_is_no_base_of_near_saves,
        [
            Plant(
                "recckpt.save.deltas:Changes.confirm",
                "base.place != fence.newest_at_takeover or not links",
                "not links",
            ),
        ],
    ),
}
ELSEWHERE = {
    "identity": "catalogs repeat the name, and the seal has their checksums, of which each would do",
    "base_by_save_id": "a near save stands on its base as a delta does: delta_plants",
    "parent_is_name": "the same",
    "never_overwrite": "a directory is made, and files are created: both fail where there is one",
    "gc_by_epoch": "test_tier.py: the bug would be another order of what stays",
    "claim_before_list": "test_tier.py",
    "takeover_before_near": "a fence without a list has no epoch to name a directory by",
    "one_choice": "one rank chooses for all: test_ranks.py",
    "check_at_read": "batches are checked as those of checkpoints: faults/test_flips.py",
    "relist_when_gone": "test_tier.py",
    "list_read_last": "test_tier.py",
    "forget_fences_restored": "delta_plants",
    "staged_base": "loses nothing in the model",
    "seal_after_all": "loses nothing in the model",
    "check_before_seal": "loses nothing in the model",
    "gc_check": "loses nothing in the model",
    "forget_ends_first": "loses nothing in the model",
}


@mostly_slow()
@pytest.mark.parametrize("rule", MISSED)
def test_a_rule_that_is_left_out_is_missed(tmp_path, monkeypatch, rule):
    test, bugs = MISSED[rule]
    with pytest.MonkeyPatch.context() as patch:
        for bug in bugs:
            patch.setattr(bug.function, "__code__", bug.code)
        given = {"tmp_path": tmp_path, "monkeypatch": monkeypatch}
        names = test.__code__.co_varnames[: test.__code__.co_argcount]
        with pytest.raises((AssertionError, pytest.fail.Exception, RecckptError, OSError, KeyError)):
            test(**{name: given[name] for name in names})


def test_each_rule_of_the_model_is_planted_or_said_to_be_elsewhere():
    assert MISSED.keys().isdisjoint(ELSEWHERE)
    assert MISSED.keys() | ELSEWHERE.keys() == {rule.name for rule in fields(Rules)}
