from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recckpt.format.buckets import N_BUCKETS, bucket_of
from recckpt.sparse.files import table_rows
from recckpt.sparse.files.table_rows import BucketOrder
from recckpt.sparse.table import column as column_module
from recckpt.sparse.table.column import Column
from recckpt.types import SlotSpec

SPEC = SlotSpec("id", "int64", ())


def column_of(ids) -> Column:
    column = Column(SPEC, torch.device("cpu"))
    column.reserve(len(ids))
    column.write(0, torch.from_numpy(ids))
    return column


def order_of(ids, budget_rows) -> BucketOrder:
    ids = np.asarray(ids, np.int64)
    return BucketOrder(column_of(ids), len(ids), budget_rows)


def check(ids, budget_rows, step=N_BUCKETS):
    """Compare with numpy's stable sort by bucket, read ``step`` buckets at a time."""
    ids = np.asarray(ids, np.int64)
    order, buckets = order_of(ids, budget_rows), bucket_of(ids)
    expected = np.argsort(buckets, kind="stable")
    most = max(budget_rows, np.bincount(buckets).max(initial=0))
    for begin in range(0, N_BUCKETS, step):
        end = min(N_BUCKETS, begin + step)
        passes = [*order.rows(begin, end)]
        inside = (buckets[expected] >= begin) & (buckets[expected] < end)
        assert [row for rows in passes for row in rows.tolist()] == expected[inside].tolist()
        assert all(len(rows) <= most for rows in passes)
    counts = np.bincount(buckets, minlength=N_BUCKETS)
    assert np.array_equal(order.rows_up_to(), np.cumsum(counts))


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=300, unique=True),
    st.integers(1, 400),
    st.integers(5000, N_BUCKETS),
)
def test_rows_come_in_the_order_of_their_buckets(ids, budget_rows, step):
    check(ids, budget_rows, step)


@pytest.mark.parametrize("budget_rows", [1, 7, 64, 1000, 100_000])
def test_a_budget_smaller_than_the_table_takes_passes(budget_rows, monkeypatch):
    monkeypatch.setattr(column_module, "BLOCK_BYTES", 512)  # the ids lie in several blocks
    check(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 500), budget_rows, 9000)


def ids_of_one_bucket(bucket: int, count: int) -> np.ndarray:
    ids = np.arange(65536 * count * 2, dtype=np.int64)
    return ids[bucket_of(ids) == bucket][:count]


@pytest.mark.parametrize("bucket", [0, 12_345, 65_535])
def test_all_ids_may_lie_in_one_bucket(bucket):
    ids = ids_of_one_bucket(bucket, 20)
    assert len(ids) == 20
    check(ids, 1000)
    check(ids, 3)


def test_one_row_is_a_table_too():
    check([42], 1)
    check([-1], 100)


def test_threads_share_one_order():
    ids = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 20_000)
    expected = np.argsort(bucket_of(ids), kind="stable")
    for budget_rows in (20_000, 900):
        order = order_of(ids, budget_rows)
        with ThreadPoolExecutor(4) as pool:
            begins = range(0, N_BUCKETS, N_BUCKETS // 16)
            ends = [begin + N_BUCKETS // 16 for begin in begins]
            found = [rows for piece in pool.map(list, map(order.rows, begins, ends)) for rows in piece]
        assert np.array_equal(np.concatenate(found), expected)


def test_the_order_is_kept_no_longer_than_somebody_reads_it():
    order = order_of(np.arange(100), 1000)
    rows = next(order.rows(0, 30_000))
    assert order._whole() is not None
    del rows
    assert order._whole() is None


def test_an_order_within_the_budget_takes_no_more_memory_than_that():
    ids = np.random.default_rng(2).integers(-(2**63), 2**63 - 1, 50_000)
    for ordered in order_of(ids, 5_000).rows(10_000, 30_000):
        assert ordered.dtype == np.uint32
        assert ordered.base is None
        assert len(ordered) <= 5_000


@pytest.mark.parametrize("budget_rows", [100_000, 7000])
def test_row_numbers_grow_wider_where_they_have_to(budget_rows, monkeypatch):
    monkeypatch.setattr(table_rows, "_UINT32_ROWS", 69_999)
    ids = np.random.default_rng(3).integers(-(2**63), 2**63 - 1, 70_000)
    assert next(order_of(ids, budget_rows).rows(0, 10)).dtype == np.int64
    check(ids, budget_rows)
    assert next(order_of(ids[1:], budget_rows).rows(0, 10)).dtype == np.uint32


def test_ids_that_change_while_they_are_ordered_are_an_error_and_harm_nothing():
    column = column_of(np.arange(1000))
    order = BucketOrder(column, 1000, 100)
    next(order.rows(0, 1000))
    column.write(0, torch.full((1000,), 5))
    with pytest.raises(RuntimeError, match="the ids of a table of 1000 rows changed"):
        next(order.rows(0, N_BUCKETS))
