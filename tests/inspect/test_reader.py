"""Rows and tensors of a checkpoint, read without torch, and parts that are none."""

import math
import subprocess
import sys

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from support.builders import Run
from support.forge import Forge, empty, filled, load, save_tables
from support.sweeps import mostly_slow

from recckpt import CheckpointReader, Deltas
from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from recckpt.inspect.verify import verify
from recckpt.sparse import HashTable
from recckpt.sparse.files.arrow_format import column_buffer, column_values
from recckpt.storage import open_storage

DTYPES = ["float32", "float16", "bfloat16", "float64", "int8", "uint8", "int16", "int32", "int64"]
SLOTS = {"sparse_scalar": (), "sparse_vector": (5,), "sparse_matrix": (2, 3)}
IDS = [-(2**63), -2, -1, 0, 1, 2**63 - 1, *range(1000, 1100)]


def noise(dtype, n_rows, shape, seed):
    """Values of any bits, those of NaNs among them."""
    draw = torch.Generator().manual_seed(seed)
    n_bytes = n_rows * math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (n_bytes,), generator=draw).to(torch.uint8).view(dtype).view(n_rows, *shape)


def noisy(name, dtype="float32", ids=IDS, seed=0):
    dtype = getattr(torch, dtype)
    table = HashTable((2, 2), name=name, dtype=dtype)
    for slot, shape in SLOTS.items():
        table.add_slot(slot, shape, dtype)
    slots = {slot: noise(dtype, len(ids), shape, seed + i) for i, (slot, shape) in enumerate(SLOTS.items(), 1)}
    table.insert(torch.tensor(ids), noise(dtype, len(ids), (2, 2), seed), slots)
    return table


def as_rows(columns):
    """Return id -> the bytes of its slots; columns are the ids, then arrays of bytes with one row an id."""
    ids, *slots = columns
    slots = [np.ascontiguousarray(slot).view(np.uint8).reshape(len(ids), -1) for slot in slots]
    return {int(id_): [slot[row].tobytes() for slot in slots] for row, id_ in enumerate(ids)}


def rows_of(table, columns):
    tensors = [table.embeddings() if name == "embedding" else table.slots[name] for name in columns]
    raw = [t.detach().contiguous().view(len(table), -1).view(torch.uint8).numpy() for t in tensors]
    return as_rows([table.ids().numpy(), *raw])


def rows_read(reader, name, columns, ids=None):
    found = {}
    for batch in reader.table(name, columns, ids):
        raw = [np.frombuffer(column_buffer(batch.column(column)), np.uint8) for column in columns]
        found |= as_rows([batch.column("id").to_numpy(), *raw])
    return found


@mostly_slow()
@pytest.mark.parametrize("dtype", DTYPES)
def test_polars_and_pyarrow_alone_find_the_ids_and_values_of_the_reader(tmp_path, dtype):
    tables = [noisy("user/1", dtype), noisy("item", dtype, IDS[::2], seed=9)]
    save_tables(tmp_path, tables, batch_bytes=1000)
    columns = ["embedding", *SLOTS]
    files = sorted((tmp_path / "ckpt_1" / "sparse").glob("*.arrow"))
    assert len(files) > 1
    frame = pl.read_ipc(str(tmp_path / "ckpt_1" / "sparse" / "*.arrow"))
    arrow = pa.concat_tables([pa.ipc.open_file(file).read_all() for file in files])
    with CheckpointReader(str(tmp_path)) as reader:
        for table in tables:
            expected = rows_of(table, columns)
            assert rows_read(reader, table.name, columns) == expected

            mine = frame.filter(pl.col("table") == table.name)
            raw = [mine[c].ext.storage() if isinstance(mine[c].dtype, pl.Extension) else mine[c] for c in columns]
            assert as_rows([mine["id"].to_numpy(), *(series.to_numpy() for series in raw)]) == expected

            mine = arrow.filter(pc.equal(arrow["table"].cast(pa.utf8()), table.name)).combine_chunks()
            raw = [np.frombuffer(column_buffer(mine[c].combine_chunks()), np.uint8) for c in columns]
            assert as_rows([mine["id"].to_numpy(), *raw]) == expected


