"""A padding id: zeros, no row, no gradient, not counted, as padding_idx of nn.Embedding."""

import copy

import pytest
import torch
from hypothesis import strategies as st
from support.drawn import drawn
from support.rooms import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from recckpt import Saver
from recckpt.averages import RowAverage
from recckpt.errors import LookupFailedError
from recckpt.policies.admit import MinCount
from recckpt.sparse import Constant, EmbeddingCollection, HashTable, Normal, ShardedHashTable, SparseSGD

START = Normal(0.0, 0.1, seed=3)
BATCH = torch.tensor([[7, 8, 0], [7, 0, 0]])
N = 6


def counts_of(table):
    return dict(zip(table.ids().tolist(), table.slots["count"].tolist(), strict=True))


def test_padding_reads_zeros_and_gets_no_row_no_gradient_and_no_count():
    table = HashTable(2, name="t", padding_id=0, initializer=Constant(3.0), track="count")
    out = table(BATCH)
    assert out[BATCH == 0].eq(0).all()
    assert out[BATCH != 0].eq(3).all()
    out.sum().backward()
    assert counts_of(table) == {7: 2, 8: 1}
    assert table.grad.tolist() == [[2, 2], [1, 1]]
    assert "padding_id=0" in repr(table)
    table = HashTable(2, name="t", padding_id=0, admit=MinCount(2))
    out = table(torch.zeros(2, 3, dtype=torch.int32))
    out.sum().backward()
    assert (out.tolist(), len(table), table.grad.tolist()) == ([[[0, 0]] * 3] * 2, 0, [[0, 0]])
    for _ in range(3):
        table(torch.tensor([[5, 0, 0]]))
    assert table.ids().tolist() == [5]
    assert len(table.candidates) == 0, "it waits for no admission"


@pytest.mark.parametrize("mode", ["eval", "frozen", "no_grad", "lookup"])
def test_padding_reads_zeros_wherever_rows_are_only_read(mode):
    table = HashTable(2, name="t", padding_id=0, initializer=Constant(3.0))
    table.train(mode != "eval")
    table.requires_grad_(mode != "frozen")
    with torch.set_grad_enabled(mode != "no_grad"):
        out = table.lookup(BATCH)[0] if mode == "lookup" else table(BATCH)
    assert out[BATCH == 0].eq(0).all()
    assert out[BATCH != 0].eq(3).all()
    assert 0 not in table.ids()


@drawn(
    st.lists(st.lists(st.integers(0, N - 1), min_size=3, max_size=3), min_size=1, max_size=4),
    st.integers(0, N - 1),
    st.integers(0, 2**16),
    few=5,
    many=100,
)
def test_a_table_trains_as_an_embedding_with_padding_does(batches, padding, seed):
    torch.manual_seed(seed)
    module = nn.Embedding(N, 2, padding_idx=padding)
    table = HashTable(2, name="t", padding_id=padding)
    kept = torch.arange(N) != padding
    table.insert(torch.arange(N)[kept], module.weight.detach()[kept])
    optimizers = SparseSGD([table], lr=0.5), torch.optim.SGD(module.parameters(), lr=0.5)
    for batch in batches:
        for optim, look_up in zip(optimizers, (table, module), strict=True):
            optim.zero_grad()
            (look_up(torch.tensor([batch])) - 1).square().sum().backward()
            optim.step()
    torch.testing.assert_close(table.eval()(torch.arange(N)), module(torch.arange(N)))
    assert padding not in table.ids()


def test_a_row_that_padding_was_given_is_read_and_left_as_it_is():
    table = HashTable(2, name="t", padding_id=0, track="count")
    table.insert(torch.tensor([0]), torch.ones(1, 2))
    optim = SparseSGD([table], lr=1.0)
    table(BATCH).sum().backward()
    optim.step()
    assert table.lookup(torch.tensor([0]))[0].tolist() == [[1, 1]]
    assert counts_of(table)[0] == 0
    table.erase(torch.tensor([0]))
    assert table(BATCH)[BATCH == 0].eq(0).all()


def test_padding_in_a_recomputed_look_up_is_padding_again():
    table = HashTable(2, name="t", padding_id=0, admit=MinCount(2), track="count")
    weight = torch.ones(2, requires_grad=True)
    for use_reentrant in (False, True):
        checkpoint(lambda w: table(BATCH) * w, weight, use_reentrant=use_reentrant).sum().backward()
    assert counts_of(table) == {7: 4, 8: 2}


