"""What every source of rows promises: any format, the same checkpoint, bit for bit."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.numpy import save_file
from support.conversions import arrow_table, import_rows, rows_bytes, some_rows, table_bytes

from recckpt import CheckpointReader
from recckpt.convert import ImportOptions, import_checkpoint
from recckpt.errors import CheckpointExistsError, ConversionError
from recckpt.inspect.verify import verify


def parquet_file(path, rows):
    pq.write_table(arrow_table(rows), path / "t.parquet")
    return path / "t.parquet"


def parquet_directory(path, rows):
    made = path / "t"
    (made / "day=1").mkdir(parents=True)
    table = arrow_table(rows)
    pq.write_table(table.slice(0, 3), made / "a.parquet")
    pq.write_table(table.slice(3), made / "day=1/b.parquet", row_group_size=7)
    (made / "_SUCCESS").touch()
    return made


def arrow_file(path, rows):
    with pa.ipc.new_file(path / "t.arrow", arrow_table(rows).schema) as writer:
        writer.write_table(arrow_table(rows), max_chunksize=7)
    return path / "t.arrow"


def arrow_stream(path, rows):
    with pa.ipc.new_stream(path / "t.arrows", arrow_table(rows).schema) as writer:
        writer.write_table(arrow_table(rows))
    return path / "t.arrows"


def lists_of_one_length(path, rows):
    table = arrow_table(rows)
    lists = pa.array([list(row) for row in rows["embedding"]], pa.list_(pa.float32()))
    pq.write_table(table.set_column(1, "embedding", lists), path / "t.parquet")
    return path / "t.parquet"


def npy_directory(path, rows):
    (path / "t").mkdir()
    for name, values in rows.items():
        np.save(path / "t" / f"{name}.npy", values)
    return path / "t"


def npz(path, rows):
    np.savez_compressed(path / "t.npz", **rows)
    return path / "t.npz"


def safetensors_with_tables(path, rows):
    tensors = {f"t.{name}": values for name, values in rows.items()}
    save_file(tensors, path / "x.safetensors", {"recckpt": '{"tables": {"t": ["embedding", "count"]}}'})
    return path / "x.safetensors"


SOURCES = [
    *(parquet_file, parquet_directory, arrow_file, arrow_stream, lists_of_one_length, npy_directory, npz),
    safetensors_with_tables,
]


@pytest.mark.parametrize("make", SOURCES)
def test_the_rows_of_a_source_are_those_of_the_checkpoint_bit_for_bit(tmp_path, make):
    rows = some_rows()
    source = make(tmp_path, rows)

    done = import_rows(source, tmp_path / "out", step=7)

    assert (done.ckpt_id, done.rows) == ("ckpt_7", {"t": 100})
    assert [left.name for left in done.contents.left_out] == ["partition day"] * (make is parquet_directory)
    assert table_bytes(tmp_path / "out", "t") == rows_bytes(rows)
    assert not verify(str(tmp_path / "out"))
    with CheckpointReader(tmp_path / "out") as reader:
        assert reader.manifest.step == 7
        assert reader.manifest.state["imported_from"] == str(source)


@pytest.mark.parametrize("make", SOURCES)
def test_a_dry_run_says_the_same_and_writes_nothing(tmp_path, make):
    source = make(tmp_path, some_rows())
    planned = import_checkpoint(source, tmp_path / "out", dry_run=True)
    assert not (tmp_path / "out").exists()
    done = import_checkpoint(source, tmp_path / "out")
    assert (planned.rows, planned.ckpt_id) == (done.rows, done.ckpt_id)
    assert [(t.name, t.slots) for t in planned.contents.tables] == [(t.name, t.slots) for t in done.contents.tables]


def test_each_value_of_a_line_of_csv_is_one_of_the_vector(tmp_path):
    (tmp_path / "t.csv").write_text("a,id,b\n0.5,-9223372036854775808,1\n-2,9223372036854775807,nan\n")
    import_rows(tmp_path / "t.csv", tmp_path / "out")
    expected = {"id": np.array([-(2**63), 2**63 - 1]), "embedding": np.array([[0.5, 1], [-2, np.nan]], np.float32)}
    assert table_bytes(tmp_path / "out", "t") == rows_bytes(expected)


def test_the_plan_names_the_columns_of_csv_that_become_the_vector(tmp_path):
    (tmp_path / "t.csv").write_text("id,x,y\n1,10,20\n")
    plan = import_checkpoint(tmp_path / "t.csv", tmp_path / "out", dry_run=True)
    left = plan.contents.left_out
    assert [(each.name, each.reason) for each in left] == [
        ("columns x, y", "are, in this order, the values of embedding")
    ]


def test_files_of_another_format_in_the_directory_are_listed(tmp_path):
    made = npy_directory(tmp_path, some_rows())
    (made / "more.csv").write_text("id,x\n1,2\n")
    plan = import_checkpoint(made, tmp_path / "out", format="npy", dry_run=True)
    assert [left.name for left in plan.contents.left_out] == ["more.csv"]


def test_columns_and_the_table_may_have_other_names(tmp_path):
    pq.write_table(arrow_table(some_rows()).rename_columns(["item", "vector", "count"]), tmp_path / "x.parquet")
    options = ImportOptions(table="items", ids="item", embedding="vector")
    import_rows(tmp_path / "x.parquet", tmp_path / "out", options=options)
    assert table_bytes(tmp_path / "out", "items") == rows_bytes(some_rows())


@pytest.mark.parametrize(("slots", "left"), [(("count",), ["title"]), ((), ["count", "title"])])
def test_columns_that_cannot_be_slots_are_left_out_where_others_are_chosen(tmp_path, slots, left):
    rows = some_rows()
    pq.write_table(arrow_table(rows).append_column("title", pa.array(["x"] * 100)), tmp_path / "t.parquet")
    with pytest.raises(ConversionError, match=r"column 'title': found string, expected numbers.*; .*slots"):
        import_checkpoint(tmp_path / "t.parquet", tmp_path / "out")
    done = import_checkpoint(tmp_path / "t.parquet", tmp_path / "out", options=ImportOptions(slots=slots))
    assert [each.name for each in done.contents.left_out] == [f"column {name}" for name in left]
    expected = {name: values for name, values in rows.items() if name in ("id", "embedding", *slots)}
    assert table_bytes(tmp_path / "out", "t") == rows_bytes(expected)
    with pytest.raises(ConversionError, match=r"found slots \['cuont'\], expected some of .*did you mean 'count'"):
        import_checkpoint(tmp_path / "t.parquet", tmp_path / "other", options=ImportOptions(slots=("cuont",)))


def test_a_choice_of_columns_is_refused_where_there_is_none(tmp_path):
    np.save(tmp_path / "t.npy", some_rows(5)["embedding"])
    with pytest.raises(ConversionError, match="an option for columns that become slots, expected none, of npy"):
        import_checkpoint(tmp_path / "t.npy", tmp_path / "out", options=ImportOptions(slots=()))


def test_a_matrix_alone_has_the_ids_from_0_on(tmp_path):
    values = some_rows(5)["embedding"]
    np.save(tmp_path / "t.npy", values)
    import_rows(tmp_path / "t.npy", tmp_path / "out")
    assert table_bytes(tmp_path / "out", "t") == rows_bytes({"id": np.arange(5), "embedding": values})


def test_an_import_joins_an_output_dir_but_never_replaces_a_step(tmp_path):
    source = parquet_file(tmp_path, some_rows())
    import_rows(source, tmp_path / "out", step=1)
    import_rows(source, tmp_path / "out", step=2)
    with pytest.raises(CheckpointExistsError, match="'ckpt_2' is committed already"):
        import_rows(source, tmp_path / "out", step=2)


@settings(max_examples=12, deadline=None)
@given(data=st.data(), n_rows=st.integers(1, 40))
def test_any_ids_and_values_come_through(data, n_rows, tmp_path_factory):
    path = tmp_path_factory.mktemp("any")
    ids = data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=n_rows, max_size=n_rows, unique=True))
    dtype = data.draw(st.sampled_from(["<f2", "<f4", "<f8", "i1", "u1", "<i2", "<i4", "<i8"]))
    shape = data.draw(st.sampled_from([(n_rows,), (n_rows, 1), (n_rows, 3), (n_rows, 2, 2)]))
    rows = {"id": np.array(ids, np.int64), "embedding": data.draw(arrays(dtype, shape))}
    import_checkpoint(npz(path, rows), path / "out", budget_bytes=data.draw(st.integers(1, 1000)))
    assert table_bytes(path / "out", "t") == rows_bytes(rows)
