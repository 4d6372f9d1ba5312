"""A model with a table and its twin with an ``nn.Embedding`` of the same rows, which SGD trains as one model."""

from __future__ import annotations

import math

import torch
from torch import nn

from recckpt.sparse import HashTable, SparseSGD

VOCABULARY, DIM, N_BATCHES, BATCH = 30, 4, 7, 4
TABLE, DENSE = 1, 2  # whose gradients a spoilt batch lets overflow


class Twin(nn.Module):
    """Its loss is multiplied by ``gain``, so that its gradients are longer or shorter than a limit."""

    def __init__(self, rows, gain=1.0):
        super().__init__()
        self.rows, self.gain, self.top, self.shift = rows, gain, nn.Linear(DIM, 1), nn.Parameter(torch.zeros(1))
        with torch.no_grad():
            self.top.weight.copy_(torch.linspace(-1, 1, DIM))
            self.top.bias.fill_(0.25)

    def forward(self, ids, labels, spoilt):
        rows, shift = self.rows(ids), self.shift * 1
        if self.training:
            for of, gradient in ((TABLE, rows), (DENSE, shift)):
                if bool((spoilt == of).any()):
                    gradient.register_hook(lambda gradient: gradient * math.inf)
        return self.gain * (self.top(rows).squeeze(1) + shift - labels).square().mean()


def weights():
    return torch.randn(VOCABULARY, DIM, generator=torch.Generator().manual_seed(0))


def with_table(gain=1.0):
    table = HashTable(DIM, name="t")
    table.insert(torch.arange(VOCABULARY), weights())
    return Twin(table, gain)


def with_embedding(gain=1.0):
    return Twin(nn.Embedding(VOCABULARY, DIM, _weight=weights()), gain)


def optimizers(model, fused=False):
    """The optimizer of the dense parameters and that of the tables, None where all are dense."""
    table = model.rows if isinstance(model.rows, HashTable) else None
    return torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), SparseSGD(
        [table], lr=0.1
    ) if table is not None else None


def samples(spoilt=None):
    """The samples of an epoch, in order: (id, label, whose gradients overflow), of which the batch number decides."""
    draw = torch.Generator().manual_seed(7)
    n = N_BATCHES * BATCH
    ids, labels = torch.randint(0, VOCABULARY, (n,), generator=draw), torch.randn(n, generator=draw) * 3
    spoils = torch.tensor([(spoilt or {}).get(number // BATCH, 0) for number in range(n)])
    return ids, labels, spoils


def batches(spoilt=None):
    return list(zip(*(column.split(BATCH) for column in samples(spoilt)), strict=True))


def trained(model):
    """All that was trained, by name; the rows as one matrix."""
    rows = model.rows
    matrix = rows.weight.detach() if isinstance(rows, nn.Embedding) else rows.lookup(torch.arange(VOCABULARY))[0]
    return {"rows": matrix, **{name: p.detach() for name, p in model.named_parameters() if not name.startswith("rows")}}


def assert_equal(ours, theirs, atol=1e-6):
    for name, value in trained(theirs).items():
        torch.testing.assert_close(
            trained(ours)[name], value, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert not torch.equal(trained(ours)["rows"], weights()), "no row has moved"
