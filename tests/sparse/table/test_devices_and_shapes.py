"""Where a table cannot be, and shapes that it cannot have: refused as early as they are said."""

import pytest
import torch
from torch import nn

from recckpt.sparse import HashTable, ShardedHashTable

SHAPES = [2**31, 1_000_000, (1024, 1024), (2**40, 2**40)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_as_large_as_a_vocabulary_is_refused(shape):
    with pytest.raises(ValueError, match=r"at most 262144 values.* shape of one row.*a table grows"):
        HashTable(shape, name="t")
    table = HashTable(2, name="t")
    with pytest.raises(ValueError, match="at most 262144 values"):
        table.add_slot("s", shape if isinstance(shape, tuple) else (shape,))
    assert list(table.slots) == []


@pytest.mark.parametrize("make", [HashTable, ShardedHashTable])
def test_a_table_is_not_made_where_nothing_has_values(make):
    with pytest.raises(ValueError, match="'t': rows on the device 'meta' have no values"):
        make(2, name="t", device="meta")
    with torch.device("meta"), pytest.raises(ValueError, match=r"under torch\.device\('cpu'\)"):
        make(2, name="t")


def test_a_model_made_on_meta_makes_its_tables_under_the_cpu():
    with torch.device("meta"):
        dense = nn.Linear(2, 1)
        with torch.device("cpu"):
            table = HashTable(2, name="t")
    assert dense.weight.is_meta
    assert table(torch.tensor([3])).device.type == "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("n_rows", [0, 3])
def test_a_table_is_neither_moved_to_meta_nor_emptied_and_stays_as_it_was(n_rows, dtype):
    table = HashTable(2, name="t", dtype=dtype)
    table(torch.arange(n_rows))
    before = table.embeddings()
    model = nn.Sequential(table)
    for _ in range(3):  # freed memory may hold what the call before has left in it
        with pytest.raises(ValueError, match="'t': rows on the device 'meta'"):
            model.to("meta")
        with pytest.raises(ValueError, match="'t': rows on the device 'meta'"):
            model.to_empty(device="meta")
        with pytest.raises(ValueError, match=r"'t': to_empty\(\) would leave its rows without values"):
            model.to_empty(device="cpu")
        with pytest.raises(ValueError, match=r"'t': share_memory\(\) cannot share its rows.*ShardedHashTable"):
            model.share_memory()
    assert torch.equal(table.embeddings(), before)
    assert not table.anchor.is_shared()
    assert model.to("cpu") is model
