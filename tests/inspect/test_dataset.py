"""A table as a dataset that pyarrow, polars, duckdb and pandas query."""

import subprocess
import sys

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from support.forge import Forge, filled, save_tables
from support.paths import ROOT

import recckpt
from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from recckpt.format.buckets import gen_slice
from recckpt.sparse.files.part_reader import PartReader
from recckpt.storage import open_storage


def saved(url, *shards, **options):
    storage = open_storage(str(url))
    storage.prepare()
    return save_tables(storage, *shards, **options)


def different_tables(slice=None):
    """Tables of other widths, slots and dtypes, two of them alike, and one without rows."""

    def own(ids):
        ids = np.array(ids, np.int64)
        return ids if slice is None else ids[slice.owns(ids)]

    return [
        filled("user", own(range(-50, 50)), shape=16, slots={"sparse_adam_exp_avg": (16,), "sparse_step": ()}),
        filled("item", own(range(300)), shape=8),
        filled("shop", own(range(40)), shape=8),
        filled("word", own(range(20)), shape=(2, 3), dtype=torch.float64),
        filled("new", [], shape=4),
    ]


def three_shards(url):
    saved(url, *(different_tables(gen_slice(number, 3)) for number in range(3)), batch_bytes=1000)


ROWS = {"user": range(-50, 50), "item": range(300), "shop": range(40), "word": range(20), "new": []}


def ids_and_firsts(ids, vectors):
    """Return id -> first value of its embedding."""
    return {id_: np.ravel(vector)[0] for id_, vector in zip(ids, vectors, strict=True)}


@pytest.mark.parametrize("table", ROWS)
def test_pyarrow_polars_duckdb_and_pandas_read_exactly_the_rows_of_a_table_among_tables_that_differ(tmp_path, table):
    three_shards(tmp_path)
    rows = recckpt.dataset(tmp_path, table)
    expected = {n: float(n) for n in ROWS[table]}

    found = rows.to_table()
    found.validate(full=True)
    assert found.num_rows == rows.count_rows() == len(expected)
    assert ids_and_firsts(found["id"].to_pylist(), vectors(found)) == expected

    frame = pl.scan_pyarrow_dataset(rows).select("id", "embedding").collect()
    assert ids_and_firsts(frame["id"], frame["embedding"].to_list()) == expected

    queried = duckdb.sql("select id, embedding from rows").fetchall()
    assert {id_: vector[0] for id_, vector in queried} == expected

    pandas = found.drop_columns(["table"]).to_pandas()
    assert ids_and_firsts(pandas["id"], pandas["embedding"]) == expected


def vectors(found):
    column = found["embedding"].combine_chunks()
    return (column.storage if isinstance(column, pa.ExtensionArray) else column).to_pylist()


def test_queries_reach_into_the_rows_lazily(tmp_path):
    three_shards(tmp_path)
    items = recckpt.dataset(tmp_path / "ckpt_1", "item")
    assert pl.scan_pyarrow_dataset(items).filter(pl.col("id") > 297).collect()["id"].sort().to_list() == [298, 299]
    assert duckdb.sql("select max(embedding[8]) from items where id < 100").fetchall() == [(99.0,)]
    assert items.to_table(columns=["id"], filter=pc.field("id") == 7).to_pydict() == {"id": [7]}
    assert items.head(3).num_rows == 3
    assert set(items.to_table()["table"].to_pylist()) == {"item"}


def test_a_dataset_can_be_had_on_any_storage(url):
    three_shards(url)
    rows = recckpt.dataset(url, "item")
    assert sorted(rows.to_table()["id"].to_pylist()) == list(range(300))
    assert sorted(rows.to_table()["id"].to_pylist()) == list(range(300))  # once more, from the files that are open


