"""What ``torch.export`` makes of a model with a table."""

import pytest
import torch
from torch import nn

from recckpt.sparse import EmbeddingCollection, HashTable, ShardedHashTable


class Model(nn.Module):
    def __init__(self, tables, look_up):
        super().__init__()
        self.tables, self.look_up = tables, look_up

    def forward(self, ids):
        return self.look_up(self.tables, ids)


CALLS = {
    "called": lambda table, ids: table(ids),
    "pooled": lambda table, ids: table.bag(ids.view(1, -1)),
    "collected": lambda tables, ids: tables({"t": ids})["t"],
}


@pytest.mark.slow  # what exports takes seconds to import
@pytest.mark.parametrize(
    ("call", "strict"), [("called", False), ("called", True), ("pooled", False), ("collected", False)]
)
def test_a_table_is_refused_with_what_to_export_in_its_place(call, strict):
    tables = EmbeddingCollection([ShardedHashTable(2, name="t")]) if call == "collected" else HashTable(2, name="t")
    model, ids = Model(tables, CALLS[call]).eval(), torch.tensor([1, 2])
    assert model(ids).shape[-1] == 2
    with pytest.raises(Exception, match=r"a table cannot be part of a program of torch\.export"):
        torch.export.export(model, (ids,), strict=strict)
