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


def test_a_policy_is_a_value():
    assert pickle.loads(pickle.dumps(Deltas(7))) == Deltas(full_every=7)
    assert len({Deltas(), Deltas(20)}) == 1
    with pytest.raises(FrozenInstanceError):
        Deltas().full_every = 3


@pytest.mark.parametrize(("given_as", "policy"), [(True, Deltas()), (False, None), (Deltas(3), Deltas(3))])
def test_an_argument_stands_for_a_policy(given_as, policy):
    assert as_deltas(given_as) == policy


def test_without_a_base_a_save_is_full():
    assert Deltas().why_full(None, 0, 100) == "there is no checkpoint to count changes from"


def test_a_save_in_which_more_than_half_of_the_rows_changed_is_full():
    assert Deltas().why_full(chain(), 50, 100) is None
    assert Deltas().why_full(chain(), 51, 100) == "51 of 100 rows have changed, more than the part 0.5 (max_dirty)"


def test_a_model_without_rows_is_saved_in_full_since_a_delta_would_save_nothing():
    assert Deltas().why_full(chain(), 0, 0) == "there are no rows"


def test_a_save_is_full_after_so_many_deltas():
    assert Deltas(full_every=3).why_full(chain(2), 1, 100) is None
    reason = Deltas(full_every=3).why_full(chain(3), 1, 100)
    assert reason == "3 deltas since the last full one, the most is 3 (full_every)"


def test_a_save_is_full_once_the_deltas_have_more_bytes_than_the_full_one():
    assert Deltas().why_full(chain(1, FULL), 1, 100) is None
    reason = Deltas().why_full(chain(1, FULL + 1), 1, 100)
    assert reason == "1001 bytes of deltas on 1000 of the full one, the most is 1.0 times as many (max_chain_bytes)"


@pytest.mark.parametrize("long", [chain(20), chain(1, FULL + 1)])
def test_a_long_chain_is_compacted_where_that_is_asked_for_and_the_save_is_a_delta(long):
    assert Deltas().why_compact(long) is None
    assert Deltas(compact=True).why_compact(long) == Deltas().why_full(long, 1, 100)
    assert Deltas(compact=True).why_full(long, 1, 100) is None


@pytest.mark.parametrize("longer", [chain(40), chain(1, 2 * FULL + 1)])
def test_a_save_is_full_where_no_compaction_has_come_in_time(longer):
    assert Deltas(compact=True).why_full(chain(39, 2 * FULL), 1, 100) is None
    assert Deltas(compact=True).why_full(longer, 1, 100) is not None


def test_no_chain_grows_longer_than_readers_take():
    patient = Deltas(full_every=MAX_DELTAS, compact=True)
    assert patient.why_full(chain(MAX_DELTAS - 1), 1, 100) is None
    assert patient.why_full(chain(MAX_DELTAS), 1, 100) is not None


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