def test_a_dataset_is_read_to_its_end_though_the_checkpoint_is_removed_meanwhile(tmp_path):
    three_shards(tmp_path)
    rows = recckpt.dataset(tmp_path, "shop")
    for path in sorted((tmp_path / "ckpt_1").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert rows.count_rows() == 40


def test_bfloat16_comes_as_bit_patterns_that_are_marked(tmp_path):
    saved(tmp_path, [filled("item", range(10), dtype=torch.bfloat16)])
    rows = recckpt.dataset(tmp_path, "item")
    assert rows.schema.field("embedding").metadata == {b"recckpt.dtype": b"bfloat16"}
    frame = pl.from_arrow(rows.to_table()).sort("id")
    bits = frame["embedding"].to_numpy().astype(np.uint32) << 16
    assert (bits.view(np.float32)[:, 0] == np.arange(10)).all()


def test_a_table_that_shares_its_files_with_no_other_is_read_without_a_filter(tmp_path):
    saved(tmp_path, different_tables())
    assert len(list(recckpt.dataset(tmp_path, "user", checked=False).get_fragments())) >= 1
    with pytest.raises(ValueError, match="filtered"):
        list(recckpt.dataset(tmp_path, "item", checked=False).get_fragments())


def test_what_is_not_there_is_named(tmp_path):
    saved(tmp_path, different_tables())
    with pytest.raises(KeyError, match="did you mean 'item'"):
        recckpt.dataset(tmp_path, "itme")
    with pytest.raises(CheckpointNotFoundError):
        recckpt.dataset(tmp_path / "nowhere", "item")


def test_a_part_of_another_schema_and_one_that_is_cut_are_refused_at_once(tmp_path):
    saved(tmp_path, [filled("item", range(20))], concurrency=1)
    forge = Forge(tmp_path / "ckpt_1")
    forge.edit_part(lambda batch: batch.drop_columns(["embedding"]))
    with pytest.raises(CorruptCheckpointError, match="columns"):
        recckpt.dataset(tmp_path, "item")
    forge.path(forge.parts[0]).write_bytes(b"ARROW1")
    with pytest.raises(CorruptCheckpointError, match="6 bytes"):
        recckpt.dataset(tmp_path, "item")


def damaged(path, **options):
    """Save 300 rows whose values are their ids in several parts, and make 8 of the first 7."""
    saved(path, [filled("item", range(300), slots={"sparse_s": ()})], batch_bytes=500, **options)
    forge = Forge(path / "ckpt_1")
    seven, eight = (np.array([first, 7], np.float32).tobytes() for first in (7, 8))
    [part] = [part for part in forge.parts if seven in forge.path(part).read_bytes()]
    forge.path(part).write_bytes(forge.path(part).read_bytes().replace(seven, eight, 1))
    return recckpt.dataset(path, "item")


def test_every_value_that_a_query_reads_is_checked_and_no_other(tmp_path):
    rows = damaged(tmp_path)
    for query in (
        rows.to_table,
        lambda: rows.to_table(columns=["embedding"]),
        lambda: rows.to_table(columns=["id"], filter=pc.list_element(pc.field("embedding"), 0) > 3),
        lambda: rows.to_table(columns={"first": pc.list_element(pc.field("embedding"), 0)}),
        lambda: rows.filter(pc.is_valid(pc.field("embedding"))).count_rows(),
        lambda: list(rows.to_batches(columns=["embedding"])),
    ):
        with pytest.raises(CorruptCheckpointError, match=r"column 'embedding': found checksum"):
            query()
    assert rows.count_rows() == 300
    assert rows.count_rows(filter=pc.field("sparse_s") < 10) == 10
    assert rows.to_table(columns=["id", "sparse_s"], filter=pc.field("id") == 7).to_pydict() == {
        "id": [7],
        "sparse_s": [7.0],
    }


@pytest.mark.slow
def test_rows_are_given_out_before_those_behind_them_are_read(tmp_path, monkeypatch):
    saved(tmp_path, [filled("item", range(30_000))], batch_bytes=100, concurrency=1)
    rows, checked = recckpt.dataset(tmp_path, "item"), []
    real = PartReader.column_problem
    monkeypatch.setattr(
        PartReader, "column_problem", lambda self, number, *rest: checked.append(number) or real(self, number, *rest)
    )
    assert rows.head(3, batch_readahead=0).num_rows == 3
    assert 0 < len(checked) < 2000  # of 10,000 and more: a thread of Arrow goes on until it sees that it is enough


def test_columns_of_a_map_are_checked_once(tmp_path, monkeypatch):
    saved(tmp_path, [filled("item", range(300), slots={"sparse_s": ()})], batch_bytes=500)
    rows, checked = recckpt.dataset(tmp_path, "item"), []
    real = PartReader.column_problem
    monkeypatch.setattr(
        PartReader, "column_problem", lambda self, number, *rest: checked.append(rest[-1]) or real(self, number, *rest)
    )
    for _ in range(2):
        assert rows.to_table(columns=["sparse_s"]).num_rows == 300
    assert {*checked} == {"sparse_s"}
    n_batches = len(checked)
    rows.to_table(columns=["id", "sparse_s"])
    assert sorted(checked) == ["id"] * n_batches + ["sparse_s"] * n_batches


def test_arrow_reads_the_files_by_itself_only_where_that_is_asked_for(tmp_path):
    rows = damaged(tmp_path)
    with pytest.raises(NotImplementedError, match="checked=False"):
        rows.sort_by("id").to_table()
    alone = recckpt.dataset(tmp_path, "item", checked=False)
    first = pc.list_element(pc.field("embedding"), 0)
    assert alone.to_table(columns={"first": first})["first"].to_pylist().count(8) == 2
    assert alone.schema == rows.schema
    assert alone.sort_by("id").to_table()["id"].to_pylist() == list(range(300))


@pytest.mark.slow
def test_a_dataset_needs_no_torch(tmp_path):
    saved(tmp_path, different_tables())
    code = (
        f"import recckpt, sys; print(recckpt.dataset({str(tmp_path)!r}, 'item').count_rows(), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "300 False\n", done.stderr
