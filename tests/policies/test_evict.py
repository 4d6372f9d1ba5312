"""What to evict: each policy looks at columns of numpy, without a table."""

import math
from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recckpt.policies.evict import (
    NORM,
    Capacity,
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


def test_a_row_goes_when_it_was_looked_up_long_ago_or_too_few_times_or_is_short_and_stays_without_a_length():
    assert evicted(Unseen(steps=10), last_step=[0, 89, 90, 91, 100, 200]) == [0, 1]
    now = At(0, 10.0 * DAY)
    assert evicted(UnseenFor(days=2.5), now, last_time=[0.0, 7.4 * DAY, 7.5 * DAY, 20.0 * DAY]) == [0, 1]
    assert evicted(LowCount(3), count=[0, 2, 3, 1000]) == [0, 1]
    assert evicted(SmallNorm(1e-3), **{NORM: [0.0, 9e-4, 1e-3, 2.0, math.nan]}) == [0, 1]


def test_policies_that_are_joined_evict_what_each_of_them_would():
    both = LowCount(2) & Unseen(steps=10)
    assert evicted(both, count=[1, 1, 5, 5], last_step=[0, 95, 0, 95]) == [0]
    assert both.needs == ("count", "last_step")
    assert repr(both & SmallNorm(1)) == "LowCount(n=2) & Unseen(steps=10) & SmallNorm(x=1)"
    assert both & SmallNorm(1) == LowCount(2) & (Unseen(steps=10) & SmallNorm(1))


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
