"""Whether what ranks have makes up a table."""

import pytest

from recckpt.live.boxes import RankPart, problem_of
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
