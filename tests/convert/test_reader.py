"""What another program saved, read as it is: by ``SourceReader``, whose answers are those of a checkpoint of it."""

from itertools import chain
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import save_file
from support.conversions import arrow_table, save_dcp, some_rows, write_recis

from recckpt import CheckpointReader
from recckpt.convert import ImportOptions, SourceReader, import_checkpoint
from recckpt.errors import ConversionError

GOLDEN = Path(__file__).parent / "golden"
STATE = {
    "item.weight": torch.arange(40.0).reshape(10, 4),
    "half": torch.tensor([[1.5, -2.0], [0.25, 3.0]]).bfloat16(),
    "keys": torch.tensor([7, -1, 3]),
    "scalar": torch.tensor(2.5),
    "flags": torch.tensor([True, False]),
}


def as_safetensors(path):
    save_file(STATE, path / "model.safetensors")
    return path / "model.safetensors"


def as_torch_file(path):
    torch.save({"state_dict": STATE, "epoch": 3}, path / "model.pt")
    return path / "model.pt"


def as_dcp(path):
    save_dcp(STATE, path / "dcp")
    return path / "dcp"


@pytest.fixture(params=[as_safetensors, as_torch_file, as_dcp], ids=lambda write: write.__name__)
def source(tmp_path, request):
    return request.param(tmp_path)


def test_tensors_are_those_that_an_import_would_bring(source, tmp_path):
    import_checkpoint(source, tmp_path / "ours")
    with SourceReader(source) as reader, CheckpointReader(tmp_path / "ours") as ours:
        assert sorted(reader.tensor_names()) == sorted(STATE)
        assert reader.tables() == ours.tables() == []
        for name in STATE:
            assert reader.tensor_shape(name) == ours.tensor_shape(name)
            assert reader.tensor_dtype(name) == ours.tensor_dtype(name)
            assert reader.read_tensor(name).tolist() == ours.read_tensor(name).tolist()


def test_the_rows_of_a_tensor_have_their_numbers_as_ids(source, tmp_path):
    as_table = ImportOptions(as_table={"item.weight": None})
    import_checkpoint(source, tmp_path / "ours", options=as_table)
    asked = [9, 3, 4, -2, 10, 3]
    with SourceReader(source) as reader, CheckpointReader(tmp_path / "ours") as ours:
        values, is_there = reader.lookup("item.weight", asked)
        expected = ours.lookup("item.weight", asked)
        assert (values.tolist(), is_there.tolist()) == (expected.values.tolist(), expected.found.tolist())
        assert values.dtype == expected.values.dtype
        assert reader.schema("item.weight") == ours.schema("item.weight")
        batches = list(reader.table("item.weight", ["embedding"], asked))
        assert [batch.column("id").to_pylist() for batch in batches] == [[3, 4], [9]]
        assert [len(batch) for batch in reader.table("item.weight", ["id"])] == [10]
        assert reader.lookup("half", [1]).values.tolist() == [[0.25, 3.0]]  # as float32
        assert reader.lookup("half", [5], default=-1).values.tolist() == [[-1, -1]]


@pytest.mark.parametrize("format", ["recis", "parquet"])
def test_rows_of_tables_are_those_that_an_import_would_bring(tmp_path, format):
    rows = some_rows(60) if format == "parquet" else {**some_rows(60), "id": np.arange(60) * 7}
    if format == "recis":
        write_recis(tmp_path / "recis", {"item": {name: rows[name] for name in ("id", "embedding")}})
        path = tmp_path / "recis"
    else:
        path = tmp_path / "item.parquet"
        pl.from_arrow(arrow_table(rows)).write_parquet(path)
    import_checkpoint(path, tmp_path / "ours")
    asked = [*rows["id"][[5, 59, 0]].tolist(), 1_234_567]
    with SourceReader(path) as reader, CheckpointReader(tmp_path / "ours") as ours:
        assert reader.tables() == ours.tables() == ["item"]
        assert reader.slots("item") == ours.slots("item")
        one, other = (each.lookup("item", asked) for each in (reader, ours))
        np.testing.assert_array_equal(one.values, other.values)
        assert one.found.tolist() == other.found.tolist() == [True] * 3 + [False]
        ids = [batch.column("id").to_pylist() for batch in reader.table("item", None, asked)]
        assert sorted(chain(*ids)) == sorted(asked[:3])
        row = np.arange(one.values.shape[1], dtype=np.float32)
        defaults = [each.lookup("item", asked, default=row).values for each in (reader, ours)]
        np.testing.assert_array_equal(*defaults)
        np.testing.assert_array_equal(defaults[0][3], row)
        with pytest.raises(ValueError, match="table 'item', slot 'embedding': found default='x', expected a number"):
            reader.lookup("item", asked, default="x")
        total = sum(len(batch) for batch in reader.table("item"))
        assert total == 60


def test_duckdb_and_polars_query_the_rows_as_often_as_they_like(source):
    items = SourceReader(source).dataset("item.weight")
    rows, halves = (duckdb.from_arrow(SourceReader(source).dataset(name)) for name in ("item.weight", "half"))
    for _ in range(2):
        assert rows.filter("id > 7").sum("embedding[1]").fetchall() == [(68.0,)]
        assert halves.order("id").project("embedding[2]").fetchall() == [(-2.0,), (3.0,)]
        frame = pl.scan_pyarrow_dataset(items).filter(pl.col("id") == 2).collect()
        assert frame["embedding"].to_list() == [[8.0, 9.0, 10.0, 11.0]]
    assert items.count_rows() == 10


def test_what_is_not_there_is_refused_with_the_nearest_name(source):
    reader = SourceReader(source)
    with pytest.raises(KeyError, match=r"no dense tensor 'scaler'.*did you mean 'scalar'"):
        reader.read_tensor("scaler")
    with pytest.raises(KeyError, match=r"no table or tensor with rows 'item.wait'.*did you mean 'item.weight'"):
        reader.table("item.wait")
    with pytest.raises(KeyError, match="no table or tensor with rows 'scalar'"):
        reader.lookup("scalar", [0])
    with pytest.raises(KeyError, match=r"has no slot 'embeding'.*did you mean 'embedding'"):
        reader.table("item.weight", ["embeding"])
    with pytest.raises(KeyError, match="has no slot 'id'"):
        reader.lookup("item.weight", [0], "id")
    with pytest.raises(TypeError, match="columns must be a list of slots"):
        reader.table("item.weight", "embedding")
    with pytest.raises(TypeError, match="ids must be a sequence of int64 numbers"):
        reader.lookup("item.weight", [0.5])
    assert repr(reader).endswith("0 tables, 5 dense tensors>")


def test_what_is_damaged_between_two_reads_is_an_error_and_no_rows(tmp_path):
    path = as_safetensors(tmp_path)
    reader = SourceReader(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConversionError, match=r"found the end of the file"):
        list(reader.table("item.weight"))
    with pytest.raises(ConversionError, match=r"found no file and no directory"):
        SourceReader(tmp_path / "nothing")
    import_checkpoint(GOLDEN / "made_by_safetensors_0_8.safetensors", tmp_path / "ours")
    with pytest.raises(ConversionError, match=r"a checkpoint of recckpt"):
        SourceReader(tmp_path / "ours")
