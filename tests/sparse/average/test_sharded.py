"""Averages of tables that lie on many ranks: each rank averages what it owns, and look-ups are of all."""

import torch
from support.rooms import on_ranks
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from recckpt.sparse import HashTable, RowAverage, ShardedHashTable, SparseSGD

EVERY = torch.arange(40)


class Clicks(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table, self.scale = table, nn.Parameter(torch.ones(1))

    def forward(self, ids):
        return self.table(ids) * self.scale.detach()


def trained(model, ranks, steps=12):
    """Train on the batches of some ranks; return the average of torch, and the one beside the model."""
    optimizer = SparseSGD([model.table], lr=0.3)
    averaged, beside = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8)), RowAverage(model, 0.8)
    for step in range(steps):
        seeds = [torch.Generator().manual_seed(10 * step + rank) for rank in ranks]
        ids = [torch.randint(0, 10 + 2 * step, (6,), generator=seed) for seed in seeds]
        model(torch.cat(ids)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
        beside.update()
    return averaged, beside


def test_two_ranks_average_the_rows_that_one_does():
    one, beside_one = trained(Clicks(HashTable(3, name="t")), [0, 1])
    expected, seen = one.module.table.lookup(EVERY)
    expected_beside = beside_one.tables["t"].lookup(EVERY)[0]

    def work(exchange):
        model = Clicks(ShardedHashTable(3, name="t", group=exchange, gradients="sum"))
        averaged, beside = trained(model, [exchange.rank])
        averaged.train()
        with beside.swap():
            shown = model.table(EVERY).detach()
        own = averaged.module.table.ids()
        assert sorted(own.tolist()) == sorted(model.table.ids().tolist())
        return averaged.module.table(EVERY).detach(), shown, own.tolist()

    results = on_ranks(2, work)
    for rows, shown, own in results:
        assert (rows[seen] - expected[seen]).abs().max() < 1e-6
        assert (shown[seen] - expected_beside[seen]).abs().max() < 1e-6
        assert not rows[~seen].any()
        assert own
    assert sorted(results[0][2] + results[1][2]) == EVERY[seen].tolist()
