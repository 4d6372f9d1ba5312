"""Tables written by several threads, and what the ranks wrote of each as one entry of the manifest."""

import errno
import pickle
import threading
import tracemalloc
from itertools import product, starmap

import numpy as np
import pyarrow as pa
import pytest
import torch
from support.forge import empty, filled, load, parts_of, rows_of, save_tables, written_parts
from support.sweeps import mostly_slow

from recckpt.errors import StateMismatchError
from recckpt.format.tables import ClockDates, DeltaRows, Narrowed, Reduced, TableEntry
from recckpt.save.job import SparseSaver
from recckpt.save.write import NamesAndSlots, WrittenTables, tables_of_all
from recckpt.sparse import HashTable
from recckpt.sparse.files.table_rows import source_of
from recckpt.types import ITEM_BYTES, SlotSpec

ANY_IDS = [0, -1, 2**63 - 1, -(2**63), 1, 2**32, -(2**32)]


def slots(dim):
    return (SlotSpec("embedding", "float32", (dim,)),)


def written(tables, dim=2, **fields):
    """Return what a rank wrote of tables as (rows,), or (rows, upserts, deletes) of a delta."""
    heads = NamesAndSlots.of(dict.fromkeys(tables, slots(dim)))
    return WrittenTables(heads, np.array(list(tables.values()), np.int64).reshape(len(tables), -1).T, **fields)


def test_rows_are_added_up_by_name_in_whatever_order_the_ranks_have_their_tables():
    ranks = [written({"t": (3,), "u": (4,)}), written({"u": (10,), "t": (20,)}), written({"v": (5,)})] * 2
    assert tables_of_all(ranks, ()) == tuple(
        TableEntry(name, rows, slots(2)) for name, rows in (("t", 46), ("u", 28), ("v", 10))
    )
    assert tables_of_all([WrittenTables(NamesAndSlots.of({}), np.zeros((1, 0), np.int64))] * 2, ()) == ()


def test_a_delta_has_the_changes_of_all_ranks_and_the_tables_that_it_replaces():
    ranks = [written({"t": (3, 1, 2), "u": (4, 4, 0)}), written({"t": (5, 3, 1), "u": (6, 6, 0)})]
    t, u = tables_of_all(ranks, {"u"})
    assert (t.rows, t.delta) == (8, DeltaRows(4, 3, replaced=False))
    assert (u.rows, u.delta) == (10, DeltaRows(10, 0, replaced=True))


def test_ranks_that_disagree_on_a_table_are_refused_by_name():
    with pytest.raises(StateMismatchError, match="table 't' of rank 2"):
        tables_of_all([written({"t": (1,)}), written({"u": (1,)}), written({"t": (1,)}, dim=3)], ())


def test_a_table_is_evicted_up_to_a_step_where_all_ranks_that_have_it_say_the_same():
    ranks = [written({"t": (1,)}, evicted_to={"t": 7}), written({"t": (1,)}, evicted_to={"t": 7}), written({"u": (1,)})]
    assert [table.evicted_to for table in tables_of_all(ranks, ())] == [7, None]
    for other in ({"t": 8}, {}):
        [table] = tables_of_all([ranks[0], written({"t": (1,)}, evicted_to=other)], ())
        assert table.evicted_to is None


def test_dates_of_the_clock_span_those_of_all_ranks_and_what_was_left_out_is_added_up_with_the_worst_errors():
    one = Reduced(("m",), None, 3, (Narrowed("embedding", "float64", 0.1),))
    other = Reduced(("m",), None, 4, (Narrowed("embedding", "float64", 0.5),))
    [table] = tables_of_all(
        [
            written({"t": (1,)}, clock={"t": ClockDates(5.0, 6.0)}, reduced={"t": one}),
            written({"t": (1,)}, clock={"t": ClockDates(2.0, 4.0)}, reduced={"t": other}),
            written({"t": (1,)}),
        ],
        (),
    )
    assert table.clock == ClockDates(2.0, 6.0)
    assert (table.reduced, table.reduced.rows, table.reduced.narrowed[0].error) == (one, 7, 0.5)


