"""Rows of tables in bucket order, and each once."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.foreign import ForeignTable
from support.forge import written_parts
from support.sweeps import mostly_slow
from torch import nn

from recckpt import Saver
from recckpt.errors import RecckptError, StateMismatchError
from recckpt.format.buckets import N_BUCKETS, bucket_of
from recckpt.output_dir.listing import list_checkpoints
from recckpt.save.job import SparseSaver
from recckpt.sparse import HashTable
from recckpt.sparse.files import table_rows
from recckpt.sparse.files.table_rows import BucketOrder, repeated_id, source_of, source_to_save
from recckpt.sparse.table import column as column_module
from recckpt.sparse.table.column import Column
from recckpt.storage import open_storage
from recckpt.types import SlotSpec

SPEC = SlotSpec("id", "int64", ())


def foreign(n_rows=3, **changes) -> ForeignTable:
    table = ForeignTable("t", torch.arange(n_rows), torch.ones(n_rows, 2), {"sparse_step": torch.zeros(n_rows)})
    for name, value in changes.items():
        setattr(table, f"_{name}", value)
    return table


def test_our_table_is_seen_without_a_copy():
    table = HashTable((2, 3), name="t", dtype=torch.bfloat16)
    for name in ("sparse_b", "a"):
        table.add_slot(name, ())
    table.insert(torch.tensor([5, 7]), torch.ones(2, 2, 3, dtype=torch.bfloat16))
    source = source_of(table)
    assert (source.name, source.n_rows, list(source.columns)) == ("t", 2, ["embedding", "a", "sparse_b"])
    assert source.slots[0] == SlotSpec("embedding", "bfloat16", (2, 3))
    assert source.ids is table.store.ids


def test_a_foreign_table_is_seen_without_a_copy_and_may_be_empty_or_give_views():
    table = foreign()
    source = source_of(table)
    assert source.columns["embedding"].blocks[0].data_ptr() == table.embeddings().data_ptr()
    assert source.slots == (SlotSpec("embedding", "float32", (2,)), SlotSpec("sparse_step", "float32", ()))
    assert (source.n_rows, source_of(foreign(0)).n_rows) == (3, 0)
    values = torch.arange(12.0).view(2, 6).T.requires_grad_()
    source = source_of(foreign(6, embeddings=values))
    assert source.columns["embedding"].to_tensor(6).tolist() == values.tolist()


@pytest.mark.parametrize(
    ("changes", "slot"),
    [
        ({"ids": torch.arange(3, dtype=torch.int32)}, "id"),
        ({"ids": torch.arange(3.0)}, "id"),
        ({"ids": torch.zeros(3, 1, dtype=torch.int64)}, "id"),
        ({"embeddings": torch.ones(4, 2)}, "embedding"),
        ({"embeddings": torch.tensor(1.0)}, "embedding"),
        ({"embeddings": torch.ones(3, 0)}, "embedding"),
        ({"embeddings": torch.ones(3, 2, dtype=torch.complex64)}, "embedding"),
        ({"embeddings": torch.ones(3, 2, dtype=torch.bool)}, "embedding"),
        ({"slots": {"sparse_step": torch.zeros(2)}}, "sparse_step"),
    ],
)
def test_a_foreign_table_that_does_not_fit_is_refused_with_its_name(changes, slot):
    with pytest.raises(StateMismatchError, match="'t'") as caught:
        source_of(foreign(**changes))
    assert list(caught.value.mismatched) == [slot]


def test_a_foreign_table_with_an_id_twice_is_not_saved():
    twice = foreign(ids=torch.tensor([-7, 5, -7]))
    with pytest.raises(StateMismatchError, match="'t'") as caught:
        source_to_save(twice, detached=False)
    assert caught.value.mismatched == {"id": ("-7 more than once", "every id once")}
    assert source_of(twice).n_rows == 3, "it may be loaded into"
    for fine in (foreign(), foreign(0), foreign(1)):
        assert source_to_save(fine, detached=False).n_rows == len(fine)


@pytest.mark.parametrize(
    ("slot", "name", "message"),
    [
        *((slot, "t", "cannot be named") for slot in ("embedding", "id", "table", "op", "", "a@b")),
        *(("sparse_step", name, "table name") for name in ("", "a\0b", "x" * 1025)),
    ],
)
def test_a_foreign_table_and_its_slots_cannot_take_names_of_the_format(slot, name, message):
    table = foreign(slots={slot: torch.zeros(3)})
    table.name = name
    with pytest.raises(ValueError, match=message):
        source_of(table)


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
    assert np.array_equal(order.starts()[1:], np.cumsum(counts))


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
    check(ids[:1], 1)


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


def test_an_order_takes_no_more_memory_than_its_budget_and_is_kept_no_longer_than_somebody_reads_it():
    order = order_of(np.arange(100), 1000)
    rows = next(order.rows(0, 30_000))
    assert order._whole() is not None
    del rows
    assert order._whole() is None
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


def crowded(n_ids: int) -> np.ndarray:
    """Ids of few buckets, in bucket order."""
    ids = np.arange(n_ids << 13)
    return ids[bucket_of(ids) < 8][:n_ids]


def table_of(ids) -> HashTable:
    table = HashTable(2, name="t")
    table.insert(torch.as_tensor(ids), torch.ones(len(ids), 2))
    return table


def save(table, url, **sizes):
    storage = open_storage(url)
    storage.prepare()
    saver = SparseSaver(2, **sizes)
    return written_parts(saver, [source_of(table)], storage, "a")


@mostly_slow()
@pytest.mark.parametrize("sizes", [{}, {"batch_bytes": 64}, {"batch_bytes": 64, "order_bytes": 400}], ids=str)
@pytest.mark.parametrize("at", [0, 1, 57, 198])
def test_an_id_twice_is_found_whatever_batches_and_parts_it_lies_in(memory_url, sizes, at):
    ids = crowded(200)
    table = table_of(ids)
    save(table, memory_url + "/whole", **sizes)
    table.store.ids.write(199, torch.as_tensor(ids[at : at + 1]))  # as no door allows
    with pytest.raises(RecckptError, match=rf"(?s)'t'.*{ids[at]} more than once"):
        save(table, memory_url + "/broken", **sizes)


def test_a_saver_commits_nothing_of_a_table_with_an_id_twice(memory_url):
    table = table_of(range(100))
    with Saver(nn.ModuleList([table]), output_dir=memory_url) as saver:
        saver.save("a")
        table.store.ids.write(50, torch.tensor([7]))
        with pytest.raises(RecckptError, match=r"(?s)table 't'.*7 more than once"):
            saver.save("b")
    assert [c.ckpt_id for c in list_checkpoints(open_storage(memory_url)).current] == ["a"]


@pytest.mark.parametrize("n_pieces", [1, 2, 7, 100])
def test_it_is_found_which_id_comes_twice(n_pieces):
    def repeats(ids):
        before = ids[:0]
        for piece in np.array_split(ids, n_pieces):
            id_, before = repeated_id(piece, before)
            yield id_

    ids = np.random.default_rng(0).permutation(100_000)[:5000]
    ids = ids[np.argsort(bucket_of(ids), kind="stable")]
    assert [*repeats(ids)] == [None] * n_pieces
    assert {*repeats(np.insert(ids, 2001, ids[2000]))} - {None} == {int(ids[2000])}
