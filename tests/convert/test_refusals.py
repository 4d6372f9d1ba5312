"""What cannot be a checkpoint is refused by name, and nothing is written."""

import gzip
import json
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file
from support.conversions import arrow_table, some_rows, vectors

from recckpt.convert import ImportOptions, import_checkpoint
from recckpt.errors import ConversionError


def refused(source, match, **options):
    out = source.parent / "out"
    with pytest.raises(ConversionError, match=match) as error:
        import_checkpoint(source, out, budget_bytes=500, **options)
    assert not out.exists()
    assert [path.name for path in source.parent.iterdir() if path.name.startswith("recckpt-")] == []
    return error.value


def parquet(path, **columns):
    pq.write_table(pa.table(columns), path / "t.parquet")
    return path / "t.parquet"


VECTORS = vectors(np.ones((2, 3), np.float32))


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        (pa.array([1.0, 2.0]), "column 'id': found ids of double, expected integers"),
        (pa.array([1.0, float("nan")]), "ids of double"),
        (pa.array(["a", "b"]), "ids of string"),
        (pa.array([1, None], pa.int64()), "column 'id': found nulls"),
        (pa.array([1, 2**63], pa.uint64()), "the id 9223372036854775808, beyond int64"),
        (pa.array([5, 5]), "table 't': found id 5 twice"),
    ],
)
def test_ids_that_are_none_are_refused(tmp_path, ids, match):
    refused(parquet(tmp_path, id=ids, embedding=VECTORS), match)


def test_an_id_in_two_runs_is_found(tmp_path):
    rows = some_rows(300)
    rows["id"][250] = rows["id"][3]
    pq.write_table(arrow_table(rows), tmp_path / "t.parquet")
    refused(tmp_path / "t.parquet", f"id {rows['id'][3]} twice")


@pytest.mark.parametrize(
    ("column", "match"),
    [
        (pa.array([[1.0], [1.0, 2.0]]), "a list of 2, expected 1 in each"),
        (pa.array([[1.0], None]), "found nulls"),
        (pa.array([[1.0], [None]]), "found nulls"),
        (pa.array(["x", "y"]), "column 'embedding': found string"),
        (pa.array([True, False]), "column 'embedding': found bool"),
    ],
)
def test_vectors_that_are_none_are_refused(tmp_path, column, match):
    refused(parquet(tmp_path, id=[1, 2], embedding=column), match)


def test_columns_that_are_not_there_are_named_with_those_that_are(tmp_path):
    error = refused(parquet(tmp_path, item_id=[1, 2], embedding=VECTORS), "0 columns 'id'")
    assert "item_id" in str(error)
    refused(parquet(tmp_path, id=[1, 2], embeding=VECTORS), "did you mean 'embeding'")


def test_files_of_a_directory_that_differ_are_refused(tmp_path):
    (tmp_path / "t").mkdir()
    pq.write_table(pa.table({"id": [1, 2], "embedding": VECTORS}), tmp_path / "t/a.parquet")
    pq.write_table(pa.table({"id": [3], "embedding": vectors(np.ones((1, 4), "f4"))}), tmp_path / "t/b.parquet")
    refused(tmp_path / "t", "b.parquet at its columns")


@pytest.mark.parametrize("header", ["id,y,x", "id,count,price", "id,x"])
def test_files_of_csv_with_other_headers_are_not_joined(tmp_path, header):
    (tmp_path / "t").mkdir()
    (tmp_path / "t/a.csv").write_text("id,x,y\n1,10,20\n")
    (tmp_path / "t/b.csv").write_text(f"{header}\n{','.join('2' for _ in header.split(','))}\n")
    refused(tmp_path / "t", "b.csv at line 1: found .*, expected those of a.csv")


