"""Sums over rows tell sets of rows apart, whatever order they come in."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recckpt.sparse.files.row_sums import RowSums

N_ROWS = 50
ROW_BYTES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 100]


def columns(row_bytes: list[int]) -> list[np.ndarray]:
    """Return ids and columns of random bytes, each item those of a row."""
    random = np.random.default_rng(0)
    return [
        random.integers(0, 256, N_ROWS * size, np.uint8).view(np.dtype((np.void, size))) for size in (8, *row_bytes)
    ]


def summed(found: list[np.ndarray], rows=slice(None), table: str = "t") -> RowSums:
    sums = RowSums()
    sums.add(table, found, rows)
    return sums


def test_the_order_of_rows_and_the_pieces_that_they_come_in_do_not_count():
    found = columns([4, 16])
    in_pieces = RowSums()
    for rows in np.array_split(np.random.default_rng(1).permutation(N_ROWS), 7):
        in_pieces.add("t", [column[rows] for column in found], slice(None))
    assert in_pieces == summed(found)


@pytest.mark.parametrize("row_bytes", ROW_BYTES)
def test_every_bit_of_a_row_counts(row_bytes):
    found = columns([row_bytes])
    expected = summed(found)
    for column in found:
        values = column.view(np.uint8)
        for bit in range(8 * column.dtype.itemsize):
            values[bit // 8] ^= 1 << bit % 8
            assert summed(found) != expected
            values[bit // 8] ^= 1 << bit % 8
    assert summed(found) == expected


@given(st.sampled_from(ROW_BYTES[1:]), st.sets(st.integers(0, 2**20), min_size=1, max_size=6))
def test_no_bits_that_flip_together_cancel(row_bytes, bits):
    ids, found = columns([row_bytes])
    expected = summed([ids, found])
    flipped = np.zeros(8 * row_bytes, np.uint8)
    flipped[[bit % len(flipped) for bit in bits]] = 1
    first = found.view(np.uint8)[:row_bytes]
    first ^= np.packbits(flipped)
    assert summed([ids, found]) != expected


@pytest.mark.parametrize("row_bytes", [8, 16, 24, 64])
def test_no_two_bits_of_a_row_cancel(row_bytes):
    ids, found = columns([row_bytes])
    expected = summed([ids[:1], found[:1]])
    highest = range(7, 8 * row_bytes, 8)  # of each byte: among them the sign of every number
    values = found.view(np.uint8)
    for one in highest:
        for other in range(7, one, 8):
            for bit in (one, other):
                values[bit // 8] ^= 1 << bit % 8
            assert summed([ids[:1], found[:1]]) != expected
            for bit in (one, other):
                values[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rows_of_which_every_number_has_the_other_sign_are_others(dtype):
    ids, values = np.arange(N_ROWS).view("V8"), np.random.default_rng(0).normal(size=(N_ROWS, 16)).astype(dtype)
    row = f"V{values[0].nbytes}"
    expected = summed([ids, values.view(row).reshape(-1)])
    for changed in (-values, values * np.resize([1, -1], 16).astype(dtype), values[:, ::-1].copy()):
        assert summed([ids, changed.view(row).reshape(-1)]) != expected


def test_values_of_another_id_or_column_or_table_are_other_rows():
    ids, one, two = columns([12, 12])
    expected = summed([ids, one, two])
    assert summed([ids, np.roll(one, 1), two]) != expected
    assert summed([ids, np.roll(one, 1), np.roll(two, 1)]) != expected
    assert summed([ids, two, one]) != expected
    assert summed([ids, one, two], table="other") != expected


def test_rows_that_are_missing_or_there_twice_count():
    found = columns([8])
    assert summed(found, np.arange(N_ROWS - 1)) != summed(found)
    assert summed(found, np.array([0, *range(N_ROWS)])) != summed(found)


def test_no_rows_are_as_good_as_no_table():
    assert summed(columns([8]), np.arange(0)) == RowSums()
