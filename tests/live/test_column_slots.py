"""The slots of a part of a table by columns, and those of whole rows."""

import pytest

from recckpt.format.tables import LiveLayout
from recckpt.live.column_slots import layout_of, misfit_of, place_in_row, whole_spec
from recckpt.types import Box, SlotSpec

BOX = Box((0, 9), columns=((0, 8), (8, 12)), part=1)
EMBEDDING, BY_COLUMNS, OF_ROW = (
    SlotSpec("embedding", "float32", (4,)),
    SlotSpec("sparse_adagrad_sum", "bfloat16", (4,)),
    SlotSpec("sparse_rowwise_adagrad_sum", "float32", ()),
)


def test_whole_rows_have_the_columns_of_all_ranks_and_a_value_for_each_range():
    assert [whole_spec(spec, BOX).shape for spec in (EMBEDDING, BY_COLUMNS, OF_ROW)] == [(12,), (12,), (2,)]
    assert [place_in_row(spec, BOX, 1) for spec in (EMBEDDING, BY_COLUMNS, OF_ROW)] == [(32, 48), (16, 24), (4, 8)]
    assert [place_in_row(spec, BOX, 0) for spec in (EMBEDDING, BY_COLUMNS, OF_ROW)] == [(0, 32), (0, 16), (0, 4)]
    assert whole_spec(OF_ROW, Box((0, 9))) == OF_ROW


def test_ranges_are_named_where_a_slot_has_a_value_for_each():
    assert layout_of(9, [EMBEDDING, BY_COLUMNS], BOX) == LiveLayout(9)
    assert layout_of(9, [EMBEDDING, OF_ROW], BOX) == LiveLayout(9, BOX.columns)
    assert layout_of(9, [EMBEDDING, OF_ROW], Box((0, 9))) == LiveLayout(9)


@pytest.mark.parametrize(("name", "shape"), [("embedding", ()), ("embedding", (8,)), ("sparse_x", (4, 2))])
def test_slots_that_do_not_fit_the_box_are_named(name, shape):
    assert misfit_of(EMBEDDING, BOX) is misfit_of(BY_COLUMNS, BOX) is misfit_of(OF_ROW, BOX) is None
    assert misfit_of(SlotSpec(name, "float32", shape), BOX).startswith("4 columns")
    assert misfit_of(SlotSpec(name, "float32", shape), Box((0, 9))) is None
