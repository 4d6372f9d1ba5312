"""Optimizers made of several, and one norm for all: a table is scaled, clipped and stepped as an ``nn.Embedding``."""

from __future__ import annotations

import copy

import pytest
import torch
from support import twins
from support.rooms import on_ranks
from torch import nn
from torch.amp import GradScaler

from recckpt.sparse import HashTable, JointOptimizer, ShardedHashTable, SparseAdam, SparseSGD, clip_grad_norm_
from recckpt.sparse.optim.joint import share_overflow


def train(twin, *, limit=None, norm_type=2.0, scale=None, spoilt=None, every=1, by=JointOptimizer):
    """Train as the documentation says, with one optimizer, and return the norms and scales."""
    optim = by(*(optimizer for optimizer in twins.optimizers(twin) if optimizer is not None))
    scaler = GradScaler("cpu", init_scale=scale or 1.0, growth_interval=2, enabled=scale is not None)
    seen = []
    for number, batch in enumerate(twins.batches(spoilt), 1):
        scaler.scale(twin(*batch)).backward()
        if number % every == 0:
            scaler.unscale_(optim)
            norm = None if limit is None else clip_grad_norm_(twin, optim, limit, norm_type).item()
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
            seen.append((norm, scaler.get_scale()))
    return seen


CASES = {
    "clipped": {"limit": 1.0},
    "clipped by the greatest": {"limit": 0.1, "norm_type": float("inf")},
    "not clipped, and measured": {"limit": float("inf")},
    "accumulated": {"every": 2},
    "scaled": {"scale": 256.0, "limit": 1.0},
    "the table overflows": {"scale": 256.0, "spoilt": {1: twins.TABLE}},
    "the dense part overflows": {"scale": 256.0, "spoilt": {1: twins.DENSE}},
    "all": {"scale": 2.0**16, "spoilt": {1: twins.TABLE, 4: twins.DENSE}, "limit": 1.0, "every": 2},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_table_learns_what_an_embedding_does(case):
    ours, theirs = twins.with_table(), twins.with_embedding()
    torch.testing.assert_close(train(ours, **case), train(theirs, **case), rtol=1e-5, atol=1e-5, equal_nan=True)
    twins.assert_equal(ours, theirs)


class Fused(torch.optim.Adam):
    """Of two optimizers the fused one would unscale by itself, and only its own half."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr, fused=True)


def test_a_fused_optimizer_skips_the_step_that_an_overflow_of_the_table_skips():
    twin = twins.with_table()
    table, dense = twin.rows, Fused(twin.parameters(), lr=0.1)
    assert dense._step_supports_amp_scaling
    optim, scaler = JointOptimizer(dense, SparseSGD([table], lr=0.1)), GradScaler("cpu", init_scale=256.0)
    before = {name: value.clone() for name, value in twins.trained(twin).items()}
    for number, batch in enumerate(twins.batches({0: twins.TABLE})[:2]):
        scaler.scale(twin(*batch)).backward()
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
        moved = {name for name, value in twins.trained(twin).items() if not torch.equal(value, before[name])}
        assert moved == (set(before) if number else set())
    assert scaler.get_scale() == 128


@pytest.mark.parametrize("spoilt", [twins.TABLE, twins.DENSE])
@pytest.mark.parametrize("unscaled", [(), (0,), (0, 1)])
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_that_is_shared_skips_the_steps_of_all_and_halves_the_scale_once(spoilt, unscaled, fused):
    twin = twins.with_table()
    dense, sparse = twins.optimizers(twin)
    optimizers = (Fused(twin.parameters(), lr=0.1) if fused else dense), sparse
    scaler = GradScaler("cpu", init_scale=256.0)
    before = {name: value.clone() for name, value in twins.trained(twin).items()}
    scaler.scale(twin(*twins.batches({0: spoilt})[0])).backward()
    for number in unscaled:
        scaler.unscale_(optimizers[number])
    share_overflow(scaler, *optimizers)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(value, before[name]) for name, value in twins.trained(twin).items())
    assert scaler.get_scale() == 128


def test_an_overflow_is_shared_by_a_table_without_gradients():
    twin = twins.with_table()
    dense, sparse = twins.optimizers(twin)
    scaler = GradScaler("cpu", init_scale=256.0)
    scaler.scale(twin.shift.sum()).backward()
    share_overflow(scaler, dense, sparse)
    scaler.step(dense)
    scaler.step(sparse)
    assert twin.shift.item() == pytest.approx(-0.1)


def test_its_closure_is_called_once_and_a_schedule_over_it_sets_the_rates_of_all():
    twin = twins.with_table()
    optim, calls = JointOptimizer(*twins.optimizers(twin)), []
    schedule = torch.optim.lr_scheduler.StepLR(optim, 1, 0.5)

    def closure():
        calls.append(1)
        optim.zero_grad()
        loss = twin(*twins.batches()[0])
        loss.backward()
        return loss

    before = twins.trained(twin)["rows"].clone()
    assert optim.step(closure).item() > 0
    assert len(calls) == 1
    assert not torch.equal(twins.trained(twin)["rows"], before)
    schedule.step()
    assert [group["lr"] for part in optim.optimizers for group in part.param_groups] == [0.05, 0.05]


def test_its_state_is_that_of_its_optimizers_and_is_copied_with_the_model():
    def make():
        twin = twins.with_table()
        return twin, JointOptimizer(torch.optim.Adam(twin.parameters()), SparseAdam([twin.rows]))

    twin, optim = make()
    for batch in twins.batches():
        twin(*batch).backward()
        optim.step()
        optim.zero_grad()
    _, other = make()
    other.load_state_dict(optim.state_dict())
    assert other.optimizers[1].state_dict() == optim.optimizers[1].state_dict()
    assert len(optim.state) == len([p for p in twin.parameters() if p.numel()]) + 1
    twin_copy, optim_copy = copy.deepcopy((twin, optim))
    twin_copy(*twins.batches()[0]).backward()
    before = twins.trained(twin)["rows"].clone()
    optim_copy.step()
    assert torch.equal(twins.trained(twin)["rows"], before)
    assert not torch.equal(twins.trained(twin_copy)["rows"], before)


def test_what_cannot_step_together_is_refused():
    twin = twins.with_table()
    dense, sparse = twins.optimizers(twin)
    for error, message, call in (
        (ValueError, "needs optimizers, found none", JointOptimizer),
        (TypeError, "found a Linear", lambda: JointOptimizer(dense, twin.top)),
        (
            ValueError,
            "SGD has a parameter or table of another",
            lambda: JointOptimizer(dense, torch.optim.SGD([twin.shift])),
        ),
        (
            ValueError,
            "SparseSGD has a parameter or table of another",
            lambda: JointOptimizer(dense, sparse, SparseSGD([twin.rows])),
        ),
        (
            TypeError,
            "add the group to one of its optimizers",
            lambda: JointOptimizer(dense).add_param_group({"params": []}),
        ),
    ):
        with pytest.raises(error, match=message):
            call()


def test_tables_that_count_steps_by_themselves_are_refused_though_set_later_and_not_clipped_half_way():
    twin = twins.with_table()
    dense, sparse = twins.optimizers(twin)
    optim = JointOptimizer(dense, sparse)
    sparse.set_grad_accum_steps(2)
    with pytest.raises(ValueError, match=r"set_grad_accum_steps\(2\) of SparseSGD"):
        JointOptimizer(dense, sparse)
    twin(*twins.batches()[0]).backward()
    before = twin.shift.clone()
    with pytest.raises(ValueError, match=r"set_grad_accum_steps\(2\) of SparseSGD"):
        optim.step()
    assert torch.equal(twin.shift, before)
    with pytest.raises(ValueError, match="clip only before the call of step"):
        clip_grad_norm_(twin, sparse, 1.0)
    sparse.step()
    assert clip_grad_norm_(twin, sparse, 1.0) > 0


def test_an_overflow_in_the_rows_of_one_rank_skips_the_dense_step_of_all():
    def work(exchange):
        table, top = ShardedHashTable(2, name="t", group=exchange), nn.Linear(1, 1, bias=False)
        optim = JointOptimizer(torch.optim.SGD(top.parameters()), SparseSGD([table]))
        scaler, before = GradScaler("cpu", init_scale=256.0), top.weight.clone()
        factor = torch.tensor([float("inf") if exchange.rank == 1 else 1.0])
        scaler.scale((table(torch.tensor([3])) * factor).sum() + top(torch.ones(1, 1)).sum()).backward()
        scaler.step(optim)
        scaler.update()
        return torch.equal(top.weight, before), scaler.get_scale()

    assert on_ranks(2, work) == [(True, 128.0)] * 2


def test_separate_optimizers_are_clipped_by_one_norm():
    ours, theirs = twins.with_table(), twins.with_embedding()
    for twin in (ours, theirs):
        optimizers = [optimizer for optimizer in twins.optimizers(twin) if optimizer is not None]
        for batch in twins.batches():
            twin(*batch).backward()
            clip_grad_norm_(twin, optimizers, 0.5)
            for optimizer in optimizers:
                optimizer.step(), optimizer.zero_grad()
    twins.assert_equal(ours, theirs)


def test_several_tables_and_groups_are_clipped_by_one_norm():
    first, second, third = (HashTable(1, name=name) for name in "abc")
    model = nn.ModuleList([first, second, third, nn.Linear(1, 1)])
    one, other = SparseSGD([{"tables": [first]}, {"tables": [second], "lr": 0.5}]), SparseAdam([third])
    for factor, table in ((1.0, first), (2.0, second), (4.0, third)):
        (table(torch.tensor([1, 2])) * factor).sum().backward()
    model[3](torch.ones(1, 1)).sum().backward()
    assert clip_grad_norm_(model, [one, other], 1.0).item() == pytest.approx((2 * (1 + 4 + 16) + 2) ** 0.5)
    assert clip_grad_norm_(model, [one, other], float("inf")).item() == pytest.approx(1.0)


def test_a_table_without_its_optimizer_is_refused_before_anything_is_clipped():
    twin = twins.with_table()
    dense, _ = twins.optimizers(twin)
    clip_grad_norm_(twin, dense, 1.0)  # it has no gradients yet
    twin(*twins.batches()[0]).backward()
    before = twin.shift.grad.clone()
    with pytest.raises(ValueError, match=r"the tables \['t'\] of the model have gradients.*pass their sparse"):
        clip_grad_norm_(twin, dense, 1e-3)
    assert torch.equal(twin.shift.grad, before)


def test_ranks_clip_a_sharded_table_and_dense_parameters_by_one_norm():
    def work(exchange):
        table, top = ShardedHashTable(2, name="t", group=exchange), nn.Linear(1, 1, bias=False)
        model = nn.ModuleList([table, top])
        optim = JointOptimizer(torch.optim.SGD(top.parameters()), SparseSGD([table]))
        scaler = GradScaler("cpu", init_scale=256.0)
        scaler.scale(table(torch.arange(8)).sum() + top(torch.ones(1, 1)).sum()).backward()
        scaler.unscale_(optim)
        return clip_grad_norm_(model, optim, 1.0).item()

    expected = (8 * 2 + 1) ** 0.5  # 8 ids on both ranks, of which the mean of the gradients is 1 in each of 2 columns
    assert on_ranks(2, work) == pytest.approx([expected] * 2)
