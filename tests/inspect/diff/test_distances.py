"""Distances of rows, held against float64 done by hand."""

import numpy as np
import pytest

from recckpt.inspect.diff.distances import SlotComparer
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
    return found


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