@pytest.mark.parametrize("columns", [[], ["sparse_scalar"], ["embedding"], ["sparse_matrix", "embedding"]])
def test_some_columns_and_ids_can_be_read_on_any_storage(url, columns):
    table = noisy("user/1", "float16")
    save_tables(url, [noisy("item", seed=3), table], batch_bytes=1000)
    asked = [-(2**63), 2**63 - 1, -2, 1050, 77, -77]
    with CheckpointReader(url) as reader:
        expected = rows_of(table, columns)
        assert rows_read(reader, "user/1", columns) == expected
        assert rows_read(reader, "user/1", columns, asked) == {i: expected[i] for i in asked if i in expected}
        assert rows_read(reader, "user/1", columns, [77]) == {}
        ordered = [name for name in ("embedding", "sparse_matrix", "sparse_scalar") if name in columns]
        assert next(batch.schema.names for batch in reader.table("user/1", columns)) == ["id", *ordered]
        assert reader.schema("user/1", columns).names == ["id", *ordered]


def test_an_id_in_two_shards_is_refused_by_all_that_read_it_and_by_nothing_else(url):
    save_tables(url, [filled("item", range(100)), filled("other", [1])], [filled("item", [77, 200])])
    with CheckpointReader(url) as reader:
        for read in (
            lambda: list(reader.table("item")),
            lambda: list(reader.table("item", ids=[5, 77, 200])),
            lambda: reader.lookup("item", [5]),
            lambda: reader.dataset("item"),
        ):
            with pytest.raises(CorruptCheckpointError, match=r"table 'item', between shards.*id 77 twice"):
                read()
        assert sum(batch.num_rows for batch in reader.table("item", ids=[5, 200])) == 2
        assert sum(batch.num_rows for batch in reader.table("other")) == reader.dataset("other").count_rows() == 1


@pytest.mark.parametrize("batch_bytes", [8 << 20, 20 * (2 + 8 + 8)])  # the second cut falls between the two
def test_an_id_twice_in_one_shard_and_a_manifest_that_says_other_buckets_are_refused(tmp_path, batch_bytes):
    save_tables(tmp_path, [filled("item", range(40))], concurrency=1, batch_bytes=batch_bytes)
    with CheckpointReader(str(tmp_path)) as reader:
        ids = [n for batch in reader.table("item") for n in batch["id"].to_pylist()]
    ids[20] = ids[19]
    again, forge = iter(ids), Forge(tmp_path / "ckpt_1")
    forge.edit_part(
        lambda batch: batch.set_column(
            1, batch.schema.field("id"), pa.array([next(again) for _ in range(batch.num_rows)], pa.int64())
        )
    )
    for message in (f"id {ids[19]} twice|ids of buckets", "batches of buckets"):
        with CheckpointReader(str(tmp_path)) as reader, pytest.raises(CorruptCheckpointError, match=message):
            list(reader.table("item"))
        forge.edit_manifest(lambda values: values["shards"][0].update(buckets=[0, 0]))


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        (("itm",), KeyError, r"no table 'itm'.*did you mean 'item'"),
        (("item", ["embeding"]), KeyError, r"no slot 'embeding'.*did you mean 'embedding'"),
        (("item", ["nothing"]), KeyError, "no slot"),
        (("item", "embedding"), TypeError, r"pass \['embedding'\]"),
    ],
)
def test_an_unknown_table_or_slot_is_named_with_the_nearest(tmp_path, asked, error, said):
    save_tables(tmp_path, [filled("item", range(5))])
    with CheckpointReader(str(tmp_path)) as reader, pytest.raises(error, match=said):
        reader.table(*asked)
    for path in (None, 1, b"runs"):
        refusal = f"path must be a path or URL of a checkpoint or output dir, found {path!r}"
        with pytest.raises(TypeError, match=refusal):
            CheckpointReader(path)


@pytest.mark.parametrize("ids", [np.arange(3), range(3), (0, 1, 2), {0, 1, 2}, torch.arange(3)])
def test_ids_come_in_any_collection_of_ints(tmp_path, ids):
    save_tables(tmp_path, [filled("item", range(5))])
    with CheckpointReader(str(tmp_path)) as reader:
        assert reader.lookup("item", ids).found.tolist() == [True] * 3
        assert sum(batch.num_rows for batch in reader.table("item", ids=ids)) == 3


