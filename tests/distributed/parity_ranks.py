"""A run of some ranks for test_training_parity.py: run it as ``parity_ranks.py ROOT STEPS SIZE...``."""

import sys
from functools import partial
from pathlib import Path

import torch
from support.rank_processes import fork_ranks
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from recckpt.sparse import EmbeddingCollection, Normal, ShardedHashTable, SparseAdagrad, SparseAdamW

BATCH = 64  # of all ranks together
TASTE = torch.randn(3, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """Two tables of one shape and one of another, and layers above them."""

    def __init__(self):
        super().__init__()
        start = Normal(std=0.1)
        self.rows = EmbeddingCollection(
            ShardedHashTable(dim, name=name, initializer=start) for name, dim in (("user", 8), ("item", 8), ("hour", 4))
        )
        self.top = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, ids):
        rows = self.rows({"user": ids[:, 0], "item": ids[:, 1], "hour": ids[:, 2]})
        return self.top(torch.cat([*rows.values()], 1)).squeeze(1)


def clicks(step):
    """Return the ids and labels of a step: few ids make most of it, and ids go on coming that are new."""
    draw = torch.Generator().manual_seed(step)
    ids = (torch.rand(BATCH, 3, generator=draw) ** 4 * torch.tensor([200.0 + step, 400.0 + step, 24.0])).long()
    ids = ids * 0x9E3779B97F4A7C15 % 2**62  # as a hash function would give them
    return ids, (torch.sin(ids.double()).float() @ TASTE > 0).float()


def train(rank, size, root, *, n_steps):
    """Train on this rank's share of every batch, and return all that decides how the run goes on."""
    torch.manual_seed(0)
    model = Model()
    call = nn.parallel.DistributedDataParallel(model) if size > 1 else model
    user, item, hour = model.rows.tables
    sparse = [SparseAdamW([user, item], lr=0.01), SparseAdagrad([hour], lr=0.05)]
    optimizers = [*sparse, torch.optim.Adam(model.top.parameters(), lr=0.002)]
    losses = []
    for step in range(n_steps):
        ids, labels = (part[rank::size] for part in clicks(step))
        loss = binary_cross_entropy_with_logits(call(ids), labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    tables = {}
    for table in model.rows.tables:
        assert bool(table.slice.owns(table.ids()).all())
        tables[table.name] = {"id": table.ids(), "embedding": table.embeddings(), **table.slots}
    return {
        "losses": torch.tensor(losses, dtype=torch.float64),
        "tables": tables,
        "steps": [optimizer.state_dict()["state"] for optimizer in sparse],
        "dense": {name: value.detach() for name, value in model.top.state_dict().items()},
        "moments": [tensor for state in optimizers[-1].state.values() for tensor in state.values()],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for size in map(int, sys.argv[3:]):
        fork_ranks(size, Path(sys.argv[1]), partial(train, n_steps=int(sys.argv[2])))
