"""Whether what ranks have makes up a table."""

import pytest

from recckpt.live.boxes import RankPart, column_ranges, problem_of
from recckpt.types import SlotSpec

SLOTS = (SlotSpec("embedding", "float32", (4,)),)


def parts(*rows, n_rows=10, **options):
    return [RankPart(n_rows, own, slots=SLOTS if own[0] < own[1] else (), **options) for own in rows]


@pytest.mark.parametrize(
    "rows",
    [[(0, 10)], [(0, 4), (4, 10)], [(4, 10), (0, 4)], [(0, 0), (0, 10)], [(0, 4), (4, 10), (10, 10)]],
)
def test_rows_that_are_there_once(rows):
    assert problem_of(parts(*rows)) is None


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([(0, 4), (5, 10)], "no rank has the rows 4 to 4"),
        ([(0, 4)], "no rank has the rows 4 to 9"),
        ([(0, 6), (4, 10)], "ranks 0 and 1 have the row 4"),
        ([(0, 12)], "rank 0 has rows beyond 10"),
        ([(0, 0), (0, 0)], "no rank has the rows 0 to 9"),
    ],
)
def test_rows_that_are_not(rows, problem):
    assert problem_of(parts(*rows)) == problem


def test_copies_are_whole_on_all_ranks_that_have_one():
    assert problem_of(parts((0, 10), (0, 10), is_copy=True)) is None
    assert "rank 1 has a part" in problem_of([*parts((0, 10), is_copy=True), *parts((5, 10))])


def test_ranks_differ_in_sizes_or_slots():
    assert "found 10 and 12 rows" in problem_of([*parts((0, 10)), *parts((0, 0), n_rows=12)])
    other = RankPart(10, (4, 10), slots=(*SLOTS, SlotSpec("sparse_adagrad_sum", "float32", (4,))))
    assert "found the slots" in problem_of([*parts((0, 4)), other])


def columns(*boxes, slots=("embedding",), width=12):
    return [
        RankPart(
            10, rows, (begin, end), width, slots=tuple(SlotSpec(name, "float32", (end - begin,)) for name in slots)
        )
        for rows, (begin, end) in boxes
    ]


def test_columns_of_all_rows_that_are_there_once():
    halves = [((0, 10), (0, 8)), ((0, 10), (8, 12))]
    assert problem_of(columns(*halves)) is None
    assert column_ranges(columns(*reversed(halves))) == ((0, 8), (8, 12))
    grid = [(rows, part) for rows in ((0, 6), (6, 10)) for part in ((0, 4), (4, 12))]
    assert problem_of([RankPart(10), *columns(*grid)]) is None
    assert column_ranges([RankPart(10), *columns(*grid)]) == ((0, 4), (4, 12))
    assert column_ranges(parts((0, 4), (4, 10))) == ()


@pytest.mark.parametrize(
    ("boxes", "problem"),
    [
        ([((0, 10), (0, 4))], "ranks have the columns [(0, 4)] of the rows 0 to 9, expected 0 to 12"),
        ([((0, 10), (0, 8)), ((0, 10), (4, 12))], "ranks have the columns [(0, 8), (4, 12)] of the rows 0 to 9"),
        ([((0, 6), (0, 8)), ((0, 6), (8, 12))], "no rank has the rows 6 to 9"),
        (
            [((0, 6), (0, 8)), ((0, 6), (8, 12)), ((6, 10), (0, 4)), ((6, 10), (4, 12))],
            "the rows 0 to 5 are divided into the columns [(0, 8), (8, 12)], others are not",
        ),
    ],
)
def test_columns_that_are_not(boxes, problem):
    assert problem_of(columns(*boxes)).startswith(problem)


def test_parts_by_columns_have_the_same_slots():
    one, other = columns(((0, 10), (0, 8))), columns(((0, 10), (8, 12)), slots=("embedding", "sparse_adagrad_sum"))
    assert "found the slots embedding float32[its columns of 12] on rank 0" in problem_of([*one, *other])
