import pytest
import torch
from support.foreign import ForeignTable

from recckpt.errors import StateMismatchError
from recckpt.sparse import HashTable
from recckpt.sparse.files.table_rows import source_of, source_to_save
from recckpt.types import SlotSpec


def foreign(n_rows=3, **changes) -> ForeignTable:
    table = ForeignTable("t", torch.arange(n_rows), torch.ones(n_rows, 2), {"sparse_step": torch.zeros(n_rows)})
    for name, value in changes.items():
        setattr(table, f"_{name}", value)
    return table


def test_our_table_is_seen_without_a_copy():
    table = HashTable((2, 3), name="t", dtype=torch.bfloat16)
    for name in ("sparse_b", "a"):
        table.add_slot(name, ())
    table.insert(torch.tensor([5, 7]), torch.ones(2, 2, 3, dtype=torch.bfloat16))
    source = source_of(table)
    assert (source.name, source.n_rows, list(source.columns)) == ("t", 2, ["embedding", "a", "sparse_b"])
    assert source.slots[0] == SlotSpec("embedding", "bfloat16", (2, 3))
    assert source.ids is table.store.ids


def test_a_foreign_table_is_seen_without_a_copy():
    table = foreign()
    source = source_of(table)
    assert source.columns["embedding"].blocks[0].data_ptr() == table.embeddings().data_ptr()
    assert source.slots == (SlotSpec("embedding", "float32", (2,)), SlotSpec("sparse_step", "float32", ()))
    assert source.n_rows == 3


def test_a_foreign_table_may_give_views_that_are_not_contiguous_or_want_gradients():
    values = torch.arange(12.0).view(2, 6).T.requires_grad_()
    source = source_of(foreign(6, embeddings=values))
    assert source.columns["embedding"].to_tensor(6).tolist() == values.tolist()


def test_a_foreign_table_may_be_empty():
    assert source_of(foreign(0)).n_rows == 0


@pytest.mark.parametrize(
    ("changes", "slot"),
    [
        ({"ids": torch.arange(3, dtype=torch.int32)}, "id"),
        ({"ids": torch.arange(3.0)}, "id"),
        ({"ids": torch.zeros(3, 1, dtype=torch.int64)}, "id"),
        ({"embeddings": torch.ones(4, 2)}, "embedding"),
        ({"embeddings": torch.tensor(1.0)}, "embedding"),
        ({"embeddings": torch.ones(3, 0)}, "embedding"),
        ({"embeddings": torch.ones(3, 2, dtype=torch.complex64)}, "embedding"),
        ({"embeddings": torch.ones(3, 2, dtype=torch.bool)}, "embedding"),
        ({"slots": {"sparse_step": torch.zeros(2)}}, "sparse_step"),
    ],
)
def test_a_foreign_table_that_does_not_fit_is_refused_with_its_name(changes, slot):
    with pytest.raises(StateMismatchError, match="'t'") as caught:
        source_of(foreign(**changes))
    assert list(caught.value.mismatched) == [slot]


def test_a_foreign_table_with_an_id_twice_is_not_saved():
    twice = foreign(ids=torch.tensor([-7, 5, -7]))
    with pytest.raises(StateMismatchError, match="'t'") as caught:
        source_to_save(twice, detached=False)
    assert caught.value.mismatched == {"id": ("-7 more than once", "every id once")}
    assert source_of(twice).n_rows == 3, "it may be loaded into"
    for fine in (foreign(), foreign(0), foreign(1)):
        assert source_to_save(fine, detached=False).n_rows == len(fine)


@pytest.mark.parametrize("slot", ["embedding", "id", "table", "op", "", "a@b"])
def test_a_foreign_slot_cannot_take_a_name_of_the_format(slot):
    with pytest.raises(ValueError, match="cannot be named"):
        source_of(foreign(slots={slot: torch.zeros(3)}))


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 1025])
def test_a_foreign_table_needs_a_name_too(name):
    table = foreign()
    table.name = name
    with pytest.raises(ValueError, match="table name"):
        source_of(table)
