import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from support.forge import Forge, empty, filled, load, parts_of, save_tables
from support.sweeps import SWEEP_STRIDE, mostly_slow

from recckpt.errors import CheckpointRemovedError, CorruptCheckpointError
from recckpt.format.buckets import bucket_of
from recckpt.output_dir.listing import locate
from recckpt.sparse.files.arrow_format import column_array, column_buffer, part_schema, slot_field
from recckpt.sparse.files.part_reader import PartReader
from recckpt.types import ITEM_BYTES, SlotSpec

SLOTS = (SlotSpec("embedding", "float32", (2,)),)


@pytest.fixture
def storage(local):
    return local


def reader_of(storage, columns=None, part=None) -> PartReader:
    part = part or parts_of(storage)[0]
    entries = {entry.name: entry for entry in manifest_of(storage).tables}
    return PartReader(storage, "ckpt_1", part, entries[part.tables[0]].slots, columns)


def manifest_of(storage):
    return locate(storage, "ckpt_1").manifest


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (1, 2, 1)])
def test_bytes_become_a_column_and_come_back(dtype, shape):
    spec = SlotSpec("s", dtype, shape)
    data = np.random.default_rng(0).bytes(4 * spec.row_bytes)
    array = column_array(spec, pa.py_buffer(data), 4)
    assert array.type == slot_field(spec).type
    assert column_buffer(array).to_pybytes() == data
    assert column_buffer(array.slice(1, 2)).to_pybytes() == data[spec.row_bytes : 3 * spec.row_bytes]


def test_the_schema_is_that_of_the_specification():
    schema = part_schema(
        [
            SlotSpec("embedding", "bfloat16", (2,)),
            SlotSpec("half", "float16", ()),
            SlotSpec("matrix", "int8", (2, 3)),
            SlotSpec("step", "int64", ()),
        ]
    )
    assert schema.names == ["table", "id", "embedding", "half", "matrix", "step"]
    assert schema.field("table").type == pa.dictionary(pa.int16(), pa.utf8())
    assert schema.field("id").type == pa.int64()
    assert schema.field("embedding").type == pa.list_(pa.uint16(), 2)
    assert schema.field("matrix").type == pa.fixed_shape_tensor(pa.int8(), (2, 3))
    assert schema.field("embedding").metadata == {b"recckpt.dtype": b"bfloat16"}
    assert schema.field("half").type == pa.float16()
    assert not any(field.nullable for field in schema)


def test_anything_that_reads_arrow_reads_a_part(storage):
    tables = [filled("item", range(5), shape=(2, 2)), filled("ü/user", range(100, 103), shape=(2, 2))]
    save_tables(storage, tables, concurrency=1)
    with pa.ipc.open_file(f"{storage.url}/ckpt_1/sparse/00000-of-00001.g0.00.arrow") as reader:
        found = reader.read_all()
    found.validate(full=True)
    rows = {(row["table"], row["id"]): row["embedding"] for row in found.to_pylist()}
    assert rows == {
        **{("item", n): [n] * 4 for n in range(5)},
        **{("ü/user", n): [n] * 4 for n in range(100, 103)},
    }


def test_a_batch_is_read_whole_or_by_column(storage):
    save_tables(storage, [filled("item", range(5), slots={"sparse_step": ()})], concurrency=1)
    whole, some, ids = reader_of(storage), reader_of(storage, ["sparse_step"]), reader_of(storage, [])
    assert list(whole.read(0)) == ["table", "id", "embedding", "sparse_step"]
    assert list(some.read(0)) == ["table", "id", "sparse_step"]
    assert list(ids.read(0)) == ["table", "id"]
    assert sorted(np.frombuffer(ids.read(0)["id"], np.int64)) == list(range(5))
    whole.check_frame()


def test_the_catalog_tells_rows_and_buckets_of_each_batch(storage):
    save_tables(storage, [filled("item", range(1000))], concurrency=2, batch_bytes=1000)
    ends = []
    for part in parts_of(storage):
        reader = reader_of(storage, part=part)
        for number, batch in enumerate(part.batches):
            buckets = bucket_of(np.frombuffer(reader.read(number)["id"], np.int64))
            assert (buckets[:-1] <= buckets[1:]).all()
            assert batch.buckets == (buckets[0], buckets[-1] + 1)
            assert batch.rows == len(buckets)
            ends.append(batch.buckets)
    assert ends == sorted(ends)
    assert all(one[1] - 1 <= other[0] for one, other in pairwise(ends))


def test_every_byte_of_a_part_is_under_some_checksum(storage):
    """A flipped bit is found when the values are read, or by the check of the frame."""
    save_tables(storage, [filled("item", range(3), slots={"sparse_step": ()}), filled("b", [7])], concurrency=1)
    part = parts_of(storage)[0]
    data = bytearray(Path(storage.url, "ckpt_1", part.file).read_bytes())
    missed = [position for position in positions(len(data) * 8) if not found(storage, part, flipped(data, position))]
    assert missed == []