def test_bfloat16_values_are_those_of_torch(tmp_path):
    table = noisy("item", "bfloat16")
    save_tables(tmp_path, [table])
    with CheckpointReader(str(tmp_path)) as reader:
        slots = {slot.name: slot for slot in reader.manifest.table("item").slots}
        found = pa.Table.from_batches(reader.table("item")).combine_chunks().to_batches()[0]
        values = column_values(found.column("embedding"), slots["embedding"])
        aligned = reader.lookup("item", IDS).values
    expected, _ = table.lookup(torch.tensor(found.column("id").to_pylist()))
    np.testing.assert_array_equal(values, expected.float().numpy())
    np.testing.assert_array_equal(aligned, table.lookup(torch.tensor(IDS))[0].float().numpy())


def test_columns_are_taken_by_name_in_any_order_and_from_a_part_that_pyarrow_wrote_again(tmp_path):
    table = noisy("item")
    save_tables(tmp_path, [table], concurrency=1)
    forge = Forge(tmp_path / "ckpt_1")
    for edit in (
        lambda batch: batch.select(batch.schema.names[::-1]),
        lambda batch: pa.RecordBatch.from_arrays(batch.columns, batch.schema.names),
    ):
        forge.edit_part(edit)
        with CheckpointReader(str(tmp_path)) as reader:
            for columns in (["embedding", *SLOTS], ["sparse_scalar"], []):
                assert rows_read(reader, "item", columns) == rows_of(table, columns)


def test_dense_tensors_are_read_by_name_also_once_the_reader_was_closed(tmp_path):
    run = Run(tmp_path / "run").train(10)
    with CheckpointReader(str(tmp_path / "run")) as reader:
        live = {name: value for name, value in run.model.state_dict().items() if isinstance(value, torch.Tensor)}
        assert sorted(reader.tensor_names()) == sorted(live)
        for name, value in live.items():
            assert reader.tensor_shape(name) == tuple(value.shape)
            assert reader.tensor_dtype(name) == str(value.dtype).removeprefix("torch.")
            np.testing.assert_array_equal(reader.read_tensor(name), value.numpy())
        with pytest.raises(KeyError, match=r"top\.weight"):
            reader.read_tensor("top.wieght")
    assert sorted(reader.tensor_names()) == sorted(live)
    reader.close()
    save_tables(tmp_path, [filled("item", range(5))])
    with CheckpointReader(str(tmp_path)) as reader:
        assert reader.tensor_names() == []
        with pytest.raises(KeyError, match=r"no dense tensor 'top\.weight'"):
            reader.read_tensor("top.weight")


def test_a_tensor_of_an_older_model_pt_of_the_same_size_is_not_given_out(tmp_path):
    Run(tmp_path, interval=5, max_keep=2).train(10)
    older, newer = (tmp_path / f"ckpt_{step}" / "model.pt" for step in (5, 10))
    assert older.stat().st_size == newer.stat().st_size
    with CheckpointReader(str(tmp_path)) as reader:
        reader.read_tensor("top.weight")
    newer.write_bytes(older.read_bytes())
    with CheckpointReader(str(tmp_path)) as reader, pytest.raises(CorruptCheckpointError) as caught:
        reader.read_tensor("top.weight")
    assert caught.value.path == "ckpt_10/model.pt"
    assert caught.value.where.startswith("tensor 'top.weight', bytes ")


