"""Loss scalers and clipping over the parameters of a sparse optimizer, against ``nn.Embedding``."""

import copy
import math

import pytest
import torch
from support.rooms import on_ranks
from torch import nn
from torch.amp import GradScaler

from recckpt.errors import LookupFailedError
from recckpt.sparse import (
    Constant,
    EmbeddingCollection,
    HashTable,
    Normal,
    ShardedHashTable,
    SparseAdagrad,
    SparseAdam,
    SparseAdamW,
    SparseRowWiseAdagrad,
    SparseSGD,
)

VOCABULARY, DIM = 40, 6
OF_FLOAT32 = {"rtol": 1.3e-6, "atol": 1e-5}  # numbers of Python would be compared as float64
RULES = [(SparseSGD, torch.optim.SGD), (SparseAdagrad, torch.optim.Adagrad), (SparseAdam, torch.optim.SparseAdam)]
DENSE_RULES = RULES[:2]  # of which a row without a gradient takes no notice, and whose twin may be clipped by torch


class Model(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.rows = rows
        self.top = nn.Linear(DIM, 1)
        with torch.no_grad():
            self.top.weight.copy_(torch.linspace(-1, 1, DIM))
            self.top.bias.fill_(0.25)

    def forward(self, ids):
        return self.top(self.rows(ids)).squeeze(-1)


def twins(rule, twin_rule, sparse=True):
    """A model with a table and one with an embedding of the same weights, each with its optimizer of rows."""
    table = HashTable(DIM, name="t")
    weights = torch.randn(VOCABULARY, DIM, generator=torch.Generator().manual_seed(0))
    table.insert(torch.arange(VOCABULARY), weights)
    embedding = nn.Embedding(VOCABULARY, DIM, sparse=sparse, _weight=weights.clone())
    ours, theirs = Model(table), Model(embedding)
    return (ours, rule([table], lr=0.1)), (theirs, twin_rule(embedding.parameters(), lr=0.1))


def batches(n):
    draw = torch.Generator().manual_seed(7)
    return [(torch.randint(0, VOCABULARY, (9,), generator=draw), torch.randn(9, generator=draw)) for _ in range(n)]


def train(model, optim, *, autocast=None, clip=None, overflow_at=(), n_steps=6):
    """Train as the documentation of torch does, and return the losses and the scales."""
    dense = torch.optim.SGD(model.top.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    seen = []
    for step, (ids, targets) in enumerate(batches(n_steps)):
        optim.zero_grad()
        dense.zero_grad()
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            loss = (model(ids) - targets).square().mean()
        factor = math.inf if step in overflow_at else 1.0
        scaler.scale(loss * factor).backward()
        if clip is not None:
            scaler.unscale_(optim)
            scaler.unscale_(dense)
            clip([*(p for group in optim.param_groups for p in group["params"]), *model.top.parameters()])
        scaler.step(optim)
        scaler.step(dense)
        scaler.update()
        seen.append((loss.item(), scaler.get_scale()))
    return seen


def rows_of(model):
    if isinstance(model.rows, nn.Embedding):
        return model.rows.weight.detach()
    return model.rows.lookup(torch.arange(VOCABULARY))[0]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rule", "twin_rule"), RULES)
def test_a_scaled_run_equals_that_of_an_embedding_and_an_overflow_skips_the_step_of_rows(rule, twin_rule, autocast):
    (ours, our_optim), (theirs, their_optim) = twins(rule, twin_rule)
    seen = [train(*pair, autocast=autocast, overflow_at=(0, 3)) for pair in ((ours, our_optim), (theirs, their_optim))]
    torch.testing.assert_close(*seen, **OF_FLOAT32)
    assert seen[0][0][1] == 2.0**9
    torch.testing.assert_close(rows_of(ours), rows_of(theirs))
    assert our_optim.state_dict()["state"]["t"]["step"] == 4


CLIPS = {
    "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.05),
    "norm by foreach": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.05, foreach=True),
    "greatest": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.05, norm_type=math.inf),
    "value": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.01),
}


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize(("rule", "twin_rule"), DENSE_RULES)
def test_clipping_counts_the_gradients_of_rows_as_those_of_an_embedding(rule, twin_rule, clip):
    (ours, our_optim), (theirs, their_optim) = twins(rule, twin_rule, sparse=False)
    seen = [train(*pair, clip=clip, overflow_at=(2,)) for pair in ((ours, our_optim), (theirs, their_optim))]
    torch.testing.assert_close(*seen, **OF_FLOAT32)
    torch.testing.assert_close(rows_of(ours), rows_of(theirs))


