"""Each rule of forgetting is dropped from the code, and a test finds that."""

import inspect

import pytest
from faults.plants import Plant
from rewrite import test_forgetting
from rewrite.test_forgetting import chain, root  # noqa: F401
from support.spec_reader import DamagedError

CARRY_OUT = "recckpt.rewrite.requests:_carry_out"
RULES = {
    "closing_list": (
        Plant(CARRY_OUT, "    fence.close_list(", "    frozenset("),
        test_forgetting.test_what_somebody_puts_back_after_ids_were_forgotten_never_counts_again,
    ),
    "closing_names_scanned": (
        Plant("recckpt.output_dir.fence:publish", "listing.save_ids if clean is None else clean", "listing.save_ids"),
        test_forgetting.test_what_somebody_puts_back_meanwhile_does_not_get_into_the_list,
    ),
    "sync_before_drop": (
        Plant(CARRY_OUT, "make_durable(storage, listing)", "None"),
        test_forgetting.test_what_is_taken_as_it_is_was_synced_before_what_it_supersedes_goes,
    ),
    "oldest_first": (
        Plant(CARRY_OUT, "for checkpoint in (c for c in family if", "for checkpoint in (c for c in family[::-1] if"),
        test_forgetting.test_a_table_may_lose_all_its_rows,
    ),
    "keeps_place": (
        Plant("recckpt.rewrite.without_ids:_head", "*of.place)", "attempt.intent.epoch, attempt.seq)"),
        test_forgetting.test_an_old_checkpoint_that_is_written_again_stays_older_than_those_after_it,
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_test_finds_what_keeps_to_a_rule_of_forgetting_no_longer(request, monkeypatch, rule):
    plant, test = RULES[rule]
    fixtures = {name: request.getfixturevalue(name) for name in inspect.signature(test).parameters}
    monkeypatch.setattr(plant.function, "__code__", plant.code)
    with pytest.raises((AssertionError, pytest.fail.Exception, DamagedError, ValueError)):
        test(**fixtures)
