"""Train a click model whose features have several values, on the Open Bandit Dataset, and resume it when run again.

python examples/train_bandit.py random_women.csv.gz --steps 200     # of obd/random/women in zr-obp
python examples/train_bandit.py random_women.csv.gz --steps 400     # goes on at step 200

A user is a bag of hashed attributes; the items that the user likes are a bag with weights, whose rows are those of the
items shown. About one impression in 200 was clicked, so a click counts as much as all that were not.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
import torch
from pyarrow import csv
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from recckpt import CheckpointManager
from recckpt.sparse import HashTable, Normal, SparseAdamW, hash_ids

DIM, BATCH = 8, 256
LIKED, ATTRIBUTE = "user-item_affinity_", "user_feature_"


@dataclass(frozen=True)
class Impressions:
    """What was shown to whom, and whether it was clicked."""

    item: Tensor  # int64, shape (n,)
    attributes: Tensor  # int64, shape (n, attributes)
    liking: Tensor  # float32, shape (n, items): how often the user has clicked each item
    clicked: Tensor  # float32, shape (n,)

    def __getitem__(self, chosen: Tensor) -> Impressions:
        return Impressions(self.item[chosen], self.attributes[chosen], self.liking[chosen], self.clicked[chosen])

    def __len__(self) -> int:
        return len(self.item)


def read(path: str) -> Impressions:
    """Read a file of the dataset; the name of an attribute is part of its id."""
    table = csv.read_csv(path)
    attributes = [name for name in table.column_names if name.startswith(ATTRIBUTE)]
    liked = [name for name in table.column_names if name.startswith(LIKED)]
    ids = [hash_ids([f"{name}={value}" for value in table[name].to_pylist()]) for name in attributes]
    return Impressions(
        item=torch.from_numpy(table["item_id"].to_numpy().astype(np.int64)),
        attributes=torch.from_numpy(np.stack(ids, axis=1)),
        liking=torch.from_numpy(np.stack([table[name].to_numpy() for name in liked], axis=1).astype(np.float32)),
        clicked=torch.from_numpy(table["click"].to_numpy().astype(np.float32)),
    )


class ClickModel(nn.Module):
    """Scores an item by the pooled rows of who sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.item = HashTable(DIM, name="item", initializer=Normal(std=0.1))
        self.attribute = HashTable(DIM, name="attribute", initializer=Normal(std=0.1))
        self.top = nn.Sequential(nn.Linear(3 * DIM, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, shown: Impressions) -> Tensor:
        """Return the logits of a click."""
        rows, items = shown.liking.nonzero(as_tuple=True)
        lengths = torch.bincount(rows, minlength=len(shown))  # of many users none is known: an empty bag is zeros
        liked = self.item.bag(items, lengths=lengths, weights=shown.liking[rows, items])
        user = self.attribute.bag(shown.attributes, mode="mean")
        logits: Tensor = self.top(torch.cat([self.item(shown.item), user, liked], dim=1)).squeeze(1)
        return logits


def train(impressions: Impressions, steps: int, output_dir: str) -> None:
    """Train up to ``steps`` in all; what a step sees follows from its number, so that a resumed run sees the same."""
    torch.manual_seed(0)
    model = ClickModel()
    sparse = SparseAdamW([model.item, model.attribute], lr=0.01)
    dense = torch.optim.Adam(model.parameters(), lr=0.001)
    manager = CheckpointManager.attach(model, [sparse, dense], output_dir=output_dir, save_interval=50)
    start = manager.restore()
    print(f"resuming at step {start}" if start else f"starting, with {len(impressions):,} impressions", flush=True)
    weight = (len(impressions) - impressions.clicked.sum()) / impressions.clicked.sum()
    while manager.global_step < steps:
        draw = torch.Generator().manual_seed(manager.global_step)
        batch = impressions[torch.randint(len(impressions), (BATCH,), generator=draw)]
        loss = binary_cross_entropy_with_logits(model(batch), batch.clicked, pos_weight=weight)
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        sparse.step()
        dense.step()
        manager.step()
    manager.save()
    print(f"done at step {manager.global_step}: {len(model.item)} items, {len(model.attribute)} attributes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="random_women.csv[.gz], or another log of the dataset")
    parser.add_argument("--steps", type=int, default=200, help="train up to this step")
    parser.add_argument("--output-dir", default="demo_output/train_bandit", help="path or URL of the checkpoints")
    args = parser.parse_args()
    train(read(args.data), args.steps, args.output_dir)


if __name__ == "__main__":
    main()