def positions(n_bits: int) -> list[int]:
    return random.Random(0).sample(range(n_bits), min(n_bits, 400))


@pytest.mark.slow
def test_every_bit_of_a_part_is_under_some_checksum(storage):
    save_tables(storage, [filled("item", range(3), slots={"sparse_step": ()}), filled("b", [7])], concurrency=1)
    for part in parts_of(storage):
        data = bytearray(Path(storage.url, "ckpt_1", part.file).read_bytes())
        stride = SWEEP_STRIDE | 1  # odd: every bit of a byte has its turn
        for position in range(0, len(data) * 8, stride):
            assert found(storage, part, flipped(data, position)), position


def flipped(data: bytearray, position: int) -> memoryview:
    twin = bytearray(data)
    twin[position // 8] ^= 1 << position % 8
    return memoryview(bytes(twin))


def found(storage, part, mapped: memoryview) -> bool:
    """Say whether reading and checking all of a part finds a fault in it."""
    slots = (SlotSpec("embedding", "float32", (2,)), SlotSpec("sparse_step", "float32", ()))
    slots = slots[: len(part.batches[0].xxh3) - 2]
    try:
        reader = PartReader(storage, "ckpt_1", part, slots, mapped=mapped)
        for number in range(len(part.batches)):
            for name, values in reader.unchecked(number).items():
                if problem := reader.column_problem(number, values, name):
                    raise problem
        reader.check_frame()
    except CorruptCheckpointError as error:
        assert error.path == f"ckpt_1/{part.file}"  # noqa: PT017
        return True
    return False


@pytest.mark.parametrize("cut", ["missing", "empty", "magic", "one byte", "half", "trailing", "text"])
def test_a_file_that_is_missing_cut_or_no_arrow_is_corrupt(storage, cut):
    save_tables(storage, [filled("item", range(50))], concurrency=1)
    part, slots = parts_of(storage)[0], manifest_of(storage).tables[0].slots
    path = Path(storage.url, "ckpt_1", part.file)
    data = path.read_bytes()
    bad = {
        "missing": None,
        "empty": b"",
        "magic": b"ARROW1\0\0",
        "one byte": data[:-1],
        "half": data[: len(data) // 2],
        "trailing": data + b"garbage",
        "text": b"hello" * 100,
    }[cut]
    path.unlink() if bad is None else path.write_bytes(bad)
    with pytest.raises(CorruptCheckpointError, match="no such file" if bad is None else "its size"):
        PartReader(storage, "ckpt_1", part, slots)
    if bad is not None:
        lying = part.but(n_bytes=len(bad))  # and where the catalog agrees with the size
        assert found(storage, lying, memoryview(bad))


def batch_edit(change):
    """An edit of a record batch through a dict of its columns and a dict of its fields."""

    def edit(batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        fields = {field.name: field for field in batch.schema}
        change(columns, fields)
        fields = {name: fields.get(name, pa.field(name, array.type)) for name, array in columns.items()}
        schema = pa.schema([field.with_type(columns[name].type) for name, field in fields.items()])
        return pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)

    return edit


def put(name, make, *, is_nullable=False):
    """Return a change of a column to what is made of it, or of nothing."""

    def change(columns, fields):
        columns[name] = make(columns.get(name))
        if is_nullable:
            fields[name] = pa.field(name, columns[name].type)

    return change


def vectors(values, width=2, kind=None, mask=None):
    return pa.FixedSizeListArray.from_arrays(pa.array(values, kind or pa.float32()), width, mask=mask)


def as_tensor(rows, shape):
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(rows.type.value_type, shape), rows)


def without_embedding(columns, fields):
    del columns["embedding"], fields["embedding"]


def bfloat16_marked(columns, fields):
    fields["embedding"] = fields["embedding"].with_metadata({b"recckpt.dtype": b"bfloat16"})


def table_column(numbers, names):
    return put("table", lambda _: pa.DictionaryArray.from_arrays(pa.array(numbers, pa.int16()), pa.array(names)))


def as_uuids(_):
    if not hasattr(pa, "uuid"):
        pytest.skip("PYARROW 17 HAS NO SECOND EXTENSION TYPE")
    return pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"x" * 16] * 5, pa.binary(16)))


