"""``torch.distributed.checkpoint.state_dict`` on models with tables."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from recckpt.policies.admit import Bloom, MinCount
from recckpt.sparse import EmbeddingCollection, HashTable, ShardedHashTable


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = HashTable(4, name="user")
        self.deep = nn.Sequential(HashTable(4, name="a.dotted/name"), nn.Linear(4, 1))
        self.more = EmbeddingCollection([ShardedHashTable(4, name="weight")])

    def forward(self, ids):
        return self.deep[1](self.user(ids) + self.deep[0](ids) + self.more({"weight": ids})["weight"])


def trained():
    model = Model()
    optim = torch.optim.Adam(model.parameters())
    model(torch.arange(5)).sum().backward()
    optim.step()
    return model, optim


def test_the_tables_stand_in_the_state_of_the_model_as_themselves_wrapped_or_not():
    model, _ = trained()
    state = get_model_state_dict(model)
    assert state.keys() == model.state_dict().keys()
    assert state["user.user"] is model.user
    assert state["deep.0.a.dotted/name"] is model.deep[0]
    assert state["more.tables.0.weight"] is model.more.tables[0]
    for wrapped in (torch.compile(model, backend="eager"), nn.Sequential(model)):
        assert any(value is model.user for value in get_model_state_dict(wrapped).values())


def test_counts_of_ids_that_wait_stand_there_too():
    model = nn.ModuleDict({"a": HashTable(4, name="x.user", admit=MinCount(2)), "b": HashTable(4, name="u")})
    model["c"] = HashTable(4, name="item", admit=MinCount(2, Bloom(1000, 0.01)))
    state = get_model_state_dict(model)
    assert state.keys() == model.state_dict().keys()
    assert state["a.x.user.candidates"] is model["a"].candidates
    assert state["c.item.candidates_1x1"] is model["c"].candidates
    set_model_state_dict(model, state)


def test_model_and_dense_optimizer_go_out_and_in_again():
    model, optim = trained()
    state, optim_state = get_state_dict(model, optim)
    assert optim_state["state"].keys() == {"deep.1.weight", "deep.1.bias"}
    other = Model()
    other_optim = torch.optim.Adam([some for some in other.parameters() if some.numel()])
    set_state_dict(other, other_optim, model_state_dict=state, optim_state_dict=optim_state)
    assert torch.equal(other.user.embeddings(), model.user.embeddings())
    assert torch.equal(other.deep[1].weight, model.deep[1].weight)
    for one, two in zip(optim.state.values(), other_optim.state.values(), strict=True):
        assert torch.equal(one["exp_avg"], two["exp_avg"])
    set_model_state_dict(model, get_model_state_dict(model))
    assert len(model.user) == 5


@pytest.mark.parametrize("name", ["weight", "user", "a.b", "item"])
def test_a_table_has_no_attribute_for_its_name(name):
    table = HashTable(2, name=name)
    assert not [part for part in name.split(".") if hasattr(table, part)]
    assert not hasattr(HashTable(2, name="a.b")._by_key, "b")
    with pytest.raises(AttributeError, match="no attribute 'item'"):
        table.item  # noqa: B018
