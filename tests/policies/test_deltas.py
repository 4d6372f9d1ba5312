"""Full or delta: decided by counts, and held against a saver that counts what it has written."""

import pickle
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recckpt.policies.deltas import MAX_DELTAS, Chain, Deltas, as_deltas

FULL = 1000  # bytes


def chain(n_deltas: int = 0, delta_bytes: int = 0) -> Chain:
    return Chain(n_deltas, delta_bytes, FULL)


def test_a_policy_is_a_value_for_which_an_argument_may_stand():
    assert pickle.loads(pickle.dumps(Deltas(7))) == Deltas(full_every=7)
    assert len({Deltas(), Deltas(20)}) == 1
    with pytest.raises(FrozenInstanceError):
        Deltas().full_every = 3
    assert [as_deltas(given) for given in (True, False, Deltas(3))] == [Deltas(), None, Deltas(3)]


@pytest.mark.parametrize(
    ("deltas", "base", "n_changed", "n_rows", "why"),
    [
        (Deltas(), None, 0, 100, "there is no checkpoint to count changes from"),
        (Deltas(), chain(), 50, 100, None),
        (Deltas(), chain(), 51, 100, "51 of 100 rows have changed, more than a share of 0.5 (max_dirty)"),
        (Deltas(), chain(), 0, 0, "there are no rows"),  # and a delta would save nothing
        (Deltas(3), chain(2), 1, 100, None),
        (Deltas(3), chain(3), 1, 100, "3 deltas since the last full checkpoint, the limit is 3 (full_every)"),
        (Deltas(), chain(1, FULL), 1, 100, None),
        (
            *(Deltas(), chain(1, FULL + 1), 1, 100),
            "1001 bytes of deltas, 1000 of the full checkpoint, the limit is 1.0 times that (max_chain_bytes)",
        ),
    ],
)
def test_a_save_is_full_where_a_delta_would_save_little(deltas, base, n_changed, n_rows, why):
    assert deltas.why_full(base, n_changed, n_rows) == why


def test_a_long_chain_is_compacted_where_that_is_asked_for_or_the_save_is_full_where_none_has_come_in_time():
    compact, patient = Deltas(compact=True), Deltas(full_every=MAX_DELTAS, compact=True)
    for long in (chain(20), chain(1, FULL + 1)):
        assert Deltas().why_compact(long) is None
        assert compact.why_compact(long) == Deltas().why_full(long, 1, 100)
        assert compact.why_full(long, 1, 100) is None
    assert compact.why_full(chain(39, 2 * FULL), 1, 100) is None
    assert patient.why_full(chain(MAX_DELTAS - 1), 1, 100) is None  # and none grows longer than readers take
    for policy, longer in ((compact, chain(40)), (compact, chain(1, 2 * FULL + 1)), (patient, chain(MAX_DELTAS))):
        assert policy.why_full(longer, 1, 100) is not None


@given(
    st.builds(Deltas, st.integers(1, 8), st.floats(0.1, 3), st.floats(0.05, 1)),
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 400)), min_size=1, max_size=60),
)
def test_the_deltas_of_a_run_stay_within_the_limits(deltas, saves):
    base, n_since = None, 0
    for n_changed, n_bytes in saves:
        if deltas.why_full(base, n_changed, 100) is not None:
            base, n_since = chain(), 0
        else:
            assert n_changed <= deltas.max_dirty * 100
            assert base.delta_bytes <= deltas.max_chain_bytes * FULL  # a delta may pass it, and is the last one then
            base, n_since = chain(n_since + 1, base.delta_bytes + n_bytes), n_since + 1
        assert n_since <= deltas.full_every