def test_padding_outside_the_slice_of_a_table_is_padding():
    slices = [ShardedHashTable(2, name="t").slice, *on_ranks(2, lambda exchange: sharded(exchange).slice)]
    for part in slices:
        table = HashTable(2, name="t", padding_id=0, slice=part)
        assert table(torch.tensor([0, 0])).tolist() == [[0, 0]] * 2


def test_padding_is_left_out_of_bags_and_compiled_functions_and_another_one_can_be_named():
    table = HashTable(2, name="t", padding_id=0, initializer=Constant(3.0))
    assert table.bag(BATCH, mode="mean").tolist() == [[3, 3], [3, 3]]
    assert table.bag(BATCH, padding_id=7).tolist() == [[3, 3], [0, 0]]
    out = torch.compile(lambda ids: table(ids) * 2, backend="eager")(BATCH)
    assert out[:, :, 0].tolist() == [[6, 6, 0], [6, 0, 0]]
    assert table.ids().tolist() == [7, 8]
    module = nn.Embedding(N, 2, padding_idx=1)
    assert HashTable.from_embedding(module, name="t").padding_id == 1
    assert HashTable.from_embedding(module, name="t", padding_id=2).padding_id == 2


def test_an_average_has_the_padding_of_its_table():
    model = nn.ModuleDict({"table": HashTable(2, name="t", padding_id=0, initializer=Constant(3.0))})
    average = RowAverage(model, 0.5)
    model["table"](BATCH).sum().backward()
    average.update()
    assert average.tables["t"](BATCH)[BATCH == 0].eq(0).all()


def test_padding_is_of_the_table_and_not_of_its_checkpoint(tmp_path):
    table = HashTable(2, name="t", padding_id=0)
    table(BATCH)
    saver = Saver(nn.ModuleDict({"t": table}), output_dir=tmp_path)
    saver.save("1")
    assert copy.deepcopy(table).padding_id == 0
    for padding, expected in ((0, [7, 8]), (None, [0, 7, 8])):
        again = HashTable(2, name="t", padding_id=padding)
        Saver(nn.ModuleDict({"t": again}), output_dir=tmp_path).load("1")
        again(BATCH)
        assert sorted(again.ids().tolist()) == expected


# on ranks


def sharded(exchange, **options):
    return ShardedHashTable(2, name="t", group=exchange, initializer=START, gradients="sum", **options)


def test_over_ranks_padding_is_what_it_is_in_one_table():
    batches = [BATCH, torch.tensor([[9, 0, 7]])]

    def train(exchange):
        table = sharded(exchange, padding_id=0, track="count")
        out = table(batches[exchange.rank])
        out.sum().backward()
        return out.detach(), counts_of(table), dict(zip(table.ids().tolist(), table.grad.tolist(), strict=False))

    outs, counts, grads = zip(*on_ranks(2, train), strict=True)
    plain = HashTable(2, name="t", padding_id=0, initializer=START, track="count")
    for batch, out in zip(batches, outs, strict=True):
        assert torch.equal(plain(batch), out)
    assert counts[0] | counts[1] == counts_of(plain) == {7: 3, 8: 1, 9: 1}
    assert all(0 not in of_rank for of_rank in grads)


def test_a_collection_has_the_padding_of_each_table_and_ranks_with_another_one_are_refused():
    def look(exchange):
        tables = [
            ShardedHashTable(2, name=name, group=exchange, initializer=Constant(3.0), padding_id=padding)
            for name, padding in (("a", 0), ("b", 7), ("c", None))
        ]
        out = EmbeddingCollection(tables)(dict.fromkeys("abc", BATCH))
        with pytest.raises(LookupFailedError, match="padding_id=1"):
            sharded(exchange, padding_id=exchange.rank)(BATCH)
        return {name: rows[:, :, 0].tolist() for name, rows in out.items()}, [len(table) for table in tables]

    answers = on_ranks(2, look)
    for rows, _ in answers:
        assert rows == {"a": [[3, 3, 0], [3, 0, 0]], "b": [[0, 3, 3], [0, 3, 3]], "c": [[3, 3, 3], [3, 3, 3]]}
    assert [sum(sizes) for sizes in zip(*(sizes for _, sizes in answers), strict=True)] == [2, 2, 3]
