from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recckpt.sparse.files.saver import PART_BYTES, plan_parts, row_bytes
from recckpt.types import SlotSpec

GROUPS = [
    (SlotSpec("embedding", "float32", (8,)),),
    (SlotSpec("embedding", "float32", (64,)), SlotSpec("sparse_adam_exp_avg", "float32", (64,))),
    (SlotSpec("embedding", "int8", ()),),
    (SlotSpec("embedding", "float32", (8, 1)),),
]


def check(tables, concurrency, part_bytes=PART_BYTES, least_bytes=1):
    """Check all that a plan promises and return it."""
    parts = plan_parts(tables, concurrency, part_bytes=part_bytes, least_bytes=least_bytes)
    covered = defaultdict(list)
    for part in parts:
        for chunk in part.chunks:
            assert chunk.begin < chunk.end
            assert part.slots == tables[chunk.table][1]
            covered[chunk.table].append((chunk.begin, chunk.end))
        assert 1 <= len({chunk.table for chunk in part.chunks}) == len(part.chunks) <= 32_767
    for table, (rows, _) in enumerate(tables):
        pieces = covered.get(table, [])  # in the order of the parts
        assert [0, *(end for _, end in pieces)] == [*(begin for begin, _ in pieces), rows]
    groups = {slots for rows, slots in tables if rows}
    total = sum(rows * row_bytes(slots) for rows, slots in tables)
    assert len(parts) <= len(groups) + concurrency + total / part_bytes + len(tables) / 32_767
    assert [(part.group, part.number) for part in parts] == sorted({(part.group, part.number) for part in parts})
    numbers = sorted({slots for _, slots in tables})
    assert {part.group for part in parts} == {numbers.index(slots) for slots in groups}
    return parts


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.sampled_from(GROUPS)), max_size=30),
    st.integers(1, 9),
    st.integers(1, 300_000),
    st.integers(1, 300_000),
)
def test_every_row_is_in_one_part_and_the_parts_are_few(tables, concurrency, part_bytes, least_bytes):
    check(tables, concurrency, part_bytes, min(least_bytes, part_bytes))


def test_no_tables_and_no_rows_make_no_parts():
    assert check([], 4) == []
    assert check([(0, GROUPS[0]), (0, GROUPS[1])], 4) == []


@pytest.mark.parametrize("concurrency", [1, 2, 3, 8])
def test_one_large_table_is_spread_over_all_writers_evenly(concurrency):
    parts = check([(1_000_000, GROUPS[0])], concurrency)
    rows = [part.chunks[0].end - part.chunks[0].begin for part in parts]
    assert len(rows) == concurrency
    assert max(rows) - min(rows) <= concurrency


def test_parts_roll_at_their_size():
    parts = check([(1000, GROUPS[0])], 1, part_bytes=100 * row_bytes(GROUPS[0]))
    assert [chunk.end - chunk.begin for part in parts for chunk in part.chunks] == [100] * 10


def test_a_thousand_small_tables_make_few_parts():
    tables = [(100 + n % 50, GROUPS[n % 3]) for n in range(1000)]
    assert len(check(tables, 8)) <= 3 + 8
    assert len(check(tables, 8, least_bytes=64 << 20)) == 3


def test_parts_too_small_to_be_worth_a_file_are_not_cut():
    assert len(check([(3, GROUPS[0])], 8, least_bytes=8 << 20)) == 1


def test_a_row_larger_than_a_part_has_one_of_its_own():
    parts = check([(3, GROUPS[1])], 1, part_bytes=1)
    assert [part.chunks[0].end for part in parts] == [1, 2, 3]


def test_40_000_tables_of_one_group_are_more_than_a_part_can_name():
    parts = check([(1, GROUPS[0])] * 40_000, 1)
    assert [len(part.chunks) for part in parts] == [32_767, 7_233]


def test_tables_of_the_same_slots_share_a_group_and_others_do_not():
    parts = check([(10, GROUPS[0]), (10, GROUPS[3]), (10, GROUPS[0])], 1)
    assert [sorted(chunk.table for chunk in part.chunks) for part in parts] in ([[0, 2], [1]], [[1], [0, 2]])


def test_a_group_has_its_number_whether_the_tables_of_others_have_rows_or_not():
    tables = [(5, slots) for slots in GROUPS]
    numbers = {part.slots: part.group for part in check(tables, 1)}
    for emptied in range(len(tables)):
        rest = [(0 if n == emptied else rows, slots) for n, (rows, slots) in enumerate(tables)]
        assert {part.slots: part.group for part in check(rest, 1)} == {
            slots: number for slots, number in numbers.items() if slots != GROUPS[emptied]
        }


def test_groups_are_numbered_in_the_order_of_their_slots_whatever_the_order_of_the_tables():
    forth, back = (check([(5, slots) for slots in order], 1) for order in (GROUPS, GROUPS[::-1]))
    assert [part.slots for part in forth] == [part.slots for part in back] == sorted(GROUPS)
