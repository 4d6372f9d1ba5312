"""Train with compiled modules in a fresh process, for test_tracing.py: ``compiled_run.py BACKEND CASE``."""

import sys

import torch
from torch import nn

from recckpt.sparse import EmbeddingCollection, HashTable, Normal, ShardedHashTable, SparseAdam

START = Normal(0.0, 0.1)
IDS = [torch.tensor([[1, 2, 2], [3, 9, 1]]), torch.tensor([[4, 2, 8]]), torch.tensor([[1, 1, 5], [7, 7, 7]])]


class Plain(nn.Module):
    def __init__(self, make=HashTable):
        super().__init__()
        self.user, self.item = (make(4, name=name, initializer=START) for name in ("user", "item"))
        self.top = nn.Linear(4, 1)
        nn.init.constant_(self.top.weight, 0.5)
        nn.init.constant_(self.top.bias, 0.1)

    def forward(self, ids):
        return self.top(torch.tanh(self.user(ids) * self.item(ids + 1)).sum(1)).squeeze(1)


class Collected(Plain):
    def __init__(self):
        super().__init__(ShardedHashTable)
        self.tables = EmbeddingCollection([self.user, self.item])

    def forward(self, ids):
        rows = self.tables({"user": ids, "item": ids + 1})
        return self.top(torch.tanh(rows["user"] * rows["item"]).sum(1)).squeeze(1)


CASES = {"table": Plain, "sharded": lambda: Plain(ShardedHashTable), "collection": Collected}


def train(model, compiled):
    """Train for some steps, then look up in eval mode; return all that came of it."""
    rows = SparseAdam([model.user, model.item], lr=0.1)
    dense = torch.optim.SGD(model.top.parameters(), lr=0.1)

    def step(ids):
        rows.zero_grad()
        dense.zero_grad()
        loss = (compiled["model"](ids) - 1).square().mean()
        loss.backward()
        rows.step()
        dense.step()
        return loss

    losses = [compiled["step"](step)(ids).item() for ids in IDS]
    model.eval()
    with torch.no_grad():
        seen = compiled["model"](torch.tensor([[1, 77, 2]])).tolist()
    return (
        losses,
        seen,
        len(model.user),
        model.user.embeddings().tolist(),
        model.user.slots["sparse_adam_exp_avg"].tolist(),
    )


def as_it_is(function):
    return function


def main(backend, case):
    compiled = CASES[case]()
    found = train(compiled, {"model": torch.compile(compiled, backend=backend), "step": as_it_is})
    whole = CASES[case]()
    found_whole = train(whole, {"model": whole, "step": torch.compile(backend=backend)})
    plain = CASES[case]()
    expected = train(plain, {"model": plain, "step": as_it_is})
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_whole, expected)


if __name__ == "__main__":
    main(*sys.argv[1:])