def test_an_output_dir_means_its_newest_checkpoint_and_an_id_may_be_in_the_directory_of_a_later_attempt(url):
    for name in ("", "/ckpt_7", "/ckpt_7/sparse"):
        with pytest.raises(CheckpointNotFoundError):
            CheckpointReader(f"{url}{name}")
    storage = open_storage(url)
    storage.prepare()
    storage.make_dir("ckpt_1")
    storage.put_if_absent("ckpt_1/INTENT", b"{}")  # an attempt that died
    for number in (9, 10, 1):
        save_tables(storage, [filled("item", range(number))], ckpt_id=f"ckpt_{number}")
    assert CheckpointReader(url).manifest.ckpt_id == CheckpointReader(f"{url}/ckpt_1").manifest.ckpt_id == "ckpt_1"
    assert storage.size("ckpt_1.1/manifest.json")
    assert CheckpointReader(f"{url}/ckpt_10").manifest.ckpt_id == "ckpt_10"
    assert CheckpointReader(f"{url}/ckpt_10/").manifest.tables[0].rows == 10
    with pytest.raises(CheckpointNotFoundError):
        CheckpointReader(f"{url}/ckpt_7")


def test_a_checkpoint_at_the_top_of_a_store_is_found_by_its_url(memory_url):
    top = memory_url.rpartition("/")[0]
    save_tables(top, [filled("item", range(3))])
    assert CheckpointReader(top).tables() == ["item"]
    assert CheckpointReader(f"{top}/ckpt_1").tables() == ["item"]


def test_odd_table_names_are_read_as_they_were_written(tmp_path):
    names = ["a/b", "line\nbreak", "naïve 表", ".", "..", "-x", "x" * 300]
    save_tables(tmp_path, [filled(name, [i]) for i, name in enumerate(names)])
    with CheckpointReader(str(tmp_path)) as reader:
        assert reader.tables() == names
        assert all(reader.lookup(name, [i]).found.all() for i, name in enumerate(names))


def test_reading_imports_neither_torch_nor_numba(tmp_path):
    Run(tmp_path, interval=5, max_keep=None, deltas=Deltas(max_dirty=1.0)).train(10)
    code = (
        "import sys, recckpt; path = sys.argv[1]\n"
        "reader = recckpt.CheckpointReader(path); name, *_ = reader.tables()\n"
        "reader.lookup(name, [1]); list(reader.table(name)); [reader.read_tensor(n) for n in reader.tensor_names()]\n"
        "assert not {'torch', 'numba', 'tqdm', 'fsspec'} & set(sys.modules)\n"
        "assert recckpt.inspect.dataset(path, name).count_rows() == reader.manifest.table(name).rows\n"
        "first, second = recckpt.list_checkpoints(path); assert recckpt.find_checkpoint(path, 'latest') == second\n"
        "assert (first.kind, second.kind) == ('full', 'delta') and recckpt.diff(second.path, path).is_equal\n"
        "assert recckpt.report(path).to_html() and recckpt.inspect.history(path, name, [1]).rows\n"
        "assert not {'torch', 'numba'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def replaced(batch, name, array, field=None):
    at = batch.schema.get_field_index(name)
    return batch.set_column(at, field or pa.field(name, array.type), array)


def with_null_inside(batch):
    rows = batch.column("embedding")
    values = pa.array([None, *rows.flatten().to_pylist()[1:]], rows.type.value_type)
    return replaced(batch, "embedding", pa.FixedSizeListArray.from_arrays(values, rows.type.list_size))


def with_ids(make):
    return lambda batch: replaced(batch, "id", make(batch.column("id")))


def with_embeddings(make):
    """Replace the embeddings by what is made for so many rows."""
    return lambda batch: replaced(batch, "embedding", make(batch.num_rows))


def tensors(n_rows, *shape, dtype=np.float32):
    made = pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((n_rows, *shape), dtype))
    return made.storage if len(shape) == 1 else made


class Strange(pa.ExtensionType):
    """A type that nobody has registered."""

    def __init__(self, storage):
        super().__init__(storage, "tests.strange")

    def __arrow_ext_serialize__(self):
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage, serialized):
        return cls(storage)


def with_a_strange_type(name):
    def edit(batch):
        values = batch.column(name)
        values = values.storage if isinstance(values, pa.ExtensionArray) else values
        return replaced(batch, name, pa.ExtensionArray.from_storage(Strange(values.type), values))

    return edit


