"""The model of near saves, in every state of small worlds; and that it needs each of its rules."""

from dataclasses import replace

import pytest
from faults.all_states import Lost
from faults.near_protocol_model import WORLDS, Tiers
from faults.near_states import Rules
from support.sweeps import SWEEP_STRIDE, mostly_slow

# rule -> the world in which it is missed, and what becomes of it
NEEDED = {
    "keeps_marks": ("1", "I1: checkpoint A2 holds"),
    "identity": ("1", "I1: pieces of n1.1 and n2.1 in one restore"),
    "run_identity": ("11", "I2: the state of another run"),
    "base_by_save_id": ("8", "I1: n1.2 gives"),
    "parent_is_name": ("10", "I3: restores C1"),
    "copy_checked": ("5", "I3: restores C1"),
    "copies_before_ack": ("2", "I3: restores C1"),
    "check_after_seal": ("1", "I3: restores C1"),
    "never_overwrite": ("1", "I3: restores C1"),
    "two_generations": ("5", "before the damaged generation was acknowledged"),
    "gc_by_epoch": ("1", "I3: restores A1, the save (2, 1)"),
    "order_by_cut": ("1", "the checkpoint (2, 1) was acknowledged"),
    "one_order": ("1", "I3: restores n1.1"),
    "cut_is_unique": ("7", "I1: pieces of n1.1 and n1.1 in one restore"),
    "epoch_rule": ("1", "I2: n1.1 was sealed by a writer that had been overtaken"),
    "list_names_near": ("1", "I3: restores C1"),
    "claim_before_list": ("1", "I3: restores C1"),
    "takeover_before_near": ("1", "I3: restores C1"),
    "base_newest_at_takeover": ("1", "I3: restores A1"),
    "payload_is_marks": ("1", "I1: checkpoint B1 holds"),
    "keep_near_base": ("4", "I3: restores A1"),
    "all_pieces": ("5", "I1: n1.1 lacks a piece"),
    "verify_before_choice": ("5", "I6: n1.1 was chosen and a piece of it is damaged"),
    "one_choice": ("5", "I6: some ranks restore a near save, others a checkpoint"),
    "check_at_read": ("6", "I1: a damaged piece of n1.1 is restored"),
    "relist_when_gone": ("7", "I3: B restores C1"),
    "list_read_last": ("8", "I2: n1.1 was sealed by a writer that had been overtaken"),
    "forget_names_none": ("8", "I5: n1.1 gives the forgotten id back"),
    "forget_in_new_epoch": ("9", "I5: n1.1 gives the forgotten id back"),
    "forget_fences_restored": ("8", "I5: n3.1 gives the forgotten id back"),
    "tools_pass_near_on": ("14", "I3: restores C1"),
}


def explored(world, rules, limit):
    [bounds] = [bounds for name, bounds in WORLDS.items() if name.split()[0] == world]
    return Tiers(rules, **{**bounds, "limit": limit}).run()


@mostly_slow()
@pytest.mark.parametrize("rule", NEEDED)
def test_a_rule_that_is_left_out_is_missed(rule):
    world, what = NEEDED[rule]
    with pytest.raises(Lost) as lost:
        explored(world, replace(Rules(), **{rule: False}), 400_000)
    assert what in str(lost.value)


@mostly_slow()
@pytest.mark.parametrize("world", [name.split()[0] for name in WORLDS])
def test_nothing_is_lost_in_a_part_of_each_world(world):
    assert explored(world, Rules(), 2000)[0] > 2000


@pytest.mark.slow
@pytest.mark.parametrize("world", [name.split()[0] for name in WORLDS])
def test_nothing_is_lost_in_any_state(world):
    limit = 400_000 // SWEEP_STRIDE
    assert explored(world, Rules(), limit)[0] > min(10_000, limit)
