import numpy as np
import pyarrow as pa
import pytest
from forge import Forge, filled, save_tables

from recckpt import CheckpointReader
from recckpt.errors import CorruptCheckpointError
from recckpt.storage import open_storage


def replaced(batch, name, array, field=None):
    at = batch.schema.get_field_index(name)
    return batch.set_column(at, field or pa.field(name, array.type), array)


def with_nulls(batch):
    return replaced(batch, "id", pa.array([None, *batch.column("id").to_pylist()[1:]], pa.int64()))


def with_null_inside(batch):
    rows = batch.column("embedding").storage
    values = pa.array([None, *rows.flatten().to_pylist()[1:]], rows.type.value_type)
    inner = pa.FixedSizeListArray.from_arrays(values, rows.type.list_size)
    return replaced(batch, "embedding", pa.ExtensionArray.from_storage(batch.column("embedding").type, inner))


def with_ids_of(dtype):
    return lambda batch: replaced(batch, "id", pa.array(batch.column("id").to_numpy().astype(dtype)))


def with_embeddings(shape, dtype):
    def edit(batch):
        values = np.zeros((batch.num_rows, *shape), dtype)
        return replaced(batch, "embedding", pa.FixedShapeTensorArray.from_numpy_ndarray(values))

    return edit


def with_strings(batch):
    return replaced(batch, "embedding", pa.array(["x" * 200] * batch.num_rows))


def with_lists(batch):
    return replaced(batch, "embedding", pa.array([[0.0] * 32] * batch.num_rows, pa.list_(pa.float32())))


def with_plain_lists(batch):
    return replaced(batch, "embedding", batch.column("embedding").storage)


def with_a_strange_column(batch):
    return batch.append_column("strange", pa.array(np.zeros(batch.num_rows, np.int8)))


BAD = {
    "null ids": (with_nulls, "nulls"),
    "a null in a vector": (with_null_inside, "nulls"),
    "ids of float64": (with_ids_of(np.float64), "double.*int64"),
    "ids of int32": (with_ids_of(np.int32), "int32|bytes"),
    "16 values for 32": (with_embeddings((16,), np.float32), "16|bytes"),
    "64 values for 32": (with_embeddings((64,), np.float32), "64"),
    "2 x 16 values for 32": (with_embeddings((2, 16), np.float32), r"\[2,16\].*\[32\]"),
    "values of float64": (with_embeddings((32,), np.float64), "double.*float"),
    "strings": (with_strings, "string"),
    "lists": (with_lists, "list"),
    "lists that are no tensors": (with_plain_lists, "fixed_size_list"),
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
