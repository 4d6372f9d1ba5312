"""What a table refuses at the door: numbers, shapes and devices that would mean nothing, or something else."""

import math
import re

import numpy as np
import pytest
import torch
from torch import nn

from recckpt.sparse import HashTable, ShardedHashTable

SHAPES = [2**31, 1_000_000, (1024, 1024), (2**40, 2**40)]


@pytest.mark.parametrize("value", [True, "5", [1], 10**400, 2**70, 1.5, math.nan, math.inf, -(2**63) - 1])
def test_numbers_that_no_slot_no_padding_and_no_room_can_have_are_refused(value):
    table = HashTable(2, name="t")
    with pytest.raises(ValueError, match="'t', 'n': initial must be a int8, found"):
        table.add_slot("n", (), torch.int8, initial=value)
    with pytest.raises(ValueError, match="'t': padding_id must be an int64 or None, found"):
        table.bag(torch.tensor([[1]]), padding_id=value)
    if not isinstance(value, int) or value is True:
        with pytest.raises(ValueError, match="'t': n_rows must be an int of at least 0, found"):
            table.reserve(value)
    assert (len(table), list(table.slots)) == (0, [])


def test_a_slot_of_floats_starts_at_any_float_that_it_can_hold():
    table = HashTable(2, name="t")
    for number, initial in enumerate([-math.inf, math.nan, np.float32(2.5), 3]):
        table.add_slot(f"slot_{number}", (), initial=initial)
    for initial in (1e300, -(10**400), True):
        with pytest.raises(ValueError, match="initial must be a float32, found"):
            table.add_slot("more", (), initial=initial)
    table(torch.tensor([7]))
    assert str([values.item() for values in table.slots.values()]) == "[-inf, nan, 2.5, 3.0]"


REFUSED = [  # call, values, what is said of each
    (
        lambda dtype: table_of()(torch.ones(2, dtype=dtype)),
        [torch.int16],
        "int64, found {0}; convert them with ids.long()",
    ),
    (lambda dtype: table_of()(torch.ones(2, dtype=dtype)), [torch.uint8, torch.bool], "int64, found {0}; convert them"),
    (lambda dtype: table_of()(torch.ones(2, dtype=dtype)), [torch.float32], "int64, found {0}; make them int64 at"),
    (lambda ids: table_of()(ids), [[1, 2], 3, np.arange(2)], "tensor, found a {1}; convert them with torch.as_tensor"),
    (
        lambda dtype: table_of(dtype=dtype),
        [torch.complex64, torch.bool, torch.float8_e4m3fn, "float32", None],
        "a slot cannot be {0!r}",
    ),
    (lambda shape: table_of(shape=shape), [(), 0, (2, 0), (-1,)], "a shape needs dimensions of at least 1, found"),
    (
        lambda shape: table_of(shape=shape),
        ["16", 16.0, True, None, (2, 2.5), ("8",), torch.ones(2)],
        "a shape is an int or a sequence of ints, found",
    ),
    (lambda name: table_of(name=name), ["", None, "a\0b", "x" * 1025, "\ud800"], "name"),
    (
        lambda name: table_of().add_slot(name, ()),
        ["", "embedding", "id", "table", "op", "a@b"],
        "a slot cannot be named {0!r}; choose another name",
    ),
    (lambda n: table_of().reserve(n), [-1, 1.5, "many", None], "'t': n_rows must be an int of at least 0, found {0!r}"),
]


def table_of(shape=2, **options):
    return HashTable(shape, **{"name": "t", **options})


@pytest.mark.parametrize(
    ("call", "value", "said"), [(call, value, said) for call, values, said in REFUSED for value in values]
)
def test_what_is_no_table_no_slot_and_no_id_is_refused(call, value, said):
    with pytest.raises((ValueError, TypeError), match=re.escape(said.format(value, type(value).__name__))):
        call(value)


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
