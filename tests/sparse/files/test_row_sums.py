"""Sums over rows tell sets of rows apart, whatever order they come in."""

import numpy as np
import pytest

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
