"""What all ranks make of what each proposes: one plan, or one refusal, which each raises as its own error says."""

from dataclasses import replace

import pytest

from recckpt.dense.sharded import Summary
from recckpt.errors import RecckptError, SaveFailedError, WriterFencedError
from recckpt.format.buckets import gen_slice
from recckpt.policies.deltas import Chain, Deltas
from recckpt.save.choice import Choice
from recckpt.save.decide import Phase, Proposal, RankFailure, SavePlan, decide
from recckpt.save.full_or_delta import FULL, DeltaProposal, Kind, TableChanges
from recckpt.save.owners import why_shared
from recckpt.save.room import Room
from recckpt.save.save_info import SaveInfo

WIDE, NARROW = Room("here", 10_000, 0, None), Room("here", 1_000, 0, None)
INFO = SaveInfo("c", 7)


def proposal(**fields):
    return Proposal("c", 7, Choice(), False, **{"room": WIDE, "sharded": Summary(0, 0, 0), **fields})


def failed(phase, reason="OSError: down"):
    return proposal(failure=RankFailure(phase, reason), room=WIDE if phase is Phase.STAGE else None, sharded=None)


def delta(n_changed, n_bytes, room=WIDE, chain=None):
    tables = TableChanges.of({"t": (n_changed, 10, n_bytes // 10, False, False)})
    base = DeltaProposal(Deltas(full_every=3), "b", chain or Chain(1, 10, 100), tables)
    return replace(proposal(n_bytes=n_bytes, room=room, delta=base), writes_deltas=True)


def refusal(*proposals):
    plan = decide(proposals)
    return None if plan.refusal is None else (plan.refusal.rank, plan.refusal.phase)


def test_ranks_that_propose_one_save_have_a_plan_of_what_any_of_them_has():
    plan = decide([proposal(io_state=("x",), own_extra=("a",)), proposal(io_state=("y", "x"))])
    assert plan == SavePlan(FULL, own_extra=("a",), io_state=("x", "y"))


def test_what_has_to_be_compared_in_detail_is_in_the_plan():
    whole, half = Summary(5, 4, 2), Summary(5, 4, 1)
    assert decide([proposal(sharded=whole)] * 2).is_whole
    assert not decide([proposal(sharded=whole), proposal(sharded=half)]).is_whole
    assert decide([proposal(digest=1), proposal(digest=2)]).has_differences


def test_of_several_failures_the_earliest_phase_counts_and_of_one_phase_the_first_rank():
    last = failed(Phase.STAGE)
    assert refusal(proposal(), last) == (1, Phase.STAGE)
    assert refusal(last, failed(Phase.CHECK), failed(Phase.CHECK)) == (1, Phase.CHECK)
    assert refusal(last, failed(Phase.CHECK), failed(Phase.SETTLE)) == (2, Phase.SETTLE)
    assert refusal(failed(Phase.CONFIRM), failed(Phase.ROOM)) == (0, Phase.CONFIRM)


def test_ranks_at_different_saves_are_refused_before_what_comes_later_and_after_what_comes_before():
    other = replace(proposal(), step=8)
    assert refusal(failed(Phase.STAGE), other) == (1, Phase.AGREE)
    assert refusal(failed(Phase.CONFIRM), other) == (1, Phase.AGREE)
    assert refusal(failed(Phase.CHECK), other) == (0, Phase.CHECK)


def test_what_does_not_fit_is_refused_in_full_before_staging_counts_and_as_a_delta_after():
    assert refusal(proposal(n_bytes=600, room=NARROW), proposal(n_bytes=401, room=NARROW)) == (0, Phase.ROOM)
    assert refusal(proposal(n_bytes=600), proposal(n_bytes=400, room=NARROW)) is None
    assert refusal(proposal(n_bytes=2000, room=NARROW), failed(Phase.STAGE)) == (0, Phase.ROOM)
    assert decide([delta(1, 5000, NARROW)]).kind == Kind("b", n_links=3)
    assert refusal(delta(5, 5000, NARROW)) == (0, Phase.ROOM)


def test_a_delta_stands_in_for_a_full_save_that_is_due_where_any_rank_sees_no_room_for_that():
    due = Chain(3, 3, 100)
    assert decide([delta(1, 5000, WIDE, due)]).kind.name == "full"
    plan = decide([delta(1, 1000, WIDE, due), delta(1, 1000, NARROW, due)])
    assert (plan.kind.name, plan.displaced[:8], plan.refusal) == ("delta", "3 deltas", None)


def raised(plan, rank, own=None):
    with pytest.raises((RecckptError, ValueError)) as caught:
        plan.refusal.raise_on(rank, own, INFO)
    return caught.value


def test_a_rank_raises_its_own_error_and_the_others_that_of_the_first_rank():
    plan, own = decide([proposal(), failed(Phase.CHECK, "ValueError: no"), failed(Phase.CHECK)]), ValueError("mine")
    assert raised(plan, 2, own) is own
    other = raised(plan, 0)
    assert (type(other), other.rank, other.step) == (SaveFailedError, 1, 7)
    assert "failed on rank 1: ValueError: no" in str(other)


def test_an_error_of_the_storage_is_a_failure_of_the_save_and_its_cause():
    own = OSError(5, "down")
    error = raised(decide([failed(Phase.STAGE)]), 0, own)
    assert (type(error), error.rank, error.__cause__) == (SaveFailedError, 0, own)
    lacking = raised(decide([proposal(n_bytes=2000, room=NARROW)]), 1)
    assert (type(lacking), lacking.rank, lacking.__cause__.filename) == (SaveFailedError, 0, "here")


@pytest.mark.parametrize("phase", [Phase.SETTLE, Phase.CONFIRM])
def test_an_error_of_recckpt_that_is_of_all_ranks_is_raised_by_all_as_it_is(phase):
    first, own = WriterFencedError("taken over"), WriterFencedError("mine")
    plan = decide([failed(phase, first), failed(phase)])
    assert raised(plan, 1, own) is raised(plan, 2) is first
    assert raised(plan, 0, own) is own


def test_owners_are_compared_over_tables_that_some_ranks_have_beside_others():
    both, one = ("t", "u"), ("t",)
    halves = [{gen_slice(0, 2): both}, {gen_slice(1, 2): one}]
    assert why_shared(halves) is None
    assert why_shared([*halves, {None: ("u",)}]).startswith("table 'u': ranks 0 and 2 own the same ids: an id")
    assert why_shared([*halves, {None: ("t", "x")}]).startswith("table 't': ranks 0 and 2")
    assert "table 't': ranks 0 and 1" in why_shared([{None: both}] * 2)
