"""Ids that are row numbers."""

import numpy as np

from recckpt.live.row_range import RowRange


def test_the_id_of_a_row_is_its_number_from_the_first_on():
    ids = RowRange(100, 5)
    assert ids.to_tensor(3).tolist() == [100, 101, 102]
    assert ids.gather(np.array([4, 0], np.uint32)).tolist() == [104, 100]
    target = np.zeros(16, np.uint8)
    ids.gather_into(np.array([1, 3], np.uint32), target)
    assert target.view(np.int64).tolist() == [101, 103]


def test_pieces_cover_a_range_of_rows_in_order():
    ids = RowRange(10, 300_000)
    pieces = list(ids.pieces(5, 300_000))
    assert len(pieces) == 3
    assert np.array_equal(np.concatenate([piece.numpy() for piece in pieces]), np.arange(15, 300_010))
