import pytest
import torch

from recckpt import types
from recckpt.sparse import HashTable
from recckpt.types import ITEM_BYTES, SlotSpec, check_table_name, is_hashtable, is_optimizer_slot


class Foreign:
    """The least that fits the protocol."""

    name = "foreign"
    slots: dict = {}  # noqa: RUF012

    def ids(self):
        return torch.tensor([1])

    def embeddings(self):
        return torch.ones(1, 2)

    def insert(self, ids, embeddings, slots=None): ...

    def clear(self): ...

    def __len__(self):
        return 1


def test_our_table_and_a_foreign_one_fit_the_protocol():
    assert is_hashtable(HashTable(2, name="t"))
    assert is_hashtable(Foreign())


def test_a_table_is_known_by_its_class_and_not_asked_for_its_slots():
    asked = []
    table = type("Asked", (Foreign,), {"slots": property(asked.append)})()
    assert is_hashtable(table)
    assert asked == []


@pytest.mark.parametrize("missing", ["ids", "embeddings", "insert", "clear", "__len__", "slots", "name"])
def test_what_lacks_anything_does_not(missing):
    members = {name: value for name, value in vars(Foreign).items() if name != missing}
    assert not is_hashtable(type("Other", (), members)())


@pytest.mark.parametrize("value", [None, 3, torch.ones(2), {}, Foreign, HashTable])
def test_tensors_values_and_classes_are_no_tables(value):
    assert not is_hashtable(value)


@pytest.mark.parametrize("name", ["a", "a/b", "\n", "x" * 300, ".", "..", "-rf", "ü" * 512, "x" * 1024, " "])
def test_table_names_are_free(name):
    assert check_table_name(name) == name
    assert HashTable(1, name=name).name == name


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 1025, "ü" * 513, "\ud800", None, 7, b"x"])
def test_a_name_that_no_table_can_have_is_refused_when_it_is_made(name):
    with pytest.raises(ValueError, match="table name"):
        check_table_name(name)
    with pytest.raises(ValueError, match="table name"):
        HashTable(1, name=name)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_the_bytes_of_a_dtype_are_those_of_torch(dtype):
    assert ITEM_BYTES[dtype] == getattr(torch, dtype).itemsize
    assert SlotSpec("embedding", dtype, (2, 3)).row_bytes == 6 * ITEM_BYTES[dtype]
    assert SlotSpec("embedding", dtype, ()).row_bytes == ITEM_BYTES[dtype]


def test_slots_of_optimizers_are_known_by_their_name():
    assert is_optimizer_slot("sparse_adam_exp_avg")
    assert not is_optimizer_slot(types.EMBEDDING)
