"""What the ranks have of a table, by rows and by columns, and whether that makes up the table."""

import pytest
import torch
from support.checkpointable import describe
from torch import nn

from recckpt.format.tables import LiveLayout
from recckpt.live import live_tables
from recckpt.live.boxes import RankPart, column_ranges, layout_of, misfit_of, place_in_row, problem_of, whole_spec
from recckpt.types import Box, SlotSpec

SLOTS = (SlotSpec("embedding", "float32", (4,)),)
BOX = Box((0, 9), columns=((0, 8), (8, 12)), part=1)
EMBEDDING, BY_COLUMNS, OF_ROW = (
    SlotSpec("embedding", "float32", (4,)),
    SlotSpec("sparse_adagrad_sum", "bfloat16", (4,)),
    SlotSpec("sparse_rowwise_adagrad_sum", "float32", ()),
)


def parts(*rows, n_rows=10, **options):
    return [RankPart(n_rows, own, slots=SLOTS if own[0] < own[1] else (), **options) for own in rows]


def columns(*boxes, slots=("embedding",), width=12):
    return [
        RankPart(
            10, rows, (begin, end), width, slots=tuple(SlotSpec(name, "float32", (end - begin,)) for name in slots)
        )
        for rows, (begin, end) in boxes
    ]


HALVES = [((0, 10), (0, 8)), ((0, 10), (8, 12))]
GRID = [(rows, part) for rows in ((0, 6), (6, 10)) for part in ((0, 4), (4, 12))]


@pytest.mark.parametrize(
    ("of_ranks", "problem"),
    [
        *(
            (parts(*rows), None)
            for rows in (
                [(0, 10)],
                [(0, 4), (4, 10)],
                [(4, 10), (0, 4)],
                [(0, 0), (0, 10)],
                [(0, 4), (4, 10), (10, 10)],
            )
        ),
        (parts((0, 4), (5, 10)), "no rank has the rows 4 to 4"),
        (parts((0, 4)), "no rank has the rows 4 to 9"),
        (parts((0, 6), (4, 10)), "ranks 0 and 1 have the row 4"),
        (parts((0, 12)), "rank 0 has rows beyond 10"),
        (parts((0, 0), (0, 0)), "no rank has the rows 0 to 9"),
        (parts((0, 10), (0, 10), is_copy=True), None),
        ([*parts((0, 10), is_copy=True), *parts((5, 10))], "rank 1 has a part"),
        ([*parts((0, 10)), *parts((0, 0), n_rows=12)], "found 10 and 12 rows"),
        (
            [*parts((0, 4)), RankPart(10, (4, 10), slots=(*SLOTS, SlotSpec("sparse_sum", "float32", (4,))))],
            "found the slots",
        ),
        (columns(*HALVES), None),
        ([RankPart(10), *columns(*GRID)], None),
        (columns(((0, 10), (0, 4))), "ranks have the columns [(0, 4)] of the rows 0 to 9, expected 0 to 12"),
        (columns(((0, 10), (0, 8)), ((0, 10), (4, 12))), "ranks have the columns [(0, 8), (4, 12)] of the rows 0 to 9"),
        (columns(((0, 6), (0, 8)), ((0, 6), (8, 12))), "no rank has the rows 6 to 9"),
        (
            columns(((0, 6), (0, 8)), ((0, 6), (8, 12)), ((6, 10), (0, 4)), ((6, 10), (4, 12))),
            "the rows 0 to 5 are divided into the columns [(0, 8), (8, 12)], other rows are not",
        ),
        (
            [*columns(HALVES[0]), *columns(HALVES[1], slots=("embedding", "sparse_adagrad_sum"))],
            "found the slots embedding float32[its columns of 12] on rank 0",
        ),
    ],
)
def test_parts_of_ranks_make_up_a_table_where_each_row_and_column_is_there_once(of_ranks, problem):
    found = problem_of(of_ranks)
    assert found is None if problem is None else found.startswith(problem)


def test_ranges_of_columns_are_those_of_all_ranks_in_order():
    assert column_ranges(columns(*reversed(HALVES))) == ((0, 8), (8, 12))
    assert column_ranges([RankPart(10), *columns(*GRID)]) == ((0, 4), (4, 12))
    assert column_ranges(parts((0, 4), (4, 10))) == ()


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


def test_an_embedding_whose_weight_says_by_attributes_where_its_shards_lie_stays_dense_and_says_why():
    model = nn.ModuleDict({"item": nn.Embedding(2000, 4)})
    describe(model["item"].weight, torch.zeros(4000, 4), [(0, 1999)])
    tables = live_tables(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    assert not list(tables)
    assert "item: its weight is a Parameter, which is saved in pieces: use DTensor" in str(tables)
