import numpy as np
import pyarrow as pa
import pytest
from support.forge import Forge, empty, filled, load, save_tables
from support.sweeps import mostly_slow

from recckpt import CheckpointReader
from recckpt.errors import CorruptCheckpointError
from recckpt.inspect.verify import verify
from recckpt.storage import open_storage


def replaced(batch, name, array, field=None):
    at = batch.schema.get_field_index(name)
    return batch.set_column(at, field or pa.field(name, array.type), array)


def with_nulls(batch):
    return replaced(batch, "id", pa.array([None, *batch.column("id").to_pylist()[1:]], pa.int64()))


def with_null_inside(batch):
    rows = batch.column("embedding")
    values = pa.array([None, *rows.flatten().to_pylist()[1:]], rows.type.value_type)
    return replaced(batch, "embedding", pa.FixedSizeListArray.from_arrays(values, rows.type.list_size))


def with_ids_of(dtype):
    return lambda batch: replaced(batch, "id", pa.array(batch.column("id").to_numpy().astype(dtype)))


def with_embeddings(shape, dtype):
    def edit(batch):
        tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((batch.num_rows, *shape), dtype))
        return replaced(batch, "embedding", tensors.storage if len(shape) == 1 else tensors)

    return edit


def with_strings(batch):
    return replaced(batch, "embedding", pa.array(["x" * 200] * batch.num_rows))


def with_lists(batch):
    return replaced(batch, "embedding", pa.array([[0.0] * 32] * batch.num_rows, pa.list_(pa.float32())))


def with_tensors_of_one_dimension(batch):
    values = np.zeros((batch.num_rows, 32), np.float32)
    return replaced(batch, "embedding", pa.FixedShapeTensorArray.from_numpy_ndarray(values))


def with_a_strange_column(batch):
    return batch.append_column("strange", pa.array(np.zeros(batch.num_rows, np.int8)))


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
    "null ids": (with_nulls, "nulls"),
    "a null in a vector": (with_null_inside, "nulls"),
    "ids of float64": (with_ids_of(np.float64), "double.*int64"),
    "ids of int32": (with_ids_of(np.int32), "int32|bytes"),
    "16 values for 32": (with_embeddings((16,), np.float32), "16|bytes"),
    "64 values for 32": (with_embeddings((64,), np.float32), "64"),
    "2 x 16 values for 32": (with_embeddings((2, 16), np.float32), r"\[2,16\].*fixed_size_list"),
    "values of float64": (with_embeddings((32,), np.float64), "double.*float"),
    "strings": (with_strings, "string"),
    "lists": (with_lists, "list"),
    "tensors of one dimension": (with_tensors_of_one_dimension, "fixed_shape_tensor.*fixed_size_list"),
    "a column too many": (with_a_strange_column, "strange"),
    "a column too few": (lambda batch: batch.drop_columns(["embedding"]), "columns|bytes"),
}


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
