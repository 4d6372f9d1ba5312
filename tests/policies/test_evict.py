"""What to evict: each policy looks at columns of numpy, without a table."""

import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recckpt.policies.evict import (
    NORM,
    Capacity,
    EvictedByAll,
    LowCount,
    SmallNorm,
    Unseen,
    UnseenFor,
    first_rows,
)

DAY = 86_400


class At(NamedTuple):
    step: int
    time: float


NOW = At(100, 1e9)


def evicted(policy, now=NOW, **columns):
    """The places of the rows that go."""
    rows = {name: np.array(values) for name, values in columns.items()}
    return np.flatnonzero(policy.evicted(rows, now)).tolist()


def test_a_row_goes_when_its_last_look_up_is_more_steps_ago():
    assert evicted(Unseen(steps=10), last_step=[0, 89, 90, 91, 100, 200]) == [0, 1]


def test_a_row_goes_when_its_last_look_up_is_more_days_ago():
    now = At(0, 10.0 * DAY)
    assert evicted(UnseenFor(days=2.5), now, last_time=[0.0, 7.4 * DAY, 7.5 * DAY, 20.0 * DAY]) == [0, 1]


def test_a_row_goes_when_it_was_looked_up_too_few_times():
    assert evicted(LowCount(3), count=[0, 2, 3, 1000]) == [0, 1]


def test_a_row_goes_when_its_embedding_is_short_and_stays_when_it_has_no_length():
    assert evicted(SmallNorm(1e-3), **{NORM: [0.0, 9e-4, 1e-3, 2.0, math.nan]}) == [0, 1]


def test_policies_that_are_joined_evict_what_each_of_them_would():
    both = LowCount(2) & Unseen(steps=10)
    assert evicted(both, count=[1, 1, 5, 5], last_step=[0, 95, 0, 95]) == [0]
    assert both.needs == ("count", "last_step")
    assert repr(both & SmallNorm(1)) == "LowCount(n=2) & Unseen(steps=10) & SmallNorm(x=1)"
    assert both & SmallNorm(1) == LowCount(2) & (Unseen(steps=10) & SmallNorm(1))


@pytest.mark.parametrize("n", [0, -1, 2.5, "3", True, None, 2**53 + 1])
@pytest.mark.parametrize("make", [lambda n: Unseen(steps=n), LowCount, Capacity])
def test_a_number_that_counts_nothing_is_refused(make, n):
    with pytest.raises(
        ValueError, match=r"(Unseen: steps|LowCount: n|Capacity: n) must be (an int of )?at (least|most)"
    ):
        make(n)


@pytest.mark.parametrize("number", [0, -1, "3", True, None, math.nan, math.inf, 10**400])
@pytest.mark.parametrize("make", [lambda n: UnseenFor(days=n), SmallNorm, lambda n: Capacity(10, room=n)])
def test_a_number_that_measures_nothing_is_refused(make, number):
    with pytest.raises(ValueError, match="must be a finite number above 0, found"):
        make(number)


def test_days_by_which_no_row_ever_goes_are_refused():
    with pytest.raises(ValueError, match=r"UnseenFor: days must be at most 104249991374, found 1e\+300"):
        UnseenFor(days=1e300)


def test_what_a_capacity_cannot_go_by_is_refused():
    for by in ("embedding", None, "", "step"):
        with pytest.raises(ValueError, match="Capacity: by must be 'last_step' or 'count', found"):
            Capacity(10, by=by)
    with pytest.raises(ValueError, match=r"room must be at most 0\.5, found 0\.6"):
        Capacity(10, room=0.6)


@pytest.mark.parametrize("other", [3, None, Unseen, Capacity(10), [LowCount(2)]])
def test_what_is_not_a_policy_of_one_row_cannot_be_joined(other):
    with pytest.raises(ValueError, match="expected policies that look at one row"):
        LowCount(2) & other
    with pytest.raises(ValueError, match="expected policies"):
        EvictedByAll(LowCount(2), other)


@given(
    rows=st.lists(st.tuples(st.integers(0, 5), st.integers(-20, 20)), unique_by=lambda row: row[1]),
    n=st.integers(0, 45),
)
def test_the_first_rows_are_those_that_a_sort_by_value_and_id_puts_first(rows, n):
    by, ids = (np.array([row[i] for row in rows], np.int64) for i in (0, 1))
    mask = first_rows(by, ids, n)
    assert [row for row, is_first in zip(rows, mask, strict=True) if not is_first] == [
        row for row in rows if row not in sorted(rows)[:n]
    ]


def test_a_capacity_takes_from_a_part_what_is_beyond_its_share_and_no_more_than_is_beyond_the_whole():
    capacity = Capacity(1000, room=0.2)
    assert capacity.target == 800
    assert capacity.excess(n_rows=800, n_in_part=150, share=0.1) == 0
    assert capacity.excess(n_rows=820, n_in_part=150, share=0.1) == 20
    assert capacity.excess(n_rows=900, n_in_part=90, share=0.1) == 10
    assert capacity.excess(n_rows=900, n_in_part=70, share=0.1) == 0
    assert [capacity.is_crowded(n) for n in (800, 900, 901)] == [False, False, True]
    assert [capacity.pace(n) for n in (0, 800, 875, 876, 887, 888, 901)] == [1, 1, 1, 2, 2, 4, 4]
