"""Bags of tables whose rows lie on many ranks, against a plain table."""

import pytest
import torch
from support.rooms import on_ranks

from recckpt.errors import LookupFailedError
from recckpt.sparse import EmbeddingCollection, HashTable, Normal, ShardedHashTable

START = Normal(0.0, 0.1, seed=3)


class Keyed(dict):
    """As the KeyedJaggedTensor of TorchRec, of jagged tensors."""


def jagged(*bags):
    return torch.nested.nested_tensor([torch.tensor(bag, dtype=torch.int64) for bag in bags], layout=torch.jagged)


def bags_of(rank):
    """Return the bags of a rank for two tables."""
    return {"a": jagged([rank, 1], [], [2]), "b": jagged([5, 5, rank], [7], [rank])}


def collection(exchange):
    tables = (ShardedHashTable(3, name=name, initializer=START, group=exchange) for name in "ab")
    return EmbeddingCollection(tables)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_over_ranks_are_those_of_one_table_by_the_messages_of_one_lookup(size, mode):
    def look(exchange):
        tables = collection(exchange)
        out = tables.bag(Keyed(bags_of(exchange.rank)), mode=mode)
        pooled = exchange.room.n_messages
        tables({name: torch.tensor([1]) for name in "ab"})
        return {name: rows.detach() for name, rows in out.items()}, pooled, exchange.room.n_messages

    for rank, (out, pooled, both) in enumerate(on_ranks(size, look)):
        assert rank > 0 or both == 2 * pooled, "it is the messages of rank 0 that are counted"
        for name, rows in out.items():
            plain = HashTable(3, name=name, initializer=START)
            assert torch.equal(rows, plain.bag(bags_of(rank)[name], mode=mode))


def test_gradients_of_bags_reach_the_owners_and_the_weights():
    def train(exchange):
        table = ShardedHashTable(2, name="t", initializer=START, group=exchange, gradients="sum")
        weights = torch.tensor([[1.0, 2.0]]).requires_grad_()
        table.bag(torch.tensor([[3, 4]]), weights=weights).sum().backward()
        taken = table.take_gradients()
        found = {} if taken is None else zip(table.ids()[torch.from_numpy(taken[0])].tolist(), taken[1], strict=True)
        return {id_: grad.tolist() for id_, grad in found}, weights.grad, table.exchange.rank

    shards, weights, _ = zip(*on_ranks(2, train), strict=True)
    assert {**shards[0], **shards[1]} == {3: [2, 2], 4: [4, 4]}
    plain = HashTable(2, name="t", initializer=START)
    expected = plain(torch.tensor([[3, 4]])).sum(2)
    for grad in weights:
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("wrong", [jagged([1]).values(), "abc", None, {"a": jagged([1])}])
def test_bags_that_are_none_on_one_rank_raise_on_all(wrong):
    def look(exchange):
        tables = collection(exchange)
        given = bags_of(exchange.rank)
        if exchange.rank == 1:
            given = {"a": wrong, "b": given["b"]} if not isinstance(wrong, dict) else wrong
        with pytest.raises(LookupFailedError):
            tables.bag(given)
        with pytest.raises(LookupFailedError, match=r"found mode='add'|rank 1"):
            next(iter(tables.tables)).bag(torch.tensor([[1]]), mode="add" if exchange.rank == 1 else "sum")
        return [len(table) for table in tables.tables]

    assert on_ranks(2, look) == [[0, 0], [0, 0]]


def test_names_and_weights_are_those_of_the_tables():
    tables = EmbeddingCollection([ShardedHashTable(2, name="a"), ShardedHashTable(2, name="b")])
    given = {"a": jagged([1, 2]), "b": jagged([3])}
    weighted = tables.bag(given, weights={"a": torch.tensor([0.0, 1.0])}, padding_id=3)
    assert torch.equal(weighted["a"], tables({"a": torch.tensor([2]), "b": torch.tensor([9])})["a"])
    assert weighted["b"].tolist() == [[0, 0]]
    with pytest.raises(ValueError, match=r"found ids for \[.*\], expected for \[.*'b'\]"):
        tables.bag({"a": jagged([1])})
    with pytest.raises(ValueError, match=r"found ids for .*'c'\], expected"):
        tables.bag({**given, "c": jagged([1])})
    with pytest.raises(ValueError, match=r"weights for \['c'\]"):
        tables.bag(given, weights={"c": torch.ones(2)})
