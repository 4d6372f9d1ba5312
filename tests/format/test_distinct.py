"""Sets of ids as sorted arrays."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recckpt.format.distinct import distinct, is_among, repeated

IDS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5), max_size=30).map(
    lambda ids: np.array(ids, np.int64)
)


@given(IDS, IDS)
def test_they_are_those_of_a_set(some, others):
    assert distinct(some).tolist() == sorted(set(some.tolist()))
    assert distinct(some, others).tolist() == sorted({*some.tolist(), *others.tolist()})
    assert repeated(some).tolist() == sorted({id_ for id_ in some.tolist() if some.tolist().count(id_) > 1})
    assert is_among(some, np.sort(others)).tolist() == [id_ in set(others.tolist()) for id_ in some.tolist()]
