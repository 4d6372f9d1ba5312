"""Whether a save is full or a delta: one answer from what all ranks propose."""

from recckpt.policies.deltas import Chain, Deltas
from recckpt.save.full_or_delta import FULL, DeltaProposal, Kind, TableChanges, agreed_kind, spared_bytes

POLICY = Deltas(full_every=3)


def proposal(base="b", chain=None, **tables):
    """Return what a rank proposes, of tables as (changed, rows), or (changed, rows, True) where it has to hold all."""
    rows = {name: (changed, rows, 10, bool(rest), False) for name, (changed, rows, *rest) in tables.items()}
    return DeltaProposal(POLICY, base, chain, TableChanges.of(rows))


CHAIN = Chain(1, 10, 100)


def test_where_all_ranks_count_from_one_checkpoint_it_is_a_delta():
    ranks = [proposal(chain=CHAIN, t=(3, 10)), proposal(t=(0, 5))]
    assert agreed_kind(ranks) == Kind("b", n_links=3)
    assert [spared_bytes(agreed_kind(ranks), rank) for rank in ranks] == [70, 50]


def test_a_table_that_is_replaced_on_one_rank_is_on_all():
    ranks = [proposal(chain=CHAIN, t=(0, 10), u=(0, 100)), proposal(t=(5, 5, True), u=(0, 100))]
    assert agreed_kind(ranks) == Kind("b", frozenset({"t"}), n_links=3)
    assert [spared_bytes(agreed_kind(ranks), rank) for rank in ranks] == [1000, 1000]


def test_a_table_that_some_ranks_do_not_have_may_be_in_a_delta():
    assert agreed_kind([proposal(chain=CHAIN, t=(0, 10)), proposal(u=(0, 5))]).name == "delta"


def test_rows_are_counted_over_all_ranks_those_of_replaced_tables_as_changed():
    assert agreed_kind([proposal(chain=CHAIN, t=(5, 10)), proposal(t=(5, 10))]).name == "delta"
    assert "11 of 20 rows have changed" in agreed_kind([proposal(chain=CHAIN, t=(5, 10)), proposal(t=(6, 10))]).why_full
    ranks = [proposal(chain=CHAIN, t=(0, 8)), proposal(t=(1, 7, True))]
    assert "15 of 15 rows have changed" in agreed_kind(ranks).why_full
    assert [spared_bytes(agreed_kind(ranks), rank) for rank in ranks] == [0, 0]


def test_where_a_rank_has_another_base_or_none_the_save_is_full():
    for other in (proposal("another", t=(0, 5)), proposal(None, t=(0, 5)), None):
        kind = agreed_kind([proposal(chain=CHAIN, t=(0, 5)), other])
        assert (kind.name, kind.n_links) == ("full", 1)
        assert kind.why_full == "rank 1 counts changes from another checkpoint, or none"


def test_where_rank_0_has_no_base_the_save_is_full_and_where_it_writes_no_deltas_nothing_is_said():
    assert agreed_kind([proposal(None, t=(0, 5))] * 2).why_full == "there is no checkpoint to count changes from"
    assert agreed_kind([None, proposal(t=(0, 5))]) == FULL
    assert FULL.why_full is None


def test_a_full_save_that_the_policy_asks_for_has_a_delta_to_stand_in_for_it_and_one_that_must_be_has_none():
    due = agreed_kind([proposal(chain=Chain(3, 3, 100), t=(1, 5), u=(2, 2, True))])
    assert (due.name, due.stand_in) == ("full", Kind("b", frozenset({"u"}), n_links=5))
    assert agreed_kind([proposal(chain=CHAIN, t=(5, 5))]).stand_in == Kind("b", n_links=3)
    must = [
        [proposal(None, t=(0, 5))],
        [proposal(chain=Chain(999, 3, 100), t=(0, 5))],
        [proposal(chain=CHAIN, t=(0, 5)), None],
    ]
    assert [agreed_kind(ranks).stand_in for ranks in must] == [None] * 3


def test_a_chain_that_is_long_enough_is_ended():
    assert agreed_kind([proposal(chain=Chain(3, 3, 100), t=(0, 5))]).why_full.startswith(
        "3 deltas since the last full one"
    )
