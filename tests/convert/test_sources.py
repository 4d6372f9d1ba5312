"""What is read, format by format, and what is refused."""

from __future__ import annotations

import json
import struct

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.numpy import save_file
from support.conversions import arrow_table, import_rows, refused, rows_bytes, some_rows, table_bytes, vectors
from support.sweeps import mostly_slow

from recckpt import CheckpointReader
from recckpt.convert import ImportOptions, export_checkpoint, import_checkpoint
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


@mostly_slow()
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


def test_files_of_another_format_in_the_directory_are_listed(tmp_path):
    made = npy_directory(tmp_path, some_rows())
    (made / "more.csv").write_text("id,x\n1,2\n")
    plan = import_checkpoint(made, tmp_path / "out", format="npy", dry_run=True)
    assert [left.name for left in plan.contents.left_out] == ["more.csv"]


def test_columns_and_the_table_may_have_other_names_and_links_to_files_are_followed(tmp_path):
    (tmp_path / "blobs").mkdir()
    pq.write_table(arrow_table(some_rows()).rename_columns(["item", "vector", "count"]), tmp_path / "blobs/x.parquet")
    (tmp_path / "x.parquet").symlink_to(tmp_path / "blobs/x.parquet")  # as caches have them
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


def test_a_matrix_alone_has_the_ids_from_0_on_and_no_columns_to_choose(tmp_path):
    values = some_rows(5)["embedding"]
    np.save(tmp_path / "t.npy", values)
    with pytest.raises(ConversionError, match="an option for columns that become slots, expected none for npy"):
        import_checkpoint(tmp_path / "t.npy", tmp_path / "out", options=ImportOptions(slots=()))
    import_rows(tmp_path / "t.npy", tmp_path / "out")
    assert table_bytes(tmp_path / "out", "t") == rows_bytes({"id": np.arange(5), "embedding": values})


def test_an_import_joins_an_output_dir_but_never_replaces_a_step(tmp_path):
    source = parquet_file(tmp_path, some_rows())
    for step in (1, 2):
        import_rows(source, tmp_path / "out", step=step)
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


def parquet(path, **columns):
    pq.write_table(pa.table(columns), path / "t.parquet")
    return path / "t.parquet"


VECTORS = vectors(np.ones((2, 3), np.float32))


@pytest.mark.parametrize(
    ("ids", "column", "match"),
    [
        (pa.array([1.0, 2.0]), VECTORS, "column 'id': found ids of double, expected integers"),
        (pa.array([1.0, float("nan")]), VECTORS, "ids of double"),
        (pa.array(["a", "b"]), VECTORS, "ids of string"),
        (pa.array([1, None], pa.int64()), VECTORS, "column 'id': found nulls"),
        (pa.array([1, 2**63], pa.uint64()), VECTORS, "the id 9223372036854775808, beyond int64"),
        (pa.array([5, 5]), VECTORS, "table 't': found id 5 twice"),
        ([*range(200), 3], vectors(np.ones((201, 3), np.float32)), "id 3 twice"),  # in two runs
        ([1, 2], pa.array([[1.0], [1.0, 2.0]]), "a list of 2, expected 1 in each"),
        ([1, 2], pa.array([[1.0], None]), "found nulls"),
        ([1, 2], pa.array([[1.0], [None]]), "found nulls"),
        ([1, 2], pa.array(["x", "y"]), "column 'embedding': found string"),
        ([1, 2], pa.array([True, False]), "column 'embedding': found bool"),
    ],
)
def test_ids_and_vectors_that_are_none_are_refused(tmp_path, ids, column, match):
    refused(parquet(tmp_path, id=ids, embedding=column), match)


def test_columns_that_are_not_there_are_named_with_those_that_are(tmp_path):
    error = refused(parquet(tmp_path, item_id=[1, 2], embedding=VECTORS), "0 columns 'id'")
    assert "item_id" in str(error)
    refused(parquet(tmp_path, id=[1, 2], embeding=VECTORS), "did you mean 'embeding'")


def test_files_of_a_directory_that_differ_are_refused(tmp_path):
    (tmp_path / "t").mkdir()
    pq.write_table(pa.table({"id": [1, 2], "embedding": VECTORS}), tmp_path / "t/a.parquet")
    pq.write_table(pa.table({"id": [3], "embedding": vectors(np.ones((1, 4), "f4"))}), tmp_path / "t/b.parquet")
    refused(tmp_path / "t", "b.parquet at its columns")


