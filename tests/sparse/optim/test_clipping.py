"""Gradients of a model and of its tables are clipped by one norm, in one line, or not at all."""

from __future__ import annotations

import pytest
import torch
from support import twins
from support.rooms import on_ranks
from torch import nn
from torch.amp import GradScaler

from recckpt.sparse import HashTable, JointOptimizer, ShardedHashTable, SparseAdam, SparseSGD, clip_grad_norm_


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
    with pytest.raises(ValueError, match=r"the tables \['t'\] of the model have gradients.*give the sparse optimizer"):
        clip_grad_norm_(twin, dense, 1e-3)
    assert torch.equal(twin.shift.grad, before)


def test_clipping_a_sum_that_is_not_complete_is_refused():
    twin = twins.with_table()
    _, sparse = twins.optimizers(twin)
    sparse.set_grad_accum_steps(2)
    twin(*twins.batches()[0]).backward()
    with pytest.raises(ValueError, match="clip before the call of step"):
        clip_grad_norm_(twin, sparse, 1.0)
    sparse.step()
    assert clip_grad_norm_(twin, sparse, 1.0) > 0


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
