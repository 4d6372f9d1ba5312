"""What admits rows, and how large a Bloom filter is, are pure functions."""

import numpy as np
import pytest

from recckpt.policies.admit import Admit, AdmitIf, Bloom, Geometry, MinCount, Probability, as_admit, false_positives

IDS = np.arange(-20_000, 20_000)
ONES = np.ones(len(IDS), np.int64)


def test_min_count_admits_with_the_nth_occurrence():
    assert MinCount(3).admits(np.arange(4), np.array([1, 2, 3, 4]), 0).tolist() == [False, False, True, True]


@pytest.mark.parametrize("p", [0.01, 0.1, 0.9, 1])
def test_a_probability_is_that_part_of_the_ids_at_every_step_and_others_at_each(p):
    masks = [Probability(p).admits(IDS, ONES, step) for step in range(4)]
    for mask in masks:
        assert mask.mean() == pytest.approx(p, rel=0.15)
    both = (masks[0] & masks[1]).mean()
    assert both == pytest.approx(p * p, rel=0.15, abs=2e-4)
    assert (Probability(p).admits(IDS, ONES, 3) == masks[3]).all()


def test_a_function_is_a_policy_and_so_is_a_class_of_ones_own():
    policy = as_admit(lambda ids, step: ids > step)
    assert isinstance(policy, AdmitIf)
    assert policy.admits(np.array([1, 5]), np.ones(2), 3).tolist() == [False, True]
    assert as_admit(MinCount(2)) == MinCount(2)
    assert all(isinstance(some, Admit) for some in (policy, MinCount(2), Probability(0.5)))


@pytest.mark.parametrize(("capacity", "error"), [(10**7, 0.01), (10**8, 0.001), (10**6, 0.1)])
def test_a_filter_is_the_smallest_that_has_the_error(capacity, error):
    bloom = Bloom(capacity, error)
    assert bloom.nbytes == 65_536 * 256 * bloom.geometry.blocks
    assert false_positives(capacity, bloom.geometry.blocks) <= error
    assert bloom.geometry.blocks == 1 or false_positives(capacity, bloom.geometry.blocks - 1) > error


def test_the_figures_of_the_docs():
    assert Bloom(10_000_000, 0.01).geometry == Geometry(7, 4)
    assert Bloom(10_000_000, 0.01).nbytes >> 20 == 112
    assert Bloom(1000, 0.01).nbytes >> 20 == 16
