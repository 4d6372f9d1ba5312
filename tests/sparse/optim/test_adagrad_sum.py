"""Adagrad that adds up the squared gradients of ranks, against the rule written out."""

import copy

import pytest
import torch
from support.rooms import on_ranks

from recckpt.sparse import (
    Constant,
    HashTable,
    ShardedHashTable,
    SparseAdagrad,
    SparseAdagradSum,
    SparseRowWiseAdagrad,
    SparseRowWiseAdagradSum,
)

DIM, SETTINGS = 3, {"lr": 0.5, "lr_decay": 0.25, "initial_accumulator_value": 0.125}
BOTH = pytest.mark.parametrize("rule", [SparseAdagradSum, SparseRowWiseAdagradSum])
PAIRS = pytest.mark.parametrize(
    ("rule", "plain"), [(SparseAdagradSum, SparseAdagrad), (SparseRowWiseAdagradSum, SparseRowWiseAdagrad)]
)


class Expected:
    """One row of zeros at first, trained by the rule: contributions are the gradients of ranks or look-ups."""

    def __init__(self, rule):
        self.is_row_wise = rule is SparseRowWiseAdagradSum
        self.eps = 1e-8 if self.is_row_wise else 1e-10
        self.row, self.total, self.step = torch.zeros(DIM), torch.full((DIM,), 0.125), 0

    def update(self, *contributions):
        self.step += 1
        squares = sum(each.square() for each in contributions)
        self.total = self.total + (squares.mean() if self.is_row_wise else squares)
        lr = 0.5 / (1 + (self.step - 1) * 0.25)
        self.row = self.row - lr * sum(contributions) / (self.total.sqrt() + self.eps)


def gradients(n, seed=0):
    return list(torch.randn(n, DIM, generator=torch.Generator().manual_seed(seed)))


def table_of(**options):
    return HashTable(DIM, name="t", initializer=Constant(0), **options)


def give(table, *grads, ids=(7,)):
    """Let a backward pass give each of the ids these gradients, one a look-up."""
    for grad in grads:
        (table(torch.tensor(ids)) * grad).sum().backward()


@BOTH
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_squares_are_those_of_each_rank(rule, ranks):
    grads = [gradients(ranks, seed) for seed in range(4)]

    def work(exchange):
        table = ShardedHashTable(DIM, name="t", group=exchange, initializer=Constant(0), gradients="sum")
        optimizer = rule([table], **SETTINGS)
        for of_ranks in grads:  # each rank looks the id up twice, which is one gradient
            give(table, of_ranks[exchange.rank] / 2, ids=(7, exchange.rank, 7))
            optimizer.step()
            optimizer.zero_grad()
        return table.lookup(torch.tensor([7]))[0][0], len(table)

    expected = Expected(rule)
    for of_ranks in grads:
        expected.update(*of_ranks)
    [row] = [row for row, _ in on_ranks(ranks, work) if row.any()]
    torch.testing.assert_close(row, expected.row)


@BOTH
def test_the_squares_of_several_look_ups_and_backward_passes_add_up(rule):
    table, expected = table_of(), Expected(rule)
    optimizer = rule([table], **SETTINGS)
    for seed in range(3):
        grads = gradients(70, seed)  # more than a table keeps apart
        give(table, *grads)
        optimizer.step()
        expected.update(*grads)
    torch.testing.assert_close(table.embeddings()[0], expected.row, rtol=1e-5, atol=1e-6)


@PAIRS
def test_one_look_up_a_step_is_plain_adagrad_bit_for_bit(rule, plain):
    tables = [table_of(), table_of()]
    for table, kind in zip(tables, (rule, plain), strict=True):
        optimizer = kind([table], **SETTINGS)
        for grad in gradients(5):
            give(table, grad, ids=(1, 2, 1))
            optimizer.step()
    assert torch.equal(tables[0].embeddings(), tables[1].embeddings())


@BOTH
def test_clipping_and_scaling_count_for_the_squares(rule):
    grads = [torch.tensor([3.0, 1, 0]), torch.tensor([-1.0, -1, 4])]  # which cancel each other in one place
    table, expected = table_of(), Expected(rule)
    optimizer = rule([table], **SETTINGS)
    give(table, *(grad * 1024 for grad in grads))
    table.grad.mul_(1 / 1024)
    norm = torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()
    expected.update(*(grad * (1.0 / (norm + 1e-6)) for grad in grads))
    torch.testing.assert_close(table.embeddings()[0], expected.row)


@BOTH
def test_erased_ids_take_their_squares_along_and_a_copy_of_the_table_keeps_squares(rule):
    model = torch.nn.ModuleDict({"t": table_of()})
    model, optimizer = copy.deepcopy((model, rule(list(model.values()), **SETTINGS)))
    table, expected, grads = model["t"], Expected(rule), gradients(2)
    give(table, *grads, ids=(7, 8, 9))
    assert table.grad is not None  # merged by now
    table.erase(torch.tensor([8]))
    optimizer.step()
    expected.update(*grads)
    torch.testing.assert_close(table.embeddings(), expected.row.expand(2, -1))


@BOTH
def test_what_cannot_be_summed_is_refused(rule):
    with pytest.raises(TypeError, match="weight_decay"):
        rule([table_of()], weight_decay=0.1)
    with pytest.raises(ValueError, match=r"found weight_decay=0\.1, expected 0"):
        rule([{"tables": [table_of()], "weight_decay": 0.1}])
    with pytest.raises(ValueError, match=r"gradients='mean', expected 'sum' for a Sparse\w+Sum"):
        rule([ShardedHashTable(DIM, name="t")])
    assert SparseAdagradSum.slot_names == SparseAdagrad.slot_names
    assert SparseRowWiseAdagradSum.slot_names == ("sparse_rowwise_adagrad_sum_by_rank",)