@pytest.mark.parametrize("rule", [SparseSGD, SparseAdagrad, SparseRowWiseAdagrad, SparseAdam, SparseAdamW])
def test_an_overflow_leaves_the_rows_as_they_were_for_every_rule(rule):
    table = HashTable(DIM, name="t")
    optim, scaler = rule([table], lr=0.1), GradScaler("cpu")
    before = table(torch.arange(5)).detach()
    for overflow in (math.inf, math.nan):
        optim.zero_grad()
        scaler.scale(table(torch.arange(5)).sum() * overflow).backward()
        scaler.step(optim)
        scaler.update()
        assert torch.equal(table.embeddings(), before)
        assert not any(slot.any() for slot in table.slots.values())
    optim.zero_grad()
    scaler.scale(table(torch.arange(5)).square().sum()).backward()
    scaler.step(optim)
    assert bool((table.embeddings() != before).all())


def test_a_table_in_float16_is_unscaled_and_clipped_in_float32():
    table = HashTable(2, name="t", dtype=torch.float16)
    optim, scaler = SparseSGD([table], lr=1.0), GradScaler("cpu", init_scale=2.0**14)
    start = table(torch.tensor([1])).detach()
    ids = torch.ones(4, dtype=torch.int64)  # whose gradients add up to what float16 cannot hold
    (parameter,) = optim.param_groups[0]["params"]
    scaler.scale(table(ids).sum(1).float().sum()).backward()
    scaler.unscale_(optim)
    assert parameter.grad.tolist() == [[4, 4]]
    nn.utils.clip_grad_value_([parameter], 0.5)
    scaler.step(optim)
    torch.testing.assert_close(table.embeddings(), start - 0.5)


def test_several_backward_passes_are_unscaled_and_clipped_as_their_sum():
    table = HashTable(2, name="t")
    optim, scaler = SparseSGD([table], lr=1.0), GradScaler("cpu", init_scale=8.0)
    start = table(torch.tensor([1, 2])).detach()
    for ids in ([1, 2, 1], [2]):
        scaler.scale(table(torch.tensor(ids)).sum()).backward()
    scaler.unscale_(optim)
    (parameter,) = optim.param_groups[0]["params"]
    assert parameter.grad.tolist() == [[2, 2], [2, 2]]
    assert nn.utils.clip_grad_norm_([parameter], 1.0).item() == 4.0
    scaler.step(optim)
    torch.testing.assert_close(table.embeddings(), start - 0.5)
    optim.zero_grad()
    table(torch.tensor([], dtype=torch.int64)).sum().backward()
    for norm_type in (1.0, 2.0, math.inf):
        assert nn.utils.clip_grad_norm_([parameter], 1.0, norm_type).item() == 0
    optim.step()
    assert optim.state_dict()["state"]["t"]["step"] == 2, "a look-up of no ids is a step"


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_set_to_none_or_to_no_rows_as_those_of_a_sparse_embedding(set_to_none):
    (ours, our_optim), (theirs, their_optim) = twins(SparseAdam, torch.optim.SparseAdam)
    for model, optim in ((ours, our_optim), (theirs, their_optim)):
        for ids, targets in batches(2):
            (model(ids) - targets).square().mean().backward()
            optim.zero_grad(set_to_none=set_to_none)
            optim.step()
        for ids, targets in batches(2):
            (model(ids) - targets).square().mean().backward()
            optim.step()
            optim.zero_grad(set_to_none=set_to_none)
    their_steps = their_optim.state[theirs.rows.weight]["step"]
    assert our_optim.state_dict()["state"]["t"]["step"] == their_steps == (2 if set_to_none else 4)
    torch.testing.assert_close(rows_of(ours), rows_of(theirs))


def test_the_gradient_of_a_parameter_is_replaced_by_one_of_its_shape_only():
    table = HashTable(2, name="t")
    (parameter,) = SparseSGD([table]).param_groups[0]["params"]
    assert parameter.grad is None
    with pytest.raises(ValueError, match=r"'t': found shape \(1, 2\), expected none"):
        parameter.grad = torch.ones(1, 2)
    table(torch.tensor([4])).sum().backward()
    with pytest.raises(ValueError, match=r"found shape \(2, 2\), expected \(1, 2\)"):
        parameter.grad = torch.ones(2, 2)
    parameter.grad = torch.tensor([[3.0, 4.0]])
    assert table.take_gradients()[1].tolist() == [[3, 4]]
    table(torch.tensor([4])).sum().backward()
    parameter.grad = None
    assert table.take_gradients() is None
    twin, optim = copy.deepcopy((table, SparseSGD([table])))
    twin(torch.tensor([4])).sum().backward()
    optim.param_groups[0]["params"][0].grad.mul_(5)
    assert twin.take_gradients()[1].tolist() == [[5, 5]]
    assert table.take_gradients() is None


# Many ranks

START = Normal(0.0, 0.5, seed=3)


def share(tables, rank, size, step):
    """The ids of one rank for each table."""
    draw = torch.Generator().manual_seed(100 + step)
    return {name: torch.randint(0, 30, (12,), generator=draw)[rank::size] for name in tables}


