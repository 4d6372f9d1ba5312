"""Values of ranges of columns, brought to other ranges and to whole rows."""

import torch

from recckpt.sparse.files.column_ranges import regrouped

TWO, THREE = ((0, 8), (8, 12)), ((0, 4), (4, 8), (8, 12))
VALUES = torch.tensor([[3.0, 6.0], [0.0, 3.0]])


def test_a_whole_row_gets_the_mean_by_widths():
    assert regrouped(VALUES, TWO, ()).tolist() == [4.0, 1.0]
    assert regrouped(VALUES.to(torch.bfloat16), TWO, ()).dtype == torch.bfloat16


def test_other_ranges_each_get_the_value_of_the_whole_row():
    assert regrouped(torch.tensor([5.0, 7.0]), (), TWO).tolist() == [[5.0, 5.0], [7.0, 7.0]]
    assert regrouped(VALUES, TWO, THREE).tolist() == [[4.0] * 3, [1.0] * 3]


def test_the_same_ranges_get_the_same_values():
    assert regrouped(VALUES, TWO, TWO) is VALUES
