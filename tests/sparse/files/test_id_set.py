"""Which batches may have some ids, held against a look at each id."""

import numpy as np
from hypothesis import strategies as st
from support.drawn import drawn

from recckpt.format.buckets import bucket_of
from recckpt.sparse.files.id_set import IdSet

IDS = st.sets(st.integers(-20, 20) | st.sampled_from([-(2**63), 2**63 - 1]))
BUCKETS = st.tuples(st.integers(0, 65536), st.integers(0, 65536)).map(lambda pair: tuple(sorted(pair)))
RANGES = st.tuples(st.integers(-25, 25), st.integers(-25, 25)).map(lambda pair: tuple(sorted(pair)))
EVERY = (-(2**63), 2**63 - 1)


@drawn(IDS, BUCKETS, RANGES | st.none() | st.just(EVERY), few=100, many=2000)
def test_a_batch_may_have_an_id_that_is_in_its_buckets_and_in_its_range(ids, buckets, ranged):
    ordered = np.array(sorted(ids), np.int64)
    least, greatest = ranged or EVERY
    of_ids = zip(ordered.tolist(), bucket_of(ordered).tolist(), strict=True)
    met = any(buckets[0] <= bucket < buckets[1] and least <= id_ <= greatest for id_, bucket in of_ids)
    assert IdSet(ordered).meets(buckets, ranged) == met
