"""Quantiles in bounded memory, held against those of all values."""

import numpy as np
import pytest

from recckpt.inspect.spread import QUANTILES, Histogram


@pytest.mark.parametrize("scale", [1e-300, 1e-6, 1.0, 1e300])
def test_quantiles_are_within_their_bound_and_the_ends_are_exact(scale):
    values = np.random.default_rng(0).lognormal(0, 2, 200_001) * scale
    halves = Histogram(), Histogram()
    for piece in np.array_split(values, 7):
        halves[len(piece) % 2].add(piece)
    halves[0].merge(halves[1])
    found = halves[0].spread()
    assert (found.n, found.not_finite) == (len(values), 0)
    assert (found.least, found.most) == (values.min(), values.max())
    exact = np.quantile(values, QUANTILES, method="inverted_cdf")
    np.testing.assert_allclose(list(found.quantiles.values()), exact, rtol=0.004)


def test_what_is_not_finite_is_counted_apart():
    counted = Histogram()
    counted.add(np.array([np.nan, 1.0, np.inf]))
    found = counted.spread()
    assert (found.n, found.not_finite, found.least, found.most) == (1, 2, 1.0, 1.0)
    assert set(found.quantiles.values()) == {1.0}
    nothing = Histogram()
    assert nothing.spread() is None
    nothing.add(np.array([np.nan]))
    assert (nothing.spread().n, nothing.spread().not_finite) == (0, 1)


def test_zeros_are_values():
    counted = Histogram()
    counted.add(np.array([0.0, 0.0, 2.0]))
    found = counted.spread()
    assert (found.least, found.quantiles[0.5], found.most) == (0.0, 0.0, 2.0)
    assert counted.bars(10).zeros == 2
    counted.add(np.array([0.0]))
    assert (counted.spread().n, counted.n_above(0.0), counted.n_that_carry(0.8)) == (4, 1, 1)
    only = Histogram()
    only.add(np.zeros(3))
    assert (only.spread().quantiles[0.99], only.bars(10).counts, only.n_that_carry(0.8)) == (0.0, (), 0)


def test_bars_hold_every_value_between_their_edges():
    values = np.random.default_rng(1).lognormal(0, 3, 5000)
    counted = Histogram()
    counted.add(values)
    bars = counted.bars(40)
    assert len(bars.counts) <= 40
    assert bars.counts == tuple(np.histogram(values, bars.edges)[0])