@pytest.mark.parametrize("n_batches", [1, 3])
def test_a_stream_that_is_cut_between_batches_is_refused(tmp_path, n_batches):
    path, table = tmp_path / "t.arrows", arrow_table(some_rows())
    ends = []
    with path.open("wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=20):
            writer.write_batch(batch)
            ends.append(file.tell())
    path.write_bytes(path.read_bytes()[: ends[n_batches]])
    refused(path, "without an end marker")


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_files_of_arrow_that_are_cut_or_empty_are_refused(tmp_path, suffix):
    path = tmp_path / f"t.{suffix}"
    path.write_bytes(b"")
    refused(path, f"t.{suffix}: found")
    if suffix == "parquet":
        pq.write_table(arrow_table(some_rows()), path)
    else:
        with pa.ipc.new_file(path, arrow_table(some_rows()).schema) as writer:
            writer.write_table(arrow_table(some_rows()))
    path.write_bytes(path.read_bytes()[:-100])
    refused(path, f"t.{suffix}: found what Arrow cannot read")


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t"])
def test_csv_is_refused_with_what_to_do_about_it(tmp_path, name):
    (tmp_path / "t").mkdir()
    for path in (tmp_path / "t.csv", tmp_path / "t.csv.gz", tmp_path / "t/a.csv"):
        path.write_text("id,a\n1,2\n")
    refused(
        tmp_path / name, r"csv.*; convert CSV by way of Parquet, with polars: pl\.read_csv\(\.\.\.\)\.write_parquet"
    )
    with pytest.raises(ValueError, match=r"format: found 'csv', .*: convert CSV by way of Parquet"):
        import_checkpoint(tmp_path / name, tmp_path / "out", format="csv")


def test_arrays_that_are_cut_or_do_not_fit_or_would_need_code_are_refused(tmp_path):
    (tmp_path / "t").mkdir()
    np.save(tmp_path / "t/id.npy", np.arange(3))
    np.save(tmp_path / "t/embedding.npy", np.array([{}, {}, {}], object), allow_pickle=True)
    refused(tmp_path / "t", "embedding.npy: found objects, which need code to read")
    np.save(tmp_path / "t/embedding.npy", np.ones((4, 2), np.float32))
    refused(tmp_path / "t", "'id' of .*3.*'embedding' of .*4")
    np.save(tmp_path / "t/id.npy", np.arange(4))
    cut = (tmp_path / "t/embedding.npy").read_bytes()[:-9]
    (tmp_path / "t/embedding.npy").write_bytes(cut)
    refused(tmp_path / "t", "embedding.npy: found the end of the file at row 2")
    for ids, match in (
        (np.ones(4), "ids of float64"),
        (np.ones(4, np.float32), "ids of float32"),
        (np.ones((4, 1), np.int64), r"ids of shape \(4, 1\), expected one dimension"),
        (np.array(list("abcd")), "ids of str"),
    ):
        np.save(tmp_path / "t/id.npy", ids)
        refused(tmp_path / "t", match)


def test_wishes_for_columns_tensors_and_tables_are_refused_where_there_are_none(tmp_path):
    save_file({"w": np.ones((2, 2), "f4")}, tmp_path / "m.safetensors")
    match = "an option for column of .*, expected none for safetensors"
    for options in (ImportOptions(ids="key"), ImportOptions(embedding="vector")):
        refused(tmp_path / "m.safetensors", match, options=options)
    source = parquet(tmp_path, id=[1, 2], embedding=VECTORS)
    refused(source, "an option for tensors to import as tables", options=ImportOptions(as_table={"embedding": None}))
    refused(source, "no table 'u'", tables=["u"])


def header(entries, values=b""):
    data = json.dumps(entries).encode() if isinstance(entries, dict) else entries
    return struct.pack("<Q", len(data)) + data + values


def entry(**changes):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"\x05", "found 1 bytes that begin"),
        (struct.pack("<Q", 2**62) + b"{}", "found 10 bytes that begin with"),
        (header(b"[]"), "its header: found no object"),
        (header(b"{"), "its header: found invalid JSON"),
        (header(b'{"a": 1, "a": 2}'), "a name occurs twice"),
        (header({"x": entry()}, b"1234567"), "its size: found 7 bytes of values, expected 8; the file is cut"),
        (header({"x": entry()}, b"123456789"), "its size"),
        (header({"x": entry(shape=[3])}, b"12345678"), "tensor 'x': found 8 bytes, expected 12"),
        (header({"x": entry(shape=[-2, -1])}, b"12345678"), "tensor 'x'"),
        (header({"x": entry(dtype="F31")}, b"12345678"), "found dtype 'F31'"),
        (header({"x": entry(data_offsets=[8, 16])}, b"1" * 16), "values at byte 8, expected at 0"),
        (header({"x": entry(), "y": entry()}, b"1" * 8), "tensor 'y': found values at byte 0, expected at 8"),
        (header({"x": 3}), "tensor 'x': found 3"),
        (header({"__metadata__": {"a": 1}}), "__metadata__"),
        (header({"__metadata__": {"recckpt": '{"tables": {"t": ["embedding"]}}'}}), "expected t.id, t.embedding"),
        (header({"__metadata__": {"recckpt": "[]"}}), "recckpt: found"),
    ],
)
def test_headers_of_safetensors_that_lie_are_refused(tmp_path, data, match):
    (tmp_path / "x.safetensors").write_bytes(data)
    refused(tmp_path / "x.safetensors", match)