def test_what_a_rank_sends_of_two_hundred_tables_of_a_full_save_takes_less_than_six_kilobytes():
    sent = pickle.dumps(written({f"feature_{number:03d}": (10**6 + number,) for number in range(200)}))
    assert len(sent) < 6000
    [first, *_] = tables_of_all([pickle.loads(sent)] * 3, ())
    assert (first.name, first.rows) == ("feature_000", 3 * 10**6)


def random_table(name: str, n_rows: int, dtype: torch.dtype, shape=(3,), slots=(), seed=0) -> HashTable:
    """A table of random bits: NaNs with payloads, infinities, denormals, whatever comes."""
    rng = np.random.default_rng(seed)
    table = empty(name, shape=shape, dtype=dtype, slots=dict(slots))
    ids = rng.permutation(np.unique(np.concatenate([ANY_IDS, rng.integers(-(2**63), 2**63 - 1, n_rows)])))[:n_rows]

    def values(shape):
        n_bytes = n_rows * int(np.prod(shape, dtype=int)) * dtype.itemsize
        return torch.from_numpy(rng.integers(0, 256, n_bytes, np.uint8)).view(dtype).view(n_rows, *shape)

    table.insert(torch.from_numpy(ids), values(shape), {slot: values(s) for slot, s in dict(slots).items()})
    return table


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_dtype_comes_back_bit_for_bit(storage, dtype):
    dtype = getattr(torch, dtype)
    slots = {"sparse_step": (), "sparse_matrix": (2, 2), "kept": (1,)}
    table, twin = random_table("t", 100, dtype, (2, 3), slots), empty("t", shape=(2, 3), dtype=dtype, slots=slots)
    save_tables(storage, [table])
    assert load(storage, [twin]) == 100
    assert rows_of(twin) == rows_of(table)


def test_nan_payloads_infinities_and_negative_zeros_stay(storage):
    bits = torch.tensor([0x7F800001, 0x7FC0DEAD, -1, -(2**31), 0x7F800000, 1], dtype=torch.int32)
    table = HashTable(1, name="t")
    table.insert(torch.arange(6), bits.view(torch.float32).view(6, 1))
    save_tables(storage, [table])
    twin = empty("t", shape=1)
    load(storage, [twin])
    assert twin.lookup(torch.arange(6))[0].view(torch.int32).flatten().tolist() == bits.tolist()


@pytest.mark.parametrize("n_rows", [0, 1, 2, 7])
def test_few_rows_or_none_come_back(storage, n_rows):
    table, twin = filled("t", range(n_rows)), filled("t", [99])
    save_tables(storage, [table])
    assert load(storage, [twin]) == n_rows
    assert rows_of(twin) == rows_of(table)


def some(concurrency, batch_bytes):
    """Return the pair, of which each number is once in the default suite."""
    is_quick = (concurrency, batch_bytes) in [(8, 1), (4, 100), (2, 5000), (1, 8 << 20)]
    return pytest.param(concurrency, batch_bytes, marks=() if is_quick else pytest.mark.slow)