def train_shared(exchange, size, make, overflow_on=None):
    """Train two tables with scaler and clipping; an overflow happens in step 1 on one rank."""
    rank = 0 if exchange is None else exchange.rank
    collection = make(exchange)
    optim = SparseAdagrad(list(collection.tables), lr=0.5)
    scaler = GradScaler("cpu", init_scale=256.0)
    seen = []
    for step in range(4):
        optim.zero_grad()
        ids = share(("a", "b"), rank, size, step)
        rows = collection(ids)
        loss = sum((rows[name].sum(1) - 3).square().mean() for name in rows)
        if step == 1 and overflow_on == rank:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optim)
        norms = [
            nn.utils.clip_grad_norm_([p for g in optim.param_groups for p in g["params"]], limit, norm_type).item()
            for limit, norm_type in ((1.0, 2.0), (0.1, math.inf))
        ]
        scaler.step(optim)
        scaler.update()
        seen.append((norms, scaler.get_scale()))
    return seen, [dict(zip(t.ids().tolist(), t.embeddings().tolist(), strict=True)) for t in collection.tables]


def make_sharded(exchange):
    tables = [ShardedHashTable(3, name=name, initializer=START, group=exchange) for name in ("a", "b")]
    return EmbeddingCollection(tables)


class Plain(nn.Module):
    """Plain tables with the interface of a collection."""

    def __init__(self, exchange):
        super().__init__()
        self.tables = nn.ModuleList(HashTable(3, name=name, initializer=START) for name in ("a", "b"))

    def forward(self, ids):
        return {table.name: table(ids[table.name]) for table in self.tables}


def test_ranks_clip_by_the_norm_of_all_their_rows_and_learn_what_one_learns():
    alone, rows = train_shared(None, 1, Plain)
    for size in (1, 2, 3):
        found = on_ranks(size, lambda exchange, size=size: train_shared(exchange, size, make_sharded))
        for seen, _ in found:
            torch.testing.assert_close(seen, alone, **OF_FLOAT32)
        for table in range(2):
            union = {id_: row for _, of_rank in found for id_, row in of_rank[table].items()}
            assert union.keys() == rows[table].keys()
            torch.testing.assert_close([union[id_] for id_ in rows[table]], list(rows[table].values()), **OF_FLOAT32)


def test_an_overflow_on_one_rank_skips_the_step_of_all_and_halves_the_scale_of_all():
    def work(exchange):
        table = ShardedHashTable(2, name="t", group=exchange)
        optim, scaler = SparseSGD([table], lr=1.0), GradScaler("cpu")
        ids = torch.arange(8)
        before = table(ids).detach()
        factors = torch.ones(8, 1)
        factors[3] = math.inf  # of a row that one rank owns
        scaler.scale((table(ids) * factors).sum()).backward()
        finite = bool(table.grad.isfinite().all())
        scaler.step(optim)
        assert torch.equal(table(ids), before)
        return finite, [scale for _, scale in train_shared(exchange, 2, make_sharded, overflow_on=1)[0]]

    finite, scales = zip(*on_ranks(2, work), strict=True)
    assert sorted(finite) == [False, True]
    assert scales == ([256, 128, 128, 128],) * 2


def test_ranks_of_which_one_clips_and_one_looks_up_raise_alike():
    def work(exchange):
        table = ShardedHashTable(2, name="t", group=exchange)
        table(torch.arange(8)).sum().backward()
        clip = lambda: nn.utils.clip_grad_norm_(SparseSGD([table]).param_groups[0]["params"], 1.0)  # noqa: E731
        look_up = lambda: table(torch.arange(8))  # noqa: E731
        act = [clip, look_up][exchange.rank]
        with pytest.raises(LookupFailedError, match="norm of the gradients of 't'"):
            act()

    on_ranks(2, work)


@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaler_is_refused_while_steps_accumulate_unless_it_is_off(unscale):
    table = HashTable(1, name="t", initializer=Constant(0.0))
    optim = SparseSGD([table], lr=1.0)

    def run(scaler, n_batches, every):
        for number in range(1, n_batches + 1):
            scaler.scale(table(torch.tensor([1])).sum()).backward()
            if number % every == 0:
                if unscale:
                    scaler.unscale_(optim)
                scaler.step(optim)
                scaler.update()
                optim.zero_grad()

    scaler = GradScaler("cpu", init_scale=1024.0)
    optim.set_grad_accum_steps(2)
    with pytest.raises(ValueError, match=r"set_grad_accum_steps\(2\).* leave it at 1.*update on each n-th"):
        run(scaler, 1, 1)
    assert table.embeddings().tolist() == [[0]]
    optim.set_grad_accum_steps(1)
    scaler.update()
    optim.zero_grad()
    run(scaler, 4, 2)
    assert table.embeddings().tolist() == [[-4]], "the loop counts"
    optim.set_grad_accum_steps(2)
    run(GradScaler("cpu", enabled=False), 4, 1)
    assert table.embeddings().tolist() == [[-8]]