def test_a_missing_file_of_sharded_safetensors_is_named(tmp_path):
    made = tmp_path / "x"
    made.mkdir()
    save_file({"a": np.ones(2)}, made / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (made / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    refused(made, "model-00002-of-00002.safetensors: found no such file")
    names["b"] = "../../secret"
    (made / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    refused(made, "secret: found no such file")


@pytest.mark.parametrize(
    ("as_table", "match"),
    [
        ({"emb": None}, "no tensor 'emb'.*did you mean 'embs'"),
        ({"embs": "id"}, "no tensor 'id'"),
        ({"ids": None}, "expected a tensor of two dimensions"),
        ({"embs": "few"}, "expected one row per id in each"),
        ({"embs": "floats"}, "tensor 'floats': found ids of float64"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(tmp_path, as_table, match):
    tensors = {"embs": np.ones((3, 2), "f4"), "ids": np.arange(3), "few": np.arange(2), "floats": np.ones(3)}
    save_file(tensors, tmp_path / "x.safetensors")
    refused(tmp_path / "x.safetensors", match, options=ImportOptions(as_table=as_table))


@pytest.fixture
def store():
    memory = fsspec.filesystem("memory")
    yield memory
    memory.rm("/conversions", recursive=True)


def put(store, source, name):
    for path in [source] if source.is_file() else sorted(source.rglob("*")):
        if path.is_file():
            inner = "" if path == source else f"/{path.relative_to(source)}"
            store.pipe(f"/conversions/{name}{inner}", path.read_bytes())
    return f"memory://conversions/{name}"


def test_a_source_that_is_not_there_or_of_no_known_format_is_refused(tmp_path, store):
    refused(tmp_path / "nothing", "no file and no directory")
    (tmp_path / "t.txt").write_text("x")
    refused(tmp_path / "t.txt", "files of an unknown format: t.txt")
    with pytest.raises(ValueError, match=r"found 'parket', .*did you mean 'parquet'"):
        import_checkpoint(tmp_path / "t.txt", tmp_path / "out", format="parket")
    store.pipe("/conversions/x", b"")
    with pytest.raises(ConversionError, match="found no file and no directory"):
        import_checkpoint("memory://conversions/none.parquet", tmp_path / "out")


@pytest.mark.parametrize("to", ["parquet", "npy", "safetensors"])
def test_what_was_exported_to_a_url_is_imported_from_there(tmp_path, store, to):
    np.savez(tmp_path / "t.npz", **some_rows())
    url = put(store, tmp_path / "t.npz", "t.npz")
    import_rows(url, "memory://conversions/run")
    target = f"memory://conversions/x.{to}"
    export_checkpoint("memory://conversions/run", target, to=to, slots=["embedding", "count"])
    import_checkpoint(target if to == "safetensors" else f"{target}/t", tmp_path / "back")
    assert table_bytes(tmp_path / "back", "t") == rows_bytes(some_rows())
    with pytest.raises(FileExistsError):
        export_checkpoint("memory://conversions/run", target, to=to)