@mostly_slow()
@pytest.mark.parametrize(
    ("concurrency", "batch_bytes"), list(starmap(some, product([1, 2, 4, 8], [1, 100, 5000, 8 << 20])))
)
def test_any_number_of_writers_and_readers_and_any_batch_size_will_do(storage, concurrency, batch_bytes):
    n_rows = 60 if batch_bytes == 1 else 2000
    tables = [random_table("a", n_rows, torch.float32, seed=1), random_table("b", n_rows // 3, torch.float32, seed=2)]
    save_tables(storage, tables, concurrency=concurrency, batch_bytes=batch_bytes)
    twins = [empty("a", shape=3), empty("b", shape=3)]
    load(storage, twins, concurrency=concurrency)
    assert [rows_of(twin) for twin in twins] == [rows_of(table) for table in tables]
    if batch_bytes == 1:
        assert all(batch.rows == 1 for part in parts_of(storage) for batch in part.batches)


def test_hundreds_of_tables_make_few_files(local):
    tables = [filled(f"feature/{n}", range(n % 5), shape=1 + n % 3) for n in range(300)]
    save_tables(local, tables, concurrency=4)
    assert len(local.list_files("ckpt_1")) <= 20
    twins = [empty(table.name, shape=table.embedding_shape) for table in tables]
    assert load(local, twins) == 600
    assert all(rows_of(twin) == rows_of(table) for twin, table in zip(twins, tables, strict=True))


@pytest.mark.parametrize(
    "name", ["ü…\U0001f600", "a/b/../c", "line\nbreak", "x" * 300, ".", "..", "-rf", "ü" * 512, "%2F", '"', " "]
)
def test_any_name_comes_back(storage, name):
    save_tables(storage, [filled(name, range(3)), filled("other", range(5))])
    twins = [empty(name), empty("other")]
    load(storage, twins)
    assert [len(twin) for twin in twins] == [3, 5]


def test_erased_rows_are_not_saved(storage):
    table = filled("t", range(100))
    table.erase(torch.arange(0, 100, 3))
    save_tables(storage, [table])
    twin = empty("t")
    load(storage, [twin])
    assert rows_of(twin) == rows_of(table)


def test_saving_changes_nothing_of_a_table(local):
    table = filled("t", range(100))
    before = rows_of(table), table.ids().tolist(), table.nbytes
    save_tables(local, [table])
    assert (rows_of(table), table.ids().tolist(), table.nbytes) == before


def test_the_same_rows_make_the_same_bytes(local):
    for ckpt_id in ("a", "b"):
        save_tables(local, [filled("t", range(1000))], ckpt_id=ckpt_id, concurrency=1)
    parts = [parts_of(local, ckpt_id) for ckpt_id in ("a", "b")]
    assert parts[0] == parts[1]
    assert local.read(f"a/{parts[0][0].file}", 10**7) == local.read(f"b/{parts[1][0].file}", 10**7)


def test_progress_counts_the_bytes_of_all_columns(storage):
    seen = []
    save_tables(storage, [filled("t", range(1000), slots={"sparse_step": ()})], batch_bytes=1000, advance=seen.append)
    assert sum(seen) == 1000 * (2 + 8 + 8 + 4)
    assert len(seen) > 10


@pytest.mark.parametrize("method", ["create"])
def test_a_failing_storage_stops_all_writers_and_raises_its_error(local, monkeypatch, method):
    def fails(self, name):
        if name.endswith("g0.01.arrow"):
            raise OSError(errno.ENOSPC, "No space left on device", name)
        return create(self, name)

    create = type(local).create
    monkeypatch.setattr(type(local), method, fails)
    with pytest.raises(OSError, match=r"No space left.*g0\.01\.arrow"):
        save_tables(local, [filled("t", range(1000))], concurrency=4, batch_bytes=1000)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("recckpt")]
    assert not [name for name in local.list_files("ckpt_1") if name.endswith(".json")]


def test_a_saver_goes_on_after_a_failure(local):
    saver = SparseSaver(2, batch_bytes=1000)
    table = filled("t", range(1000))

    def save(directory, advance):
        local.make_dir(directory)
        return written_parts(saver, [source_of(table)], local, directory, advance)

    def fails(n_bytes):
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        save("a", fails)
    assert save("b", lambda n: None).counts("rows") == {"t": 1000}


def test_saving_needs_little_memory_beyond_the_table(local):
    table = empty("t", shape=64)
    ids = torch.arange(100_000)
    table.insert(ids, torch.ones(100_000, 64))
    sources = [source_of(table)]
    sizes = {"batch_bytes": 1 << 20, "order_bytes": 256 << 10}
    local.make_dir("warm")  # all kernels are compiled, with buffers of another saver
    written_parts(SparseSaver(2, **sizes), sources, local, "warm")
    saver = SparseSaver(2, **sizes)
    local.make_dir("d")
    arrow = pa.total_allocated_bytes()
    tracemalloc.start()
    written_parts(saver, sources, local, "d")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * (1 << 20) + (256 << 10) + (2 << 20), "the table has 26 MB"
    assert pa.total_allocated_bytes() - arrow < 1 << 20