BAD = {
    "ids of an unknown extension": (with_a_strange_type("id"), "strange"),
    "vectors of an unknown extension": (with_a_strange_type("embedding"), "strange"),
    "null ids": (with_ids(lambda ids: pa.array([None, *ids.to_pylist()[1:]], pa.int64())), "nulls"),
    "a null in a vector": (with_null_inside, "nulls"),
    "ids of float64": (with_ids(lambda ids: ids.cast(pa.float64())), "double.*int64"),
    "ids of int32": (with_ids(lambda ids: ids.cast(pa.int32())), "int32|bytes"),
    "16 values for 32": (with_embeddings(lambda n: tensors(n, 16)), "16|bytes"),
    "64 values for 32": (with_embeddings(lambda n: tensors(n, 64)), "64"),
    "2 x 16 values for 32": (with_embeddings(lambda n: tensors(n, 2, 16)), r"\[2,16\].*fixed_size_list"),
    "values of float64": (with_embeddings(lambda n: tensors(n, 32, dtype=np.float64)), "double.*float"),
    "strings": (with_embeddings(lambda n: pa.array(["x" * 200] * n)), "string"),
    "lists": (with_embeddings(lambda n: pa.array([[0.0] * 32] * n, pa.list_(pa.float32()))), "list"),
    "tensors of one dimension": (
        with_embeddings(lambda n: pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((n, 32), np.float32))),
        "fixed_shape_tensor.*fixed_size_list",
    ),
    "a column too many": (
        lambda batch: batch.append_column("strange", pa.array(np.zeros(batch.num_rows, np.int8))),
        "strange",
    ),
    "a column too few": (lambda batch: batch.drop_columns(["embedding"]), "columns|bytes"),
}


@mostly_slow()
@pytest.mark.parametrize(("edit", "match"), BAD.values(), ids=BAD.keys())
def test_a_part_of_another_schema_is_refused_with_what_was_found_and_expected(tmp_path, edit, match):
    save_tables(open_storage(str(tmp_path)), [filled("item", range(20), shape=32)], concurrency=1)
    Forge(tmp_path / "ckpt_1").edit_part(edit)
    with CheckpointReader(str(tmp_path)) as reader, pytest.raises(CorruptCheckpointError, match=match) as caught:
        list(reader.table("item"))
    assert caught.value.found
    assert caught.value.expected


def cut(data):
    return {
        "empty": b"",
        "magic": b"ARROW1",
        "magic, padded": b"ARROW1\0\0",
        "magic at both ends": b"ARROW1\0\0ARROW1",
        "no footer": b"ARROW1\0\0" + bytes(len(data)) + b"ARROW1",
        "a footer without end": data[:-10] + b"\xff\xff\xff\x7fARROW1",
        "a footer of nothing": data[:-10] + b"\0\0\0\0ARROW1",
        "one byte less": data[:-1],
        "half": data[: len(data) // 2],
        "garbage behind": data + b"garbage",
        "twice": data + data,
        "a stream": data[8:],
        "Parquet": b"PAR1" + data[4:-4] + b"PAR1",
        "text": b"id,embedding\n1,2\n" * 99,
    }


@mostly_slow()
@pytest.mark.parametrize("name", cut(bytes(100)))
def test_a_part_that_is_no_whole_arrow_file_is_refused_though_its_size_is_as_the_manifest_says(tmp_path, name):
    save_tables(open_storage(str(tmp_path)), [filled("item", range(20))], concurrency=1)
    forge = Forge(tmp_path / "ckpt_1")
    data = cut(forge.path(forge.parts[0]).read_bytes())[name]
    forge.write(forge.parts[0], data)
    forge.edit_catalog(lambda values: values["parts"][0].update(bytes=len(data)))
    with CheckpointReader(str(tmp_path)) as reader:
        if name in ("twice", "a stream"):  # Arrow finds a whole file at the end of it, or a footer that fits
            rows = sum(batch.num_rows for batch in reader_or_nothing(reader))
            assert rows in (0, 20)
        else:
            with pytest.raises(CorruptCheckpointError):
                list(reader.table("item"))
    assert verify(str(tmp_path))
    with pytest.raises(CorruptCheckpointError):
        load(open_storage(str(tmp_path)), [empty("item")])


def reader_or_nothing(reader):
    try:
        return list(reader.table("item"))
    except CorruptCheckpointError:
        return []
