"""Bags of rows, held against ``nn.EmbeddingBag``."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sweeps import mostly_slow
from torch import nn

from recckpt.sparse import Constant, HashTable, SparseSGD

N, DIM = 12, 5
BAGS = st.lists(st.lists(st.integers(0, N - 1), max_size=4), max_size=6)
MODES = ["sum", "mean", "max"]


def pair(mode="sum", dtype=torch.float32, **options):
    """Return a table and the module of torch with the same rows."""
    bag = nn.EmbeddingBag(N, DIM, mode=mode, dtype=dtype, **options)
    table = HashTable(DIM, name="t", dtype=dtype)
    table.insert(torch.arange(N), bag.weight.detach())
    return table, bag


def flat(bags):
    """Return the ids and the offsets of bags."""
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64)
    return torch.tensor([id_ for bag in bags for id_ in bag], dtype=torch.int64), lengths.cumsum(0) - lengths


def grads_of(table):
    """Return the gradients as a matrix of all ids."""
    dense = torch.zeros(N, *table.embedding_shape)
    taken = table.take_gradients()
    if taken is not None:
        dense[table.ids()[torch.from_numpy(taken[0])]] = taken[1]
    return dense


def check_equal(table, bag, ours, theirs):
    assert torch.equal(ours, theirs)
    factors = torch.linspace(-1, 1, ours.numel()).view(ours.shape)
    (ours * factors).sum().backward()
    (theirs * factors).sum().backward()
    torch.testing.assert_close(grads_of(table), bag.weight.grad)


@mostly_slow()
@pytest.mark.parametrize("mode", MODES)
@settings(deadline=None, max_examples=40)
@given(bags=BAGS)
def test_bags_and_their_gradients_are_those_of_torch(mode, bags):
    table, bag = pair(mode)
    ids, offsets = flat(bags)
    check_equal(table, bag, table.bag(ids, offsets, mode=mode), bag(ids, offsets))


@settings(deadline=None, max_examples=40)
@given(bags=BAGS, seed=st.integers(0, 99))
def test_weighted_bags_have_the_gradients_of_torch_for_the_weights_too(bags, seed):
    table, bag = pair()
    ids, offsets = flat(bags)
    weights = torch.randn(len(ids), generator=torch.Generator().manual_seed(seed))
    ours, theirs = weights.clone().requires_grad_(), weights.clone().requires_grad_()
    check_equal(table, bag, table.bag(ids, offsets, weights=ours), bag(ids, offsets, per_sample_weights=theirs))
    if bags:
        torch.testing.assert_close(ours.grad, theirs.grad)  # products of rows, whose sums follow where memory lies


@pytest.mark.parametrize("mode", MODES)
def test_an_id_that_stands_for_none_is_not_pooled_and_gets_no_row(mode):
    table, bag = pair(mode, padding_idx=3)
    table.erase(torch.tensor([3]))
    ids = torch.tensor([[1, 3, 2], [3, 3, 3], [4, 4, 3]])
    check_equal(table, bag, table.bag(ids, mode=mode, padding_id=3), bag(ids))
    assert 3 not in table.ids().tolist()
    if mode == "sum":
        weights = torch.arange(9.0).view(3, 3)
        found = table.bag(ids, weights=weights, padding_id=3)
        torch.testing.assert_close(found, bag(ids, per_sample_weights=weights), rtol=1e-6, atol=1e-6)


class Jagged:
    """As the JaggedTensor of TorchRec."""

    def __init__(self, values, lengths, weights=None):
        self._values, self._lengths, self._weights = values, lengths, weights

    def values(self):
        return self._values

    def lengths(self):
        return self._lengths

    def offsets(self):
        return torch.cat([torch.zeros(1, dtype=self._lengths.dtype), self._lengths.cumsum(0)])

    def weights_or_none(self):
        return self._weights


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_all_ways_to_give_bags_mean_the_same(dtype):
    table, _ = pair()
    bags = [[1, 2], [], [3], [2, 2]]
    ids, offsets = flat(bags)
    lengths = torch.tensor([2, 0, 1, 2])
    expected = table.bag(ids, offsets)
    ids, offsets, lengths = ids.to(dtype), offsets.to(dtype), lengths.to(dtype)
    nested = torch.nested.nested_tensor([torch.tensor(bag, dtype=dtype) for bag in bags], layout=torch.jagged)
    with_gaps = torch.nested.narrow(
        torch.tensor([[1, 2], [0, 0], [3, 0], [2, 2]], dtype=dtype), 1, 0, lengths.long(), layout=torch.jagged
    )
    for found in (
        table.bag(ids, lengths=lengths),
        table.bag(ids, torch.cat([offsets, offsets.new_tensor([5])]), include_last_offset=True),
        table.bag(nested),
        table.bag(with_gaps),
        table.bag(Jagged(ids, lengths)),
    ):
        assert torch.equal(found, expected)
    weights = torch.rand(5)
    expected = table.bag(ids, offsets, weights=weights)
    assert torch.equal(table.bag(Jagged(ids, lengths, weights)), expected)
    as_nested = torch.nested.nested_tensor(list(weights.split([2, 0, 1, 2])), layout=torch.jagged)
    assert torch.equal(table.bag(nested, weights=as_nested), expected)


def narrow(tensor, starts, lengths):
    """Return a nested tensor of pieces of the rows of another, with holes between them."""
    starts, lengths = torch.tensor(starts), torch.tensor(lengths)
    return torch.nested.narrow(tensor, 1, starts, lengths, layout=torch.jagged)


def test_holes_in_ids_and_weights_are_no_ids_and_no_weights():
    table, bag = pair()
    ids, factors = torch.arange(8).view(2, 4), torch.rand(2, 4)
    ours, theirs = factors.clone().requires_grad_(), factors.clone().requires_grad_()
    expected = bag(
        torch.tensor([1, 2, 4, 5, 6]), torch.tensor([0, 2]), per_sample_weights=theirs.flatten()[[1, 2, 4, 5, 6]]
    )
    found = table.bag(narrow(ids, [1, 0], [2, 3]), weights=narrow(ours, [1, 0], [2, 3]))
    check_equal(table, bag, found, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)
    whole = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([4, 5, 6])], layout=torch.jagged)
    assert torch.equal(table.bag(whole, weights=narrow(factors, [1, 0], [2, 3])), expected)
    flat_weights = factors.flatten()[[1, 2, 4, 5, 6]]
    assert torch.equal(table.bag(narrow(ids, [1, 0], [2, 3]), weights=flat_weights), expected)
    outside = table.bag(jagged(torch.arange(8), offsets=[1, 3, 5], lengths=[2, 1]))
    assert torch.equal(outside, table.bag(torch.tensor([1, 2, 3]), torch.tensor([0, 2]))), "values outside of all rows"


def jagged(values, **structure):
    return torch.nested.nested_tensor_from_jagged(
        values, **{name: torch.tensor(some) for name, some in structure.items()}
    )


def test_training_adds_rows_of_any_dimensions_and_eval_adds_none():
    table = HashTable((2, 3), name="t", initializer=Constant(1.0))
    out = table.bag(torch.tensor([[1, 2], [1, 1]]))
    assert out.tolist() == [[[2] * 3] * 2] * 2
    out.sum().backward()
    assert grads_of(table)[1].tolist() == [[3] * 3] * 2
    assert table.eval().bag(torch.tensor([[1, 9]])).tolist() == [[[2] * 3] * 2]
    assert sorted(table.ids().tolist()) == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mode", MODES)
def test_all_dtypes_of_floats_are_pooled_as_by_torch(dtype, mode):
    table, bag = pair(mode, dtype)
    ids = torch.tensor([[1, 2, 2], [3, 4, 11]])
    assert torch.equal(table.bag(ids, mode=mode), bag(ids))


def test_training_through_bags_is_that_of_torch():
    table, bag = pair("mean")
    ours, theirs = SparseSGD([table], lr=0.1), torch.optim.SGD(bag.parameters(), lr=0.1)
    for step in range(5):
        ids = torch.randint(0, N, (4, 3), generator=torch.Generator().manual_seed(step))
        for optimizer, out in ((ours, table.bag(ids, mode="mean")), (theirs, bag(ids))):
            optimizer.zero_grad()
            out.square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(table.lookup(torch.arange(N))[0], bag.weight.detach())


IDS = torch.tensor([1, 2, 3])
ROWS = jagged(IDS, lengths=[1, 2])
PAIRS = torch.nested.nested_tensor([torch.ones(n, 2, dtype=torch.int64) for n in (1, 2)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("args", "options", "said"),
    [
        ((IDS,), {}, "neither offsets nor lengths"),
        ((IDS[None], torch.tensor([0])), {}, r"shape \(1, 3\) with offsets"),
        ((IDS, torch.tensor([0])), {"lengths": torch.tensor([3])}, "with offsets and lengths"),
        ((IDS, torch.tensor([1, 2])), {}, "expected ascending ones from 0"),
        ((IDS, torch.tensor([0, 2, 1])), {}, "expected ascending"),
        ((IDS, torch.tensor([0, 4])), {}, "at most 3"),
        ((IDS, torch.tensor([0, 2])), {"include_last_offset": True}, "the last 3"),
        ((IDS, torch.tensor([0.0])), {}, "found offsets of torch.float32"),
        ((IDS, [0]), {}, "found offsets of list"),
        ((IDS,), {"lengths": torch.tensor([1, 1])}, r"lengths \[1, 1\]... with the sum 2, expected .* the sum 3"),
        ((IDS,), {"lengths": torch.tensor([4, -1])}, "lengths of at least 0"),
        ((IDS,), {"lengths": torch.empty(0, dtype=torch.int64)}, "the sum 3, the number of ids"),
        ((IDS.float()[None],), {}, "found ids of torch.float32, expected int64 or int32"),
        ((IDS[None],), {"mode": "add"}, "found mode='add', expected one of sum, mean, max"),
        ((IDS[None],), {"weights": torch.ones(3)}, r"found weights of \(3,\), expected a tensor of \(1, 3\)"),
        ((IDS[None],), {"weights": torch.ones(1, 3).double()}, "weights of torch.float64, expected torch.float32"),
        ((IDS[None],), {"weights": torch.ones(1, 3), "mode": "mean"}, "expected mode='sum' with weights"),
        ((Jagged(IDS, torch.tensor([1])),), {}, "the sum 3, the number of ids"),
        ((Jagged(IDS, torch.tensor([3])), torch.tensor([0])), {}, "found offsets with ragged ids"),
        ((torch.nested.nested_tensor([IDS]),), {}, "expected layout=torch.jagged"),
        ((PAIRS,), {}, "found nested ids of 3 dimensions"),
        ((PAIRS.transpose(1, 2),), {}, "found nested ids of 3 dimensions"),
        ((Jagged(IDS[:, None], torch.tensor([3])),), {}, r"found values\(\) of shape \(3, 1\), expected one dimension"),
        ((jagged(IDS, offsets=[0, 1, 2]),), {}, r"3 values and offsets \[0, 1, 2\].* in nested ids, .* from 0 to 3"),
        ((jagged(IDS, offsets=[1, 2, 3]),), {}, "in nested ids, expected ascending offsets from 0"),
        ((jagged(IDS, offsets=[0, 2, 1, 3]),), {}, "expected ascending"),
        ((jagged(IDS, lengths=[1, 1]),), {}, "in nested ids, .* from 0 to 3"),
        ((jagged(IDS, offsets=[0, 1, 3], lengths=[1, 3]),), {}, "found 3 values and offsets"),
        ((ROWS,), {"weights": jagged(torch.ones(3), lengths=[2, 1])}, "found 2 weights in row 0, expected 1"),
        ((ROWS,), {"weights": jagged(torch.ones(3), lengths=[1, 1, 1])}, "found 1 weights in row 1, expected 2"),
        ((ROWS,), {"weights": jagged(torch.ones(3), lengths=[1, 2, 0])}, "found 3 rows of weights, expected 2"),
        ((ROWS,), {"weights": jagged(torch.ones(4), offsets=[0, 1, 3])}, "in nested weights, .* from 0 to 4"),
        ((ROWS,), {"weights": torch.nested.nested_tensor([torch.ones(3)])}, "nested weights of torch.strided"),
        (
            (Jagged(IDS, torch.tensor([1, 2])),),
            {"weights": jagged(torch.ones(3), lengths=[2, 1])},
            "found 2 weights in",
        ),
        ((IDS,), {"lengths": torch.tensor([3]), "include_last_offset": True}, "include_last_offset without offsets"),
        ((IDS[None],), {"include_last_offset": True}, "include_last_offset without offsets"),
    ],
)
def test_bags_that_are_none_are_refused_and_add_no_rows(args, options, said):
    table = HashTable(2, name="t")
    with pytest.raises(ValueError, match=f"table 't': .*{said}"):
        table.bag(*args, **options)
    assert len(table) == 0


@pytest.mark.parametrize("ids", [[[1]], np.arange(2), {"t": IDS}, "abc"])
def test_ids_of_no_tensor_and_tables_of_integers_are_refused_with_what_to_do(ids):
    with pytest.raises(TypeError, match=r"found ids of .*convert lists|of several features.*ids\['t'\]"):
        HashTable(2, name="t").bag(ids)
    with pytest.raises(ValueError, match=r"table 't' of torch.int64 cannot be pooled"):
        HashTable(2, name="t", dtype=torch.int64).bag(IDS[None])


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_ids_are_answered_with_what_takes_them(layout):
    table = HashTable(4, name="t")
    ids = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=layout)
    with pytest.raises(ValueError, match=r"found a nested one: table\.bag\(ids\) pools its rows"):
        table(ids)
    if layout is torch.jagged:
        rows = torch.nested.nested_tensor_from_jagged(table(ids.values()), ids.offsets())
        assert [len(some) for some in rows.unbind()] == [2, 1]
