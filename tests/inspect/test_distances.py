"""Distances of rows, their quantiles, and rows found on both sides, held against float64 and a dict."""

from types import SimpleNamespace

import numpy as np
import pytest

from recckpt.format.buckets import bucket_of, mix64
from recckpt.inspect.diff_tables import paired
from recckpt.inspect.distances import SlotComparer
from recckpt.inspect.spread import QUANTILES, Histogram
from recckpt.types import SlotSpec


def moves(before, after, *, tolerance=0.0, dtype="float32"):
    before, after = np.array(before), np.array(after)
    spec = SlotSpec("embedding", dtype, before.shape[1:])
    rows = np.dtype((np.void, spec.row_bytes))
    sides = [np.ascontiguousarray(side).view(np.uint8).reshape(len(side), -1) for side in (before, after)]
    comparer = SlotComparer(spec, spec, tolerance)
    found = comparer.moves(*(side.view(rows)[:, 0] for side in sides))
    again = comparer.moves(*(side.view(rows)[:, 0] for side in sides))  # by the other way, where most rows changed
    for one, other in zip(found, again, strict=True):
        np.testing.assert_array_equal(one, other)
    return SimpleNamespace(**dict(zip(("rows", "l2", "cosine"), found, strict=True)))


@pytest.mark.parametrize("scale", [1e-38, 1e-25, 1e-3, 1.0, 1e25, 1e38])
@pytest.mark.parametrize("step", [1e-6, 1e-2, 1.0])
def test_distances_are_those_of_float64_whatever_the_scale(scale, step):
    draw = np.random.default_rng(0)
    before = (draw.uniform(-1, 1, (200, 6)) * scale).astype(np.float32)
    after = (before + draw.uniform(-1, 1, (200, 6)) * scale * step).astype(np.float32)
    found = moves(before, after)
    wide, other = before.astype(np.float64) / scale, after.astype(np.float64) / scale
    changed = (before != after).any(axis=1)
    assert (found.rows == np.flatnonzero(changed)).all()
    l2 = np.linalg.norm(other - wide, axis=1)[changed]
    np.testing.assert_allclose(found.l2 / scale, l2, rtol=1e-5)
    units = [side / np.linalg.norm(side, axis=1, keepdims=True) for side in (wide, other)]
    cosine = (np.square(units[1] - units[0]).sum(axis=1) / 2)[changed]
    np.testing.assert_allclose(found.cosine, cosine, rtol=1e-3, atol=1e-13)


@pytest.mark.parametrize(("factor", "noise"), [(0.9, 0.0), (0.9, 1e-4), (0.5, 1e-6), (-0.9, 1e-3), (1.001, 1e-5)])
def test_angles_of_rows_that_shrank_or_grew_are_those_of_float64(factor, noise):
    draw = np.random.default_rng(0)
    before = draw.normal(size=(200, 16)).astype(np.float32)
    after = (before * factor + draw.normal(size=(200, 16)) * noise).astype(np.float32)
    units = [side / np.linalg.norm(side, axis=1, keepdims=True) for side in np.float64([before, after])]
    cosine = np.square(units[1] - units[0]).sum(axis=1) / 2
    np.testing.assert_allclose(moves(before, after).cosine, cosine, rtol=1e-3, atol=0)


def test_a_nan_beside_a_nan_is_the_same_and_beside_a_number_a_change_without_a_distance():
    nan, inf = np.nan, np.inf
    before = np.array([[nan, 1], [nan, 1], [1, 1], [inf, 1], [inf, 1], [1, 1]], np.float32)
    after = np.array([[nan, 1], [2, 1], [1, nan], [inf, 1], [-inf, 1], [1, inf]], np.float32)
    found = moves(before, after)
    assert found.rows.tolist() == [1, 2, 4, 5]
    assert np.isnan(found.l2[:2]).all()
    assert (found.l2[2:] == inf).all()
    assert np.isnan(found.cosine).all()


def test_minus_zero_is_zero_and_the_least_of_all_steps_is_a_change():
    least = np.finfo(np.float32).smallest_subnormal
    found = moves(
        np.array([[0.0, 1], [0, 1], [1, 0]], np.float32), np.array([[-0.0, 1], [least, 1], [1, 0]], np.float32)
    )
    assert found.rows.tolist() == [1]
    assert found.l2[0] == pytest.approx(float(least))


def test_values_within_the_tolerance_are_the_same():
    before = np.zeros((4, 2), np.float32)
    after = np.array([[0.5, -0.5], [0.51, 0], [0, -0.51], [np.nan, 0]], np.float32)
    assert moves(before, after, tolerance=0.5).rows.tolist() == [1, 2, 3]


def test_rows_of_zeros_and_scalars_have_no_cosine_distance():
    found = moves(np.array([[0, 0], [3, 4]], np.float32), np.array([[3, 4], [0, 0]], np.float32))
    assert found.l2.tolist() == [5, 5]
    assert np.isnan(found.cosine).all()
    assert np.isnan(moves(np.array([1, 2], np.float32), np.array([2, 4], np.float32)).cosine).all()


def test_int64_is_compared_exactly_to_both_ends():
    before = np.array([[2**62], [-(2**63)], [5]], np.int64)
    found = moves(before, np.array([[2**62 + 1], [2**63 - 1], [5]], np.int64), dtype="int64")
    assert found.rows.tolist() == [0, 1]
    assert found.l2.tolist() == [1.0, 2.0**64]


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "uint8", "int16", "int32"])
def test_every_dtype_of_a_slot_is_compared(dtype):
    before = np.array([[3, 4, 1], [0, 0, 0]], dtype)
    assert moves(before, np.array([[3, 4, 1], [6, 8, 0]], dtype), dtype=dtype).l2.tolist() == [10]


def test_bfloat16_is_compared_as_numbers():
    bits = [
        np.array([[1.0, 2.0]], np.float32).view(np.uint32) >> 16,
        np.array([[1.0, 4.0]], np.float32).view(np.uint32) >> 16,
    ]
    assert moves(*(side.astype(np.uint16) for side in bits), dtype="bfloat16").l2.tolist() == [2.0]


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


def hashes(ids):
    """Return the hashes of ids in the order of their buckets, within one in the order of the ids."""
    ids = np.array(ids, np.int64)
    return mix64(ids[np.argsort(bucket_of(ids), kind="stable")].view(np.uint64))


EVERY = np.arange(3000) * 2**40 - 7


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (EVERY, EVERY),
        (EVERY, np.concatenate([EVERY, EVERY + 1])),  # new rows behind those that were there
        (EVERY, np.concatenate([EVERY + 1, EVERY])),  # before them
        (EVERY, EVERY[::-1]),  # another run
        (EVERY, np.concatenate([EVERY[::3], EVERY[1::3] + 5])),  # rows went, others came in their places
        (EVERY, EVERY[1500:]),
        (EVERY[:1], EVERY),
        (EVERY, EVERY + 1),
        (EVERY, []),
        ([], EVERY),
        ([], []),
    ],
)
def test_rows_are_paired_whatever_their_order_within_a_bucket(before, after):
    for one, other in ((hashes(before), hashes(after)), (hashes(after), hashes(before))):
        place = {int(value): number for number, value in enumerate(other)}
        expected = [(row, place[int(value)]) for row, value in enumerate(one) if int(value) in place]
        assert [(int(row), int(at)) for row, at in zip(*paired(one, other), strict=True)] == expected
