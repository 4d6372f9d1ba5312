"""What becomes of a near save, by what all ranks propose: one begins, or is left out, or a checkpoint is made first."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from save.test_decide import WIDE, delta, failed

from recckpt.near.plan import NearProposal, NearStand, decide_near
from recckpt.output_dir.checkpoint_dir import Intent
from recckpt.policies.deltas import Chain, Deltas
from recckpt.save.decide import Phase, Room


def stand(base_step, step=70):
    """Return what a near save of step 70 stands on."""
    base = SimpleNamespace(manifest=SimpleNamespace(step=base_step))
    return NearStand(Intent("1.ff/3", 1, "1.ff.3", step), 3, 5, (base,))


STAND = stand(47)


def proposals(*saves, hosts="ab", is_saving=False):
    return [NearProposal(save, host, is_saving) for save, host in zip(saves, hosts, strict=True)]


def dirty(room=WIDE):
    """A rank of whose ten rows nine have changed, which are more than are worth a near save."""
    save = delta(9, 100, room, Chain(0, 0, 100))
    return replace(save, delta=replace(save.delta, policy=Deltas(max_dirty=0.5)))


def small(n_bytes=100, room=WIDE):
    return delta(1, n_bytes, room, Chain(0, 0, 100))


def test_one_begins_where_all_ranks_can_make_it():
    plan = decide_near(STAND, None, proposals(small(), small()))
    assert (plan.begun.hosts, plan.begun.copies, plan.begun.cut, plan.save.kind.base) == (("a", "b"), 1, 3, "b")
    assert not plan.needs_checkpoint
    assert [plan.begun.is_first_of_host(rank) for rank in (0, 1)] == [True, True]


@pytest.mark.parametrize(("asked", "n_copies"), [(None, 1), (0, 0), (1, 1), (7, 1)])
def test_there_are_as_many_copies_as_are_asked_for_and_there_are_other_hosts(asked, n_copies):
    assert decide_near(STAND, asked, proposals(small(), small())).begun.copies == n_copies


@pytest.mark.parametrize("is_saving", [False, True])
def test_a_checkpoint_is_made_first_where_there_is_none_to_stand_on_and_none_under_way(is_saving):
    plan = decide_near(None, None, proposals(small(), failed(Phase.ROOM), is_saving=is_saving))
    assert (plan.begun, plan.save.refusal, plan.needs_checkpoint) == (None, None, not is_saving)
    one_by_one = replace(small(), delta=replace(small().delta, base="another"))
    plan = decide_near(STAND, None, proposals(small(), one_by_one, is_saving=is_saving))
    assert (plan.begun, plan.save.refusal, plan.needs_checkpoint) == (None, None, not is_saving)


def test_what_fails_before_anything_is_staged_fails_it_whether_there_is_something_to_stand_on_or_not():
    for known in (STAND, None):
        plan = decide_near(known, None, proposals(failed(Phase.SETTLE), small()))
        assert (plan.begun, plan.save.refusal.rank, plan.needs_checkpoint) == (None, 0, True)


@pytest.mark.parametrize("n_bytes", [10_000, 50])
def test_one_of_which_too_much_has_changed_is_left_out_though_there_is_no_room_for_all_rows(n_bytes):
    plan = decide_near(STAND, None, proposals(dirty(Room("here", n_bytes, 0, None)), dirty()))
    assert (plan.begun, plan.save.refusal, plan.is_too_large, plan.needs_checkpoint) == (None, None, True, False)


@pytest.mark.parametrize(("base_step", "step"), [(46, 70), (0, 70), (0, 0)])
def test_a_checkpoint_is_made_first_where_a_young_run_has_outgrown_its_newest(base_step, step):
    plan = decide_near(stand(base_step, step), None, proposals(dirty(), dirty()))
    assert (plan.begun, plan.save.refusal, plan.is_too_large, plan.needs_checkpoint) == (None, None, False, True)
    assert decide_near(stand(base_step, step), None, proposals(small(), small())).begun is not None


@pytest.mark.parametrize(("base_step", "step"), [(47, 70), (None, 70), (5, None)])
def test_none_is_made_first_where_a_run_is_not_young_or_its_steps_are_not_known(base_step, step):
    plan = decide_near(stand(base_step, step), None, proposals(dirty(), dirty()))
    assert (plan.is_too_large, plan.needs_checkpoint) == (True, False)


def test_one_that_has_failed_is_not_made_again_at_once():
    tried = replace(stand(0), stood_in=47)
    plan = decide_near(tried, None, proposals(dirty(), dirty()))
    assert (plan.is_too_large, plan.needs_checkpoint) == (True, False)


@pytest.mark.parametrize(("copies", "has_room"), [(0, True), (1, False)])
def test_a_host_needs_room_for_the_files_of_its_ranks_and_the_copies(copies, has_room):
    plan = decide_near(STAND, copies, proposals(small(room=Room("b", 15, 0, None)), small()))
    assert (plan.begun is not None) is has_room
    if not has_room:
        assert plan.save.refusal.phase is Phase.ROOM
        assert "found 15 B free, expected 20 B for the save; make room on that host" in str(plan.save.refusal.reason)
