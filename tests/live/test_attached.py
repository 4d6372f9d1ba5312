"""A live table with its door, as a saver takes it."""

import pytest
import torch
from torch import nn, optim

from recckpt.errors import LiveTableError
from recckpt.live import live_tables
from recckpt.types import RowShare, is_hashtable


@pytest.fixture
def table():
    model = nn.Sequential(nn.Embedding(20, 2, sparse=True))
    optimizer = optim.Adagrad(model.parameters(), lr=0.1)
    return live_tables(model, optimizer, min_rows=1)["0"]


def test_it_is_a_table_that_can_be_saved(table):
    assert is_hashtable(table)
    assert len(table) == 20
    assert table.ids().tolist() == list(range(20))
    assert torch.equal(table.embeddings(), table.live.weight)
    assert list(table.slots) == ["sparse_adagrad_sum"]
    assert table.share == RowShare(0, 20, 20)


def test_rows_are_written_where_they_lie(table):
    weight = table.live.weight
    table.insert(torch.tensor([4, 2]), torch.ones(2, 2), {"sparse_adagrad_sum": torch.full((2, 2), 3.0)})
    assert table.live.weight is weight
    assert weight[[2, 4]].tolist() == [[1, 1], [1, 1]]
    assert table.slots["sparse_adagrad_sum"][:5].sum(1).tolist() == [0, 0, 6, 0, 6]


@pytest.mark.parametrize("ids", [[20], [3, -1], [1 << 40]])
def test_an_id_without_a_row_is_refused_and_nothing_is_written(table, ids):
    before = table.embeddings().clone()
    with pytest.raises(LiveTableError, match=r"found rows .* to .*, expected rows 0 to 19"):
        table.insert(torch.tensor(ids), torch.ones(len(ids), 2))
    assert torch.equal(table.embeddings(), before)


def test_rows_cannot_be_dropped(table):
    with pytest.raises(LiveTableError, match="not recckpt's to drop"):
        table.clear()


def test_once_closed_it_is_neither_saved_nor_loaded(table):
    table.close()
    table.close()
    with pytest.raises(LiveTableError, match="is closed"):
        table.prepare()