def test_packed_csv_that_is_cut_is_named(tmp_path):
    packed = gzip.compress(b"id,x\n" + b"".join(b"%d,%d.5\n" % (n, n) for n in range(2000)))
    (tmp_path / "t.csv.gz").write_bytes(packed[: len(packed) // 2])
    refused(tmp_path / "t.csv.gz", "t.csv.gz: found damage .*, expected a whole file of gzip")


@pytest.mark.parametrize("n_batches", [1, 3])
def test_a_stream_that_is_cut_between_batches_is_refused(tmp_path, n_batches):
    path, table = tmp_path / "t.arrows", arrow_table(some_rows())
    ends = []
    with path.open("wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=20):
            writer.write_batch(batch)
            ends.append(file.tell())
    path.write_bytes(path.read_bytes()[: ends[n_batches]])
    refused(path, "without the mark of its end")


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
    refused(path, f"t.{suffix}: found what Arrow does not read")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("id,a\n1.5,2\n", "t.csv: found .*1.5.*, expected 'id' an int64"),
        ("id,a\n1.0,2\n", "t.csv: found .*'id' an int64 .1, not 1.0."),
        ("id,a\n1,2\n,3\n", "row 2, column 'id': found an empty field"),
        ("id,a\n1,2\n2,1e50\n", "row 2, column 'a': found infinity, or a number beyond float32"),
        (",id,a\n0,1,2\n", "none empty; .*index=False"),
        ("id,a\nnan,2\n", "t.csv: found"),
        ("id,a\n9223372036854775808,2\n", "t.csv: found"),
        ("id,a\n1,x\n", "t.csv: found"),
        ("id,a\n1,\n", "a value is missing"),
        ("id,a\n1,2,3\n", "t.csv: found"),
        ("key,a\n1,2\n", "line 1"),
        ("id,a,a\n1,2,3\n", "line 1"),
        ("id,a\n", "no rows"),
    ],
)
def test_lines_of_csv_that_are_no_rows_are_refused(tmp_path, text, match):
    (tmp_path / "t.csv").write_text(text)
    refused(tmp_path / "t.csv", match)


def test_arrays_of_objects_would_need_code_and_are_refused(tmp_path):
    (tmp_path / "t").mkdir()
    np.save(tmp_path / "t/id.npy", np.arange(2))
    np.save(tmp_path / "t/embedding.npy", np.array([{}, {}], object), allow_pickle=True)
    refused(tmp_path / "t", "embedding.npy: found objects, which need code to read")


def test_arrays_that_are_cut_or_do_not_fit_are_refused(tmp_path):
    (tmp_path / "t").mkdir()
    np.save(tmp_path / "t/id.npy", np.arange(3))
    np.save(tmp_path / "t/embedding.npy", np.ones((4, 2), np.float32))
    refused(tmp_path / "t", "'id' of .*3.*'embedding' of .*4")
    np.save(tmp_path / "t/id.npy", np.arange(4))
    cut = (tmp_path / "t/embedding.npy").read_bytes()[:-9]
    (tmp_path / "t/embedding.npy").write_bytes(cut)
    refused(tmp_path / "t", "embedding.npy: found the end of the file at row 2")
    np.save(tmp_path / "t/id.npy", np.ones(4))
    refused(tmp_path / "t", "ids of float64")
    np.save(tmp_path / "t/id.npy", np.ones(4, np.float32))
    refused(tmp_path / "t", "ids of float32")
    np.save(tmp_path / "t/id.npy", np.ones((4, 1), np.int64))
    refused(tmp_path / "t", r"ids of shape \(4, 1\), expected one dimension")
    np.save(tmp_path / "t/id.npy", np.array(list("abcd")))
    refused(tmp_path / "t", "ids of str")


@pytest.mark.parametrize("options", [ImportOptions(ids="key"), ImportOptions(embedding="vector")])
def test_wishes_for_columns_are_refused_where_there_are_none(tmp_path, options):
    save_file({"w": np.ones((2, 2), "f4")}, tmp_path / "m.safetensors")
    refused(tmp_path / "m.safetensors", "an option for column of .*, expected none, of safetensors", options=options)


def test_a_wish_for_tensors_as_tables_is_refused_of_rows(tmp_path):
    source = parquet(tmp_path, id=[1, 2], embedding=VECTORS)
    refused(source, "an option for tensors that are to be tables", options=ImportOptions(as_table={"embedding": None}))


def header(entries, values=b""):
    data = json.dumps(entries).encode() if isinstance(entries, dict) else entries
    return struct.pack("<Q", len(data)) + data + values


def entry(**changes):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"\x05", "byte 0"),
        (struct.pack("<Q", 2**62) + b"{}", "byte 0: found one of 4611686018427387904"),
        (header(b"[]"), "its header: found no object"),
        (header(b"{"), "its header: found no JSON"),
        (header(b'{"a": 1, "a": 2}'), "a name is there twice"),
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
        ({"embs": "few"}, "expected one row an id in each"),
        ({"embs": "floats"}, "tensor 'floats': found ids of float64"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(tmp_path, as_table, match):
    tensors = {"embs": np.ones((3, 2), "f4"), "ids": np.arange(3), "few": np.arange(2), "floats": np.ones(3)}
    save_file(tensors, tmp_path / "x.safetensors")
    refused(tmp_path / "x.safetensors", match, options=ImportOptions(as_table=as_table))


def test_a_source_that_is_not_there_or_of_no_known_format_is_refused(tmp_path):
    refused(tmp_path / "nothing", "no file and no directory")
    (tmp_path / "t.txt").write_text("x")
    refused(tmp_path / "t.txt", "files of no format that is known: t.txt")
    with pytest.raises(ValueError, match=r"found 'parket', .*did you mean 'parquet'"):
        import_checkpoint(tmp_path / "t.txt", tmp_path / "out", format="parket")


def test_a_table_that_is_asked_for_and_not_there_is_refused(tmp_path):
    refused(parquet(tmp_path, id=[1, 2], embedding=VECTORS), "no table 'u'", tables=["u"])
