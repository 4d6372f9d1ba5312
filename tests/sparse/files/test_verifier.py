"""Files held against catalogs; sums over rows."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.forge import Forge, filled, save_tables

from recckpt.format.buckets import bucket_of
from recckpt.inspect.verify import verify
from recckpt.sparse import gen_slice
from recckpt.sparse.files import table_reader
from recckpt.sparse.files.verifier import RowSums
from recckpt.storage import open_storage
from recckpt.storage.local import LocalStorage

N_ROWS = 50
ROW_BYTES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 100]


def saved(url, *shards, **options):
    """Save the tables of each shard and return what changes the checkpoint."""
    storage = open_storage(str(url))
    storage.prepare()
    save_tables(storage, *shards, concurrency=1, **options)
    return Forge(url / "ckpt_1")


def two_tables():
    return [filled("user/1", range(-300, 300), slots={"sparse_m": (3,)}), filled("item", range(50))]


def with_ids(ids):
    """Give the rows of a part these ids."""
    ids = iter(ids)

    def edit(batch):
        column = pa.array([next(ids) for _ in range(batch.num_rows)], pa.int64())
        return batch.set_column(1, batch.schema.field("id"), column)

    return edit


def in_bucket_order(ids):
    ids = np.array(ids, np.int64)
    return ids[np.argsort(bucket_of(ids), kind="stable")].tolist()


def of_bucket(bucket):
    ids = np.arange(1 << 20)
    return ids[bucket_of(ids) == bucket]


def only(problems):
    assert len(problems) == 1, problems
    return problems[0]


def test_shards_that_tile_the_ids_or_share_buckets_and_columns_in_another_order_are_whole(tmp_path):
    slices = [gen_slice(i, 3) for i in range(3)]
    ids = np.arange(-500, 500)
    saved(tmp_path / "tile", *([filled("item", ids[slice_.owns(ids)], slice=slice_)] for slice_ in slices))
    saved(tmp_path / "share", [filled("item", range(100))], [filled("item", range(100, 200))])
    forge = saved(tmp_path / "other order", two_tables())
    forge.edit_part(lambda batch: batch.select(batch.schema.names[::-1]), rows=False)
    for name in ("tile", "share", "other order"):
        assert verify(str(tmp_path / name)) == []


@pytest.mark.slow
def test_every_byte_of_a_part_is_looked_at(tmp_path):
    forge = saved(tmp_path, [filled("item", range(4))])
    path = forge.path(forge.parts[0])
    data = path.read_bytes()
    for at in range(0, len(data), 5):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        assert verify(str(tmp_path)), f"byte {at} of {len(data)}"


def test_an_id_twice_in_a_shard_is_found_in_one_batch_and_between_two(tmp_path):
    ids = in_bucket_order(range(40))
    ids[20] = ids[19]
    row_bytes = 2 + 8 + 4
    for batch_bytes in (8 << 20, 20 * row_bytes):  # the second cut falls between the two
        forge = saved(tmp_path / str(batch_bytes), [filled("item", range(40), shape=1)], batch_bytes=batch_bytes)
        forge.edit_part(with_ids(ids))
        problems = verify(str(forge.directory))
        assert [p.found for p in problems if "twice" in p.found] == [f"id {ids[20]} twice"]


def two_parts(directory, monkeypatch, n_rows=40):
    """Save a table in two parts of one shard; return what changes them and the ids of each part."""
    monkeypatch.setattr(LocalStorage, "threads", lambda _, asked: asked)
    row_bytes = 2 + 8 + 4
    storage = open_storage(str(directory))
    save_tables(storage, [filled("item", range(n_rows), shape=1)], concurrency=2, batch_bytes=5 * row_bytes)
    ids = in_bucket_order(range(n_rows))
    assert len(Forge(directory / "ckpt_1").parts) == 2
    return Forge(directory / "ckpt_1"), [ids[: n_rows // 2], ids[n_rows // 2 :]]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_an_id_twice_in_a_shard_is_found_between_two_parts(tmp_path, monkeypatch, threads):
    forge, (before, after) = two_parts(tmp_path, monkeypatch)
    forge.edit_part(with_ids([before[-1], *after[1:]]), name=forge.parts[1], rows=False)
    problems = verify(str(tmp_path), threads=threads)
    assert [(p.file, p.found) for p in problems if "twice" in p.found] == [
        (f"ckpt_1/{forge.parts[1]}", f"id {before[-1]} twice")
    ]


def test_an_id_twice_over_parts_of_one_bucket_each_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalStorage, "threads", lambda _, asked: asked)
    same = of_bucket(7)[:12]
    ids = [*same[:4], *of_bucket(8)[:4], *of_bucket(9)[:4]]
    save_tables(open_storage(str(tmp_path)), [filled("item", ids, shape=1)], concurrency=3, batch_bytes=4 * 14)
    forge = Forge(tmp_path / "ckpt_1")
    assert len(forge.parts) == 3
    for number, name in enumerate(forge.parts):  # which other writers may cut within a bucket
        forge.edit_part(with_ids(same[4 * number : 4 * number + 4]), name=name, rows=False)
    forge.edit_catalog(lambda values: [part["batches"][0].update(buckets=[7, 8]) for part in values["parts"]])
    forge.edit_manifest(lambda values: values["shards"][0].update(buckets=[7, 8]))
    assert verify(str(tmp_path)) == []
    forge.edit_part(with_ids([same[0], *same[9:]]), name=forge.parts[2], rows=False)
    assert [p.found for p in verify(str(tmp_path))] == [f"id {same[0]} twice"]


def test_parts_out_of_bucket_order_are_found(tmp_path, monkeypatch):
    forge, _ = two_parts(tmp_path, monkeypatch)
    forge.edit_catalog(lambda values: values["parts"].reverse())
    problem = only(verify(str(tmp_path)))
    assert (problem.where, problem.found) == ("table 'item'", "rows out of bucket order")


@pytest.mark.parametrize("window_rows", [1 << 23, 40])
def test_an_id_in_two_shards_is_found_whatever_their_buckets(tmp_path, monkeypatch, window_rows):
    monkeypatch.setattr(table_reader, "_WINDOW_ROWS", window_rows)
    saved(tmp_path, [filled("item", range(100)), filled("other", [1])], [filled("item", [77, *range(200, 300)])])
    problem = only(verify(str(tmp_path)))
    assert (problem.found, problem.where) == ("id 77 twice", "table 'item', between shards")


def test_an_id_of_another_bucket_than_the_catalog_says_is_found(tmp_path):
    forge = saved(tmp_path, [filled("item", [5])])
    forge.edit_part(with_ids([6]))
    problem = only(verify(str(tmp_path)))
    assert "buckets" in problem.found
    assert str(int(bucket_of(np.array([6]))[0])) in problem.found


def swapped(batch):
    """Let the second and the third row trade places."""
    return batch.take([0, 2, 1, *range(3, batch.num_rows)])


def named(change):
    """Return what gives rows other tables, by what it makes of their numbers and of the names."""

    def edit(batch):
        old = batch.column("table")
        other = pa.DictionaryArray.from_arrays(*change(old.indices, old.dictionary))
        return batch.set_column(0, batch.schema.field("table"), other)

    return edit


exchanged = named(lambda numbers, names: (pa.array(1 - numbers.to_numpy(), pa.int16()), names))
renamed = named(lambda numbers, names: (numbers, pa.array(["z", "b"])))


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (swapped, "rows out of bucket order"),
        (exchanged, "row 0 of another table"),
        (renamed, "the tables ['z', 'b']"),
    ],
    ids=["order", "rows of another table", "other names"],
)
def test_rows_elsewhere_than_they_should_be_are_found(tmp_path, edit, found):
    saved(tmp_path, [filled("a", range(10)), filled("b", range(10))]).edit_part(edit, rows=False)
    assert [problem.found for problem in verify(str(tmp_path))] == [found] * 2


def columns(row_bytes: list[int]) -> list[np.ndarray]:
    """Return ids and columns of random bytes, each item those of a row."""
    random = np.random.default_rng(0)
    return [
        random.integers(0, 256, N_ROWS * size, np.uint8).view(np.dtype((np.void, size))) for size in (8, *row_bytes)
    ]


def summed(found: list[np.ndarray], rows=slice(None), table: str = "t") -> RowSums:
    sums = RowSums()
    sums.add(table, found, rows)
    return sums


def test_the_order_of_rows_and_the_pieces_that_they_come_in_do_not_count():
    found = columns([4, 16])
    in_pieces = RowSums()
    for rows in np.array_split(np.random.default_rng(1).permutation(N_ROWS), 7):
        in_pieces.add("t", [column[rows] for column in found], slice(None))
    assert in_pieces == summed(found)


@pytest.mark.parametrize("row_bytes", ROW_BYTES)
def test_every_bit_of_a_row_counts(row_bytes):
    found = columns([row_bytes])
    expected = summed(found)
    for column in found:
        values = column.view(np.uint8)
        for bit in range(8 * column.dtype.itemsize):
            values[bit // 8] ^= 1 << bit % 8
            assert summed(found) != expected
            values[bit // 8] ^= 1 << bit % 8
    assert summed(found) == expected


@given(st.sampled_from(ROW_BYTES[1:]), st.sets(st.integers(0, 2**20), min_size=1, max_size=6))
def test_no_bits_that_flip_together_cancel(row_bytes, bits):
    ids, found = columns([row_bytes])
    expected = summed([ids, found])
    flipped = np.zeros(8 * row_bytes, np.uint8)
    flipped[[bit % len(flipped) for bit in bits]] = 1
    first = found.view(np.uint8)[:row_bytes]
    first ^= np.packbits(flipped)
    assert summed([ids, found]) != expected


@pytest.mark.parametrize("row_bytes", [8, 16, 24, 64])
def test_no_two_bits_of_a_row_cancel(row_bytes):
    ids, found = columns([row_bytes])
    expected = summed([ids[:1], found[:1]])
    highest = range(7, 8 * row_bytes, 8)  # of each byte: among them the sign of every number
    values = found.view(np.uint8)
    for one in highest:
        for other in range(7, one, 8):
            for bit in (one, other):
                values[bit // 8] ^= 1 << bit % 8
            assert summed([ids[:1], found[:1]]) != expected
            for bit in (one, other):
                values[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rows_of_which_every_number_has_the_other_sign_are_others(dtype):
    ids, values = np.arange(N_ROWS).view("V8"), np.random.default_rng(0).normal(size=(N_ROWS, 16)).astype(dtype)
    row = f"V{values[0].nbytes}"
    expected = summed([ids, values.view(row).reshape(-1)])
    for changed in (-values, values * np.resize([1, -1], 16).astype(dtype), values[:, ::-1].copy()):
        assert summed([ids, changed.view(row).reshape(-1)]) != expected


def test_values_of_another_id_or_column_or_table_and_rows_that_are_missing_or_there_twice_count():
    ids, one, two = columns([12, 12])
    expected = summed([ids, one, two])
    assert summed([ids, np.roll(one, 1), two]) != expected
    assert summed([ids, np.roll(one, 1), np.roll(two, 1)]) != expected
    assert summed([ids, two, one]) != expected
    assert summed([ids, one, two], table="other") != expected
    assert summed([ids, one, two], np.arange(N_ROWS - 1)) != expected
    assert summed([ids, one, two], np.array([0, *range(N_ROWS)])) != expected
    assert summed([ids, one, two], np.arange(0)) == RowSums(), "no rows are as good as no table"
