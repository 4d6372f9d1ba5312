"""Averages of tables that lie on many ranks: each rank averages what it owns, and look-ups are of all."""

import torch
from support.rooms import on_ranks
from torch import nn

from recckpt.averages import RowAverage
from recckpt.sparse import HashTable, ShardedHashTable, SparseSGD

EVERY = torch.arange(40)


class Clicks(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table, self.scale = table, nn.Parameter(torch.ones(1))

    def forward(self, ids):
        return self.table(ids) * self.scale.detach()


def trained(model, ranks, steps=12):
    """Train on the batches of some ranks; return the average."""
    optimizer, average = SparseSGD([model.table], lr=0.3), RowAverage(model, 0.8)
    for step in range(steps):
        seeds = [torch.Generator().manual_seed(10 * step + rank) for rank in ranks]
        ids = [torch.randint(0, 10 + 2 * step, (6,), generator=seed) for seed in seeds]
        model(torch.cat(ids)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
    return average


def test_two_ranks_average_the_rows_that_one_does():
    expected, seen = trained(Clicks(HashTable(3, name="t")), [0, 1]).tables["t"].lookup(EVERY)

    def work(exchange):
        model = Clicks(ShardedHashTable(3, name="t", group=exchange, gradients="sum"))
        average = trained(model, [exchange.rank])
        own = average.tables["t"].ids()
        assert sorted(own.tolist()) == sorted(model.table.ids().tolist())
        with average.swap():
            assert model.table.training
            return model.table(EVERY).detach(), own.tolist()

    results = on_ranks(2, work)
    for shown, own in results:
        assert (shown[seen] - expected[seen]).abs().max() < 1e-6
        assert not shown[~seen].any()
        assert own
    assert sorted(results[0][1] + results[1][1]) == EVERY[seen].tolist()
