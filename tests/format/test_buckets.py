"""x"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recckpt.format.buckets import N_BUCKETS, Slice, bucket_of, distinct, gen_slice, is_among, mix64, repeated

EDGES = np.array([-(2**63), -(2**63) + 1, -1, 0, 1, 2**63 - 2, 2**63 - 1], np.int64)
IDS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5), max_size=30).map(
    lambda ids: np.array(ids, np.int64)
)


def ids_of(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, n)


def test_mix64_is_the_finaliser_of_splitmix64():
    # the first outputs of splitmix64 seeded with 0, from the reference C code
    gamma = np.uint64(0x9E3779B97F4A7C15)
    states = np.arange(1, 4, dtype=np.uint64) * gamma
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [int(value) for value in mix64(states)] == expected


def test_buckets_of_the_format_never_change():
    ids = np.array([0, 1, -1, 2**63 - 1, -(2**63)], np.int64)
    assert bucket_of(ids).tolist() == [mixed(int(i)) >> 48 for i in ids]
    assert bucket_of(ids)[:3].tolist() == [0, 0x5692, 0xB4D0]


def mixed(id_: int) -> int:
    """mix64 in Python integers."""
    z = id_ % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_buckets_of_consecutive_ids_are_even():
    counts = np.bincount(bucket_of(np.arange(1 << 20)) >> 8, minlength=256)
    assert counts.min() > 3_700
    assert counts.max() < 4_500


@pytest.mark.parametrize("shard_num", [1, 2, 3, 7, 64, 1000])
@pytest.mark.parametrize("slice_size", [1000, 65536])
def test_the_slices_of_all_shards_tile_the_id_space(shard_num, slice_size):
    slices = [gen_slice(i, shard_num, slice_size) for i in range(shard_num)]
    assert slices[0].begin == 0
    assert slices[-1].end == slice_size
    assert all(a.end == b.begin for a, b in itertools.pairwise(slices))
    ids = np.concatenate([EDGES, ids_of(2000)])
    assert (sum(part.owns(ids).astype(int) for part in slices) == 1).all()


def test_owns_takes_arrays_and_tensors_of_any_shape():
    half = gen_slice(1, 2)
    ids = ids_of(12).reshape(3, 4)
    mask = half.owns(torch.from_numpy(ids))
    assert mask.dtype == torch.bool
    assert mask.shape == (3, 4)
    assert (mask.numpy() == half.owns(ids)).all()


def test_meets_agrees_with_owns():
    part = Slice(300, 301, 1000)
    ids = ids_of(20_000)
    for bucket in np.unique(bucket_of(ids[part.owns(ids)])):
        assert part.meets(int(bucket), int(bucket) + 1)
    assert not part.meets(0, 100)
    assert not part.meets(19_700, 19_700)


def test_the_whole_space_is_everything_and_a_part_is_not():
    assert Slice(0, N_BUCKETS).is_everything
    assert gen_slice(0, 1, 1000).is_everything
    assert not gen_slice(0, 2).is_everything


@pytest.mark.parametrize("args", [(-1, 2, 4), (3, 2, 4), (0, 5, 4), (0, 0, 0), (0, 1, N_BUCKETS + 1)])
def test_a_slice_refuses_bounds_that_are_none(args):
    with pytest.raises(ValueError, match="begin"):
        Slice(*args)


@pytest.mark.parametrize("args", [(0, 0), (-1, 2), (2, 2), (0, 65537), (0, 11, 10)])
def test_gen_slice_refuses_shards_that_are_none(args):
    with pytest.raises(ValueError, match="shard"):
        gen_slice(*args)


@given(IDS, IDS)
def test_they_are_those_of_a_set(some, others):
    assert distinct(some).tolist() == sorted(set(some.tolist()))
    assert distinct(some, others).tolist() == sorted({*some.tolist(), *others.tolist()})
    assert repeated(some).tolist() == sorted({id_ for id_ in some.tolist() if some.tolist().count(id_) > 1})
    assert is_among(some, np.sort(others)).tolist() == [id_ in set(others.tolist()) for id_ in some.tolist()]
