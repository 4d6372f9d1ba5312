"""What is written, format by format, and read again."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch_file
from support.conversions import arrow_table, rows_bytes, some_rows, table_bytes
from support.delta_runs import rows_of, run_with_chain
from support.sweeps import mostly_slow
from torch import nn

from recckpt import CheckpointReader, Saver
from recckpt.convert import ImportOptions, export_checkpoint, import_checkpoint, view
from recckpt.convert.view import narrowed
from recckpt.errors import ConversionError
from recckpt.format.tensor_index import widened
from recckpt.inspect import dataset
from recckpt.policies import Choose
from recckpt.sparse import HashTable
from recckpt.types import SlotSpec

ROUND_TRIPS = ["parquet", "npy", "safetensors"]


def checkpoint(path, rows=None, name="t"):
    """Return an output dir with one table and one dense tensor."""
    tensors = {f"{name}.{slot}": values for slot, values in (rows or some_rows()).items()}
    slots = [slot for slot in (rows or some_rows()) if slot != "id"]
    metadata = {"recckpt": json.dumps({"tables": {name: slots}})}
    save_file({**tensors, "w": np.arange(3, dtype=np.float32)}, path / "made.safetensors", metadata)
    import_checkpoint(path / "made.safetensors", path / "run", step=3)
    return path / "run"


@pytest.mark.parametrize("to", ROUND_TRIPS)
def test_what_was_exported_comes_back_bit_for_bit(tmp_path, to):
    target = tmp_path / f"out.{to}"
    done = export_checkpoint(checkpoint(tmp_path), target, to=to, slots=["embedding", "count"])
    back = import_checkpoint(target if to == "safetensors" else target / "t", tmp_path / "back", format=to)
    assert table_bytes(tmp_path / "back", "t") == rows_bytes(some_rows())
    assert done.metadata["tables"]["t"]["rows"] == back.rows["t"] == 100
    assert done.metadata["checkpoint"] == "ckpt_3"


@settings(max_examples=10, deadline=None)
@given(
    ids=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20, unique=True),
    dtype=st.sampled_from(["f2", "f4", "f8", "i1", "u1", "i2", "i4", "i8"]),
    shape=st.sampled_from([(), (1,), (3,), (2, 2)]),
    to=st.sampled_from(ROUND_TRIPS),
)
def test_any_ids_dtypes_and_shapes_come_back(ids, dtype, shape, to, tmp_path_factory):
    path = tmp_path_factory.mktemp("any")
    values = np.random.default_rng(0).integers(0, 2**63, (len(ids), *shape, 1)).view(np.uint8)
    values = np.ascontiguousarray(values[..., : np.dtype(dtype).itemsize]).view(dtype)[..., 0]
    rows = {"id": np.array(ids, np.int64), "embedding": values}
    target = path / "out"
    export_checkpoint(checkpoint(path, rows), target, to=to)
    import_checkpoint(target if to == "safetensors" else target / "t", path / "back", format=to)
    assert table_bytes(path / "back", "t") == rows_bytes(rows)


@pytest.mark.parametrize("to", ["parquet", "npy"])
def test_bfloat16_is_widened_to_float32_where_the_format_lacks_it(tmp_path, to):
    table = HashTable(4, name="t", dtype=torch.bfloat16)
    values = torch.randn(9, 4).bfloat16()
    table.insert(torch.arange(9), values)
    Saver(nn.ModuleDict({"t": table}), output_dir=tmp_path / "run").save("a")
    export_checkpoint(tmp_path / "run", tmp_path / "out", to=to)
    back = import_checkpoint(tmp_path / "out/t", tmp_path / "back")
    dtype = "bfloat16" if to == "parquet" else "float32"  # a column of Parquet says what it was
    assert back.contents.tables[0].slots == (SlotSpec("embedding", dtype, (4,)),)
    exact = values.view(torch.int16).numpy() if to == "parquet" else values.float().numpy()
    assert table_bytes(tmp_path / "back", "t") == rows_bytes({"id": np.arange(9), "embedding": exact})


def test_parquet_is_what_others_read(tmp_path):
    export_checkpoint(checkpoint(tmp_path, name="user/1"), tmp_path / "out", to="parquet", slots=["embedding", "count"])
    [file] = (tmp_path / "out/user%2F1").iterdir()
    found = pq.read_table(file)
    assert found.column_names == ["id", "embedding", "count"]
    said = json.loads(pq.read_schema(file).metadata[b"recckpt"])
    assert (said["table"], said["rows"], said["step"]) == ("user/1", 100, 3)


def test_safetensors_have_the_dense_tensors_too(tmp_path):
    export_checkpoint(checkpoint(tmp_path), tmp_path / "x.safetensors", to="safetensors")
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == {"w", "t.id", "t.embedding"}
    assert found["w"].tolist() == [0, 1, 2]
    with safe_open(tmp_path / "x.safetensors", "np") as file:
        assert json.loads(file.metadata()["recckpt"])["tables"] == {"t": ["embedding"]}


def test_a_matrix_has_the_row_of_each_id_at_its_place(tmp_path):
    rows = {"id": np.array([5, 0, 2]), "embedding": np.arange(6, dtype=np.float32).reshape(3, 2)}
    done = export_checkpoint(checkpoint(tmp_path, rows), tmp_path / "out", to="embedding")
    matrix = np.load(tmp_path / "out/t.npy")
    assert matrix.tolist() == [[2, 3], [0, 0], [4, 5], [0, 0], [0, 0], [0, 1]]
    assert nn.Embedding.from_pretrained(torch.from_numpy(matrix))(torch.tensor([5])).tolist() == [[0, 1]]
    assert [left.name for left in done.left_out] == ["dense w"]


@pytest.mark.parametrize(("id_", "match"), [(-1, "the id -1, expected ids from 0 on"), (2**40, "the id 1099511627776")])
def test_ids_that_are_no_places_in_a_matrix_are_refused(tmp_path, id_, match):
    rows = {"id": np.array([id_]), "embedding": np.ones((1, 2), np.float32)}
    with pytest.raises(ConversionError, match=match):
        export_checkpoint(checkpoint(tmp_path, rows), tmp_path / "out", to="embedding")
    assert not (tmp_path / "out").exists()


def test_rows_are_chosen_as_in_a_load_conf(tmp_path):
    where = {"count": {"min": 90}}
    run = checkpoint(tmp_path)
    for to in ROUND_TRIPS:
        done = export_checkpoint(run, tmp_path / to, to=to, where=where)
        assert done.metadata["tables"]["t"]["rows"] == 10
    assert sorted(np.load(tmp_path / "npy/t/id.npy")) == sorted(some_rows()["id"][90:])
    assert sorted(load_file(tmp_path / "safetensors")["t.id"]) == sorted(some_rows()["id"][90:])


@mostly_slow()
@pytest.mark.parametrize(
    ("dtype", "values", "least"),
    [
        (torch.bfloat16, [0.25, 0.5, 1, -1, float("nan")], 0.5),
        (torch.float16, [0.25, 0.1, float("inf"), -1], 0.1),  # as float16 that is less than 0.1
        (torch.float16, [65504, float("inf")], 1e6),
        (torch.int8, [1, 2, -3, 100], 1.5),
        (torch.int8, [1, 100], 1000),
        (torch.int64, [2**53, 2**53 + 1, 2**63 - 1, -(2**63)], 2**53 + 1),  # no float64
        (torch.int64, [2**63 - 1, 0], 2**64),
        (torch.float64, [2.0**53, 2.0**53 + 2], 2**53 + 1),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_least_value_means_the_same_rows_to_a_save_a_load_and_an_export(tmp_path, dtype, values, least, shape):
    def table():
        made = HashTable(1, name="t")
        made.add_slot("s", shape, dtype)
        return made

    column, ids, where = torch.tensor(values).to(dtype), torch.arange(len(values)), {"s": {"min": least}}
    expected = [row for row, value in enumerate(column.tolist()) if value >= least]
    source, loaded = table(), table()
    source.insert(ids, torch.zeros(len(ids), 1), {"s": column.reshape(-1, *shape)})
    model = nn.ModuleDict({"t": source})
    Saver(model, output_dir=str(tmp_path / "all")).save("c")
    Saver(model, output_dir=str(tmp_path / "some"), choose=Choose(where={"t": where})).save("c")
    into = Saver(nn.ModuleDict({"t": loaded}), output_dir=str(tmp_path / "own"))
    into.load_by_config([{"path": str(tmp_path / "all"), "where": where}])
    export_checkpoint(tmp_path / "all", tmp_path / "out", to="npy", where=where)
    assert sorted(dataset(tmp_path / "some", "t").to_table()["id"].to_pylist()) == expected
    assert sorted(loaded.ids().tolist()) == expected
    assert sorted(np.load(tmp_path / "out" / "t" / "id.npy").tolist()) == expected
    reduced = CheckpointReader(tmp_path / "some").manifest.tables[0].reduced
    assert dict(reduced.where.minimum) == {"s": least}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_narrow_vectors_are_as_far_off_as_their_metadata_says(tmp_path, dtype):
    rows = some_rows()
    rows["embedding"][0, 0] = 0
    done = export_checkpoint(checkpoint(tmp_path, rows), tmp_path / "x.safetensors", to="safetensors", dtype=dtype)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        found = file.get_tensor("t.embedding").float()
        if dtype == "int8":
            found = found * file.get_tensor("t.embedding_scale")[:, None]
        by_id = dict(zip(file.get_tensor("t.id").tolist(), found.tolist(), strict=True))
        said = json.loads(file.metadata()["recckpt"])["export"]["tables"]["t"]["largest_error"]
    back = np.array([by_id[int(id_)] for id_ in rows["id"]])
    assert np.abs(back - rows["embedding"]).max() == pytest.approx(said, rel=1e-6)
    assert 0 < said < {"float16": 2e-3, "bfloat16": 1e-2, "int8": 2e-2}[dtype]
    assert done.metadata["tables"]["t"]["largest_error"] == said


@pytest.mark.parametrize("to", ["safetensors", "dcp", "recis"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dense_tensors_of_floats_are_narrowed_and_others_are_not(tmp_path, to, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[1].tied = model[0].weight
    Saver(model, output_dir=str(tmp_path / "run")).save("c")
    export_checkpoint(tmp_path / "run", tmp_path / f"out.{to}", to=to, dtype=dtype)
    import_checkpoint(tmp_path / f"out.{to}", tmp_path / "back")
    narrow = {
        name: value.to(getattr(torch, dtype)) for name, value in model.state_dict().items() if value.is_floating_point()
    }
    with CheckpointReader(tmp_path / "back") as reader:
        found = {name: (reader.tensor_dtype(name), reader.read_tensor(name)) for name in model.state_dict()}
    assert {name: kind for name, (kind, _) in found.items() if kind != dtype} == {"1.num_batches_tracked": "int64"}
    for name, value in narrow.items():
        assert found[name][1].tobytes() == value.view(torch.int16).numpy().tobytes(), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_large_tensor_is_narrowed_in_pieces_as_torch_casts_it_whole(tmp_path, monkeypatch, dtype):
    torch.manual_seed(0)
    weight = torch.randn(3, 400_001)  # more than a piece, and the last is not full
    assert weight.numel() > view._PIECE
    assert weight.numel() % view._PIECE
    Saver(nn.ParameterDict({"w": nn.Parameter(weight)}), output_dir=str(tmp_path / "run")).save("c")
    export_checkpoint(tmp_path / "run", tmp_path / "out.safetensors", to="safetensors", dtype=dtype)
    found = load_torch_file(tmp_path / "out.safetensors")["w"]
    assert torch.equal(found, weight.to(getattr(torch, dtype)))


def test_a_dense_buffer_of_int8_stays_as_it_is_beside_vectors_of_int8(tmp_path):
    model = nn.Module()
    model.register_buffer("steps", torch.arange(-3, 3, dtype=torch.int8))
    model.register_buffer("scale", torch.tensor([0.1]))
    Saver(model, output_dir=str(tmp_path / "dense")).save("c")
    with pytest.raises(ConversionError, match=r"found no slot 'embedding'.*export without a dtype"):
        export_checkpoint(tmp_path / "dense", tmp_path / "out.safetensors", to="safetensors", dtype="int8")
    model.table = HashTable(2, name="t")
    model.table(torch.arange(5))
    Saver(model, output_dir=str(tmp_path / "run")).save("c")
    export_checkpoint(tmp_path / "run", tmp_path / "out.safetensors", to="safetensors", dtype="int8")
    found = load_torch_file(tmp_path / "out.safetensors")
    assert torch.equal(found["steps"], model.steps)
    assert torch.equal(found["scale"], model.scale), "dense floats are not made int8"
    assert found["t.embedding"].dtype == torch.int8


def test_a_dense_value_beyond_a_dtype_is_refused_by_the_name_of_its_tensor(tmp_path):
    model = nn.ParameterDict({"w": nn.Parameter(torch.tensor([[1.0], [1e6]]))})
    Saver(model, output_dir=str(tmp_path / "run")).save("c")
    with pytest.raises(
        ConversionError, match=r"tensor 'w': found 1000000\.0, expected what float16 holds; keep the dtype"
    ):
        export_checkpoint(tmp_path / "run", tmp_path / "out", to="safetensors", dtype="float16")
    with pytest.raises(ConversionError, match="export without a dtype"):
        export_checkpoint(tmp_path / "run", tmp_path / "out", to="safetensors", dtype="int8")
    assert not (tmp_path / "out").exists()


@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_bfloat16_is_rounded_as_torch_does(values):
    exact = np.array(values, np.float32)[:, None]
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(exact).bfloat16()
    if not torch.isfinite(expected[np.isfinite(exact)]).all():
        return  # refused
    [bits], _ = narrowed(exact, SlotSpec("embedding", "float32", (1,)), "bfloat16", "t")
    assert np.array_equal(widened(bits), expected.float().numpy(), equal_nan=True)


@mostly_slow()
@pytest.mark.parametrize(
    ("kind", "dtype", "value"),
    [
        *(("f4", "float16", 1e6), ("f4", "int8", np.inf), ("f4", "int8", np.nan)),
        *(("f8", "float16", 1e6), ("f8", "bfloat16", 1e39), ("f8", "int8", 1e41), ("f8", "int8", 1e200)),
    ],
)
@pytest.mark.parametrize("to", ROUND_TRIPS)
def test_values_beyond_a_dtype_are_refused_and_nothing_is_left(tmp_path, kind, dtype, value, to):
    rows = {"id": np.array([7, 8]), "embedding": np.array([[1, 2], [1, value]], kind)}
    match = re.escape(f"found {value} in id 8, expected what {dtype} holds")
    if dtype == "bfloat16" and to != "safetensors":
        match = f"bfloat16 for {to}"
    with pytest.raises(ConversionError, match=match):
        export_checkpoint(checkpoint(tmp_path, rows), tmp_path / "out", to=to, dtype=dtype)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_vectors_are_narrowed_where_a_filter_keeps_none(tmp_path, dtype):
    source, to = checkpoint(tmp_path), "safetensors"
    done = export_checkpoint(source, tmp_path / "out", to=to, dtype=dtype, where={"count": {"min": 10**6}})
    assert (done.metadata["tables"]["t"]["rows"], done.metadata["tables"]["t"]["largest_error"]) == (0, 0.0)


@pytest.mark.parametrize("to", ["parquet", "npy"])
def test_an_increment_makes_the_newer_checkpoint_of_the_older_and_of_itself_none(tmp_path, to):
    def column(table, name):
        if to == "npy":
            return np.load(tmp_path / "out" / table / f"{name}.npy").tolist()
        return pq.read_table(tmp_path / "out" / table)[name].to_pylist()

    storage = run_with_chain(tmp_path / "run")
    done = export_checkpoint(tmp_path / "run/ckpt_3", tmp_path / "out", to=to, since="ckpt_1")
    assert (done.metadata["since"], done.metadata["tables"]["item"]["replaced"]) == ("ckpt_1", False)
    upserts, deletes = column("item", "id"), column("item.deletes", "id")
    assert (sorted(upserts), sorted(deletes), len(column("item", "embedding"))) == ([5, 7, 9, 500], [8], 4)
    newest = rows_of(storage, "ckpt_3")
    assert rows_of(storage, "ckpt_1").keys() - set(deletes) | set(upserts) == newest.keys()
    shutil.rmtree(tmp_path / "out")
    table = export_checkpoint(tmp_path / "run", tmp_path / "out", to=to, since="ckpt_3").metadata["tables"]["item"]
    assert (table["rows"], table["replaced"], column("item.deletes", "id")) == (0, False, [])


def test_an_increment_needs_a_checkpoint_below(tmp_path):
    run_with_chain(tmp_path / "run")
    with pytest.raises(
        ConversionError, match="'x', which is not in the chain of 'ckpt_3', expected one of ckpt_2, ckpt_1"
    ):
        export_checkpoint(tmp_path / "run", tmp_path / "out", to="parquet", since="x")
    for options in ({"to": "embedding"}, {"to": "parquet", "where": [1]}):
        with pytest.raises(ConversionError, match="at since"):
            export_checkpoint(tmp_path / "run", tmp_path / "out", since="ckpt_1", **options)
    with pytest.raises(ConversionError, match=r"expected a checkpoint of its chain, .* because it is full"):
        export_checkpoint(tmp_path / "run/ckpt_1", tmp_path / "out", to="npy", since="ckpt_0")
    assert not (tmp_path / "out").exists()


def test_since_of_a_path_is_that_checkpoint_and_no_namesake(tmp_path):
    run_with_chain(tmp_path / "run")
    run_with_chain(tmp_path / "other")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(ConversionError, match="other/ckpt_1', which is not in the chain of 'ckpt_3', expected one of"):
        export_checkpoint(tmp_path / "run", tmp_path / "out", to="npy", since=str(tmp_path / "other/ckpt_1"))
    for number, root in enumerate(("run", "link")):
        since = str(tmp_path / root / "ckpt_1")
        done = export_checkpoint(tmp_path / "run", tmp_path / f"out{number}", to="npy", since=since)
        assert done.metadata["since"] == "ckpt_1"


def test_a_scale_beside_a_slot_of_its_name_is_refused(tmp_path):
    rows = some_rows()
    rows["embedding"][0, 0] = 0
    run = checkpoint(tmp_path, rows | {"embedding_scale": rows["count"]})
    with pytest.raises(ConversionError, match="found a slot 'embedding_scale',"):
        export_checkpoint(run, tmp_path / "out", to="npy", dtype="int8", slots=["embedding", "embedding_scale"])
    export_checkpoint(run, tmp_path / "out", to="npy", dtype="int8")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"slots": ["count"], "dtype": "float16"}, "dtype: found no slot 'embedding', expected floats"),
        ({"tables": ["u"]}, "no table 'u'"),
        ({"slots": ["embeding"]}, "did you mean 'embedding'"),
        ({"where": {"embedding": {"min": 1}}}, r"not one number per row in \['embedding'\]"),
        ({"dtype": "bfloat16"}, "bfloat16 for parquet"),
    ],
)
def test_what_is_not_there_is_refused(tmp_path, options, match):
    with pytest.raises(ConversionError, match=match):
        export_checkpoint(checkpoint(tmp_path), tmp_path / "out", to="parquet", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", [*ROUND_TRIPS, "embedding"])
def test_a_target_that_exists_is_left_alone(tmp_path, to):
    run = checkpoint(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("x")
    for target in ("out", "out/mine"):
        with pytest.raises(FileExistsError):
            export_checkpoint(run, tmp_path / target, to=to)
    assert (tmp_path / "out/mine").read_text() == "x"


@pytest.mark.slow
def test_exports_for_serving_import_no_torch(tmp_path):
    run = checkpoint(tmp_path, {"id": np.arange(3), "embedding": np.ones((3, 2), "f4")})
    code = "import sys; from recckpt.convert import export_checkpoint\n"
    for to in (*ROUND_TRIPS, "embedding"):
        code += f"export_checkpoint({str(run)!r}, {str(tmp_path / to)!r}, to={to!r})\n"
    code += "assert not {'torch', 'numba'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_tensors_may_become_tables_and_go_out_as_such(tmp_path):
    save_file({"e": np.ones((3, 2), "f4"), "w": np.ones(1)}, tmp_path / "m.safetensors")
    import_checkpoint(tmp_path / "m.safetensors", tmp_path / "run", options=ImportOptions(as_table={"e": None}))
    export_checkpoint(tmp_path / "run", tmp_path / "out", to="npy")
    assert sorted(np.load(tmp_path / "out/e/id.npy")) == [0, 1, 2]
    with CheckpointReader(tmp_path / "run") as reader:
        assert reader.tensor_names() == ["w"]


@pytest.mark.parametrize("to", [*ROUND_TRIPS, "dcp"])
def test_states_that_are_neither_rows_nor_tensors_are_listed(tmp_path, to):
    torch.save({"model": {"w": torch.ones(2), "version": 3}, "optimizer": {"lr": 1}}, tmp_path / "x.pt")
    import_checkpoint(tmp_path / "x.pt", tmp_path / "run")
    done = export_checkpoint(tmp_path / "run", tmp_path / "out", to=to)
    assert {"optimizer", "version"} <= {left.name for left in done.left_out}


@pytest.mark.parametrize("to", ["parquet", "npy"])
def test_two_things_of_one_file_name_are_refused_on_any_storage(tmp_path, memory_url, to):
    tables = [HashTable(1, name=name) for name in ("t", "t.deletes")]
    for table in tables:
        table.insert(torch.arange(9), torch.zeros(9, 1))
    saver = Saver(nn.ModuleList(tables), output_dir=str(tmp_path), deltas=True)
    for ckpt_id in "ab":
        saver.save(ckpt_id)
        tables[0].erase(torch.tensor([3]))
    for target in (tmp_path / "out", f"{memory_url}/out"):
        with pytest.raises(ConversionError, match="already, for another table or slot, expected a file for each"):
            export_checkpoint(tmp_path, target, to=to, since="a")


def test_a_table_may_have_any_name_that_makes_a_file_name(tmp_path):
    run = checkpoint(tmp_path, name="checkpoint")  # which no checkpoint may have
    export_checkpoint(run, tmp_path / "new/er/out", to="npy")  # whose directories are made
    import_checkpoint(tmp_path / "new/er/out", tmp_path / "back")
    assert CheckpointReader(tmp_path / "back").tables() == ["checkpoint"]
    (tmp_path / "long").mkdir()
    with pytest.raises(ConversionError, match="a name of 201 bytes once encoded, expected at most 200 in a file name"):
        export_checkpoint(checkpoint(tmp_path / "long", name="x" * 201), tmp_path / "long" / "out", to="parquet")


def run_of_two_tables(path):
    tensors = {
        "item": np.ones((2, 2), "f4"),
        "user": np.full((2, 3), 5, "f4"),
        "i": np.array([1, 2]),
        "u": np.arange(2),
    }
    save_file(tensors, path / "m.safetensors")
    import_checkpoint(path / "m.safetensors", path / "run", options=ImportOptions(as_table={"item": "i", "user": "u"}))
    return path / "run"


@pytest.mark.parametrize("to", ["npy", "parquet"])
def test_an_export_of_several_tables_comes_back_as_those_tables(tmp_path, to):
    run = run_of_two_tables(tmp_path)
    export_checkpoint(run, tmp_path / "out", to=to)
    done = import_checkpoint(tmp_path / "out", tmp_path / "back")
    assert done.rows == {"item": 2, "user": 2}
    for table in ("item", "user"):
        assert table_bytes(tmp_path / "back", table) == table_bytes(run, table)
    only = import_checkpoint(tmp_path / "out", tmp_path / "only", tables=["user"])
    assert only.rows == {"user": 2}
    named = import_checkpoint(
        tmp_path / "out", tmp_path / "named", tables=["item"], options=ImportOptions(table="item")
    )
    assert named.rows == {"item": 2}
    assert [left.name for left in named.contents.left_out] == ["table user"]
    with pytest.raises(ConversionError, match="found 2 tables, expected the name of one: item, user"):
        import_checkpoint(tmp_path / "out", tmp_path / "one", options=ImportOptions(table="t"))
    for name in ("metadata.json", "_recckpt.json"):  # which name the tables
        (tmp_path / "out" / name).unlink(missing_ok=True)
    with pytest.raises(ConversionError, match="name the directory of one table"):
        import_checkpoint(tmp_path / "out", tmp_path / "mixed")


@pytest.mark.parametrize("to", ["npy", "parquet"])
def test_an_increment_is_not_taken_for_whole_tables(tmp_path, to):
    run_with_chain(tmp_path / "run")
    export_checkpoint(tmp_path / "run/ckpt_3", tmp_path / "out", to=to, since="ckpt_1")
    for source in ("out", "out/item.deletes"):
        with pytest.raises(ConversionError, match="export without --since"):
            import_checkpoint(tmp_path / source, tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("to", ["npy", "parquet", "safetensors"])
def test_vectors_of_int8_are_floats_again(tmp_path, to):
    rows = some_rows()
    rows["embedding"][0, 0] = 0
    pq.write_table(arrow_table(rows), tmp_path / "t.parquet")
    import_checkpoint(tmp_path / "t.parquet", tmp_path / "run")
    target = tmp_path / ("out.safetensors" if to == "safetensors" else "out")
    done = export_checkpoint(tmp_path / "run", target, to=to, dtype="int8")
    back = import_checkpoint(target, tmp_path / "back")
    assert {slot.name: slot.dtype for slot in back.contents.tables[0].slots} == {"embedding": "float32"}
    assert "int8 times embedding_scale is float32 here" in {left.reason for left in back.contents.left_out}
    values = CheckpointReader(tmp_path / "back").lookup("t", rows["id"]).values
    error = np.abs(values - rows["embedding"]).max()
    assert error == pytest.approx(done.metadata["tables"]["t"]["largest_error"], rel=1e-4)


def test_metadata_of_another_program_is_none_of_an_export(tmp_path):
    (tmp_path / "t").mkdir()
    for name, values in some_rows().items():
        np.save(tmp_path / "t" / f"{name}.npy", values)
    (tmp_path / "t/metadata.json").write_text(json.dumps({"tables": {"t": 1}}))
    import_checkpoint(tmp_path / "t", tmp_path / "back")
    assert table_bytes(tmp_path / "back", "t") == rows_bytes(some_rows())