ONES = np.ones(10)
FAULTS = {
    "null ids": put("id", lambda ids: pa.array([None, *ids.to_pylist()[1:]], pa.int64()), is_nullable=True),
    "null values": put("embedding", lambda _: vectors([None, *ONES[1:]])),
    "null rows": put("embedding", lambda _: vectors(ONES, mask=pa.array([True] + [False] * 4)), is_nullable=True),
    "ids float64": put("id", lambda ids: ids.cast(pa.float64())),
    "ids int32": put("id", lambda ids: ids.cast(pa.int32())),
    "ids uint64": put("id", lambda ids: ids.cast(pa.uint64())),
    "values float64": put("embedding", lambda _: vectors(ONES, kind=pa.float64())),
    "values int32": put("embedding", lambda _: vectors(ONES, kind=pa.int32())),
    "dimension 3": put("embedding", lambda _: vectors(np.ones(15), 3)),
    "shape (2, 1)": put("embedding", lambda rows: as_tensor(rows, (2, 1))),
    "a tensor of one dimension": put("embedding", lambda rows: as_tensor(rows, (2,))),
    "a nested list": put("embedding", lambda _: pa.array([[1.0, 2.0]] * 5, pa.list_(pa.float32()))),
    "strings": put("embedding", lambda _: pa.array(["x"] * 5)),
    "another extension": put("embedding", as_uuids),
    "a column more": put("more", lambda _: pa.array(range(5))),
    "a column of strings more": put("more", lambda _: pa.array(["x"] * 5)),
    "a column less": without_embedding,
    "marked as bfloat16": bfloat16_marked,
    "table as plain text": put("table", lambda names: names.dictionary_decode()),
    "another table's name": table_column([0] * 5, ["user"]),
    "a row of another table": table_column([0, 0, 1, 0, 0], ["item", "user"]),
    "a table that is not there": table_column([0, 0, 0, 0, 7], ["item"] * 8),
}


@mostly_slow()
@pytest.mark.parametrize("fault", FAULTS)
def test_a_part_of_another_schema_is_refused_though_all_checksums_hold(storage, fault):
    save_tables(storage, [filled("item", range(5))], concurrency=1)
    Forge(f"{storage.url}/ckpt_1").edit_part(batch_edit(FAULTS[fault]))
    table = filled("item", [1, 99])
    with pytest.raises(CorruptCheckpointError) as caught:
        load(storage, [table])
    assert caught.value.path == "ckpt_1/sparse/00000-of-00001.g0.00.arrow"
    assert sorted(table.ids().tolist()) == [1, 99]


def test_columns_in_another_order_are_fine(storage):
    save_tables(storage, [filled("item", range(5), slots={"sparse_step": ()})], concurrency=1)

    def change(columns, fields):
        for name in sorted(columns, reverse=True):
            columns[name], fields[name] = columns.pop(name), fields.pop(name)

    Forge(f"{storage.url}/ckpt_1").edit_part(batch_edit(change))
    table = empty("item", slots={"sparse_step": ()})
    assert load(storage, [table]) == 5
    assert torch.equal(table.lookup(torch.arange(5))[0][:, 0], torch.arange(5.0))


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (
            lambda forge: forge.edit_part(batch_edit(table_column([0, 0, 1, 0, 0], ["item", "user"])), rows=False),
            "row 2 of another table",
        ),
        (
            lambda forge: forge.edit_catalog(lambda all: all["parts"][0]["batches"][0]["xxh3"].update(table="0" * 16)),
            "checksum",
        ),
    ],
    ids=["names", "checksum"],
)
def test_the_table_column_is_held_against_the_catalog_and_its_checksum(storage, damage, found):
    save_tables(storage, [filled("item", range(5)), filled("user", range(5))], concurrency=1)
    damage(Forge(f"{storage.url}/ckpt_1"))
    with pytest.raises(CorruptCheckpointError, match=f"column 'table': found {found}"):
        load(storage, [empty("item"), empty("user")])


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), CheckpointRemovedError("runs/ckpt_1")])
@pytest.mark.parametrize("when", ["opening", "reading"])
def test_an_error_of_the_storage_is_no_damage(storage, monkeypatch, error, when):
    save_tables(storage, [filled("item", range(5))], concurrency=1)
    part = parts_of(storage)[0]
    monkeypatch.setattr(storage, "map", lambda name: None)

    def fail(*args):
        raise error

    if when == "reading":
        reader = PartReader(storage, "ckpt_1", part, SLOTS)
    monkeypatch.setattr(storage, "read", fail)
    with pytest.raises(type(error)) as caught:
        PartReader(storage, "ckpt_1", part, SLOTS) if when == "opening" else reader.read(0)
    assert caught.value is error


@pytest.mark.parametrize("error", [OSError(28, "full"), KeyboardInterrupt()])
def test_an_error_while_a_part_is_written_leaves_no_file(storage, error):
    def fails(n_bytes):
        raise error

    with pytest.raises(type(error)):
        save_tables(storage, [filled("item", range(5))], concurrency=1, advance=fails)
    assert storage.list_files("ckpt_1") == ["INTENT"]
