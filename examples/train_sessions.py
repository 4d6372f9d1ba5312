"""Learn which item follows in a shop session, against sampled negatives, on the OTTO dataset; resumes when run again.

python examples/train_sessions.py train.jsonl.gz --steps 300
recckpt export demo_output/train_sessions demo_output/items --to npy --table item
python examples/similar_items.py demo_output/items item 1517085

A session is the mean of the items before, its bag; the item that came next is to score above others that are drawn as
often as they occur in the log.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from recckpt import CheckpointManager, Saver
from recckpt.sparse import HashTable, Normal, SparseAdamW

DIM, BATCH, N_NEGATIVES, N_BEFORE = 16, 128, 20, 5
NO_ITEM = -1


def read(path: str) -> tuple[Tensor, Tensor]:
    """Return the items before each event of a session, padded by NO_ITEM, and the item of the event."""
    data = Path(path).read_bytes()
    before, after = [], []
    for line in (gzip.decompress(data) if path.endswith(".gz") else data).splitlines():
        items = [event["aid"] for event in json.loads(line)["events"]]
        for n in range(1, len(items)):
            seen = items[max(0, n - N_BEFORE) : n]
            before.append(seen + [NO_ITEM] * (N_BEFORE - len(seen)))
            after.append(items[n])
    return torch.tensor(before), torch.tensor(after)


def loss_of(table: HashTable, before: Tensor, after: Tensor, others: Tensor) -> Tensor:
    """Return the sampled softmax loss of the items that came next, beside others."""
    sessions = table.bag(before, mode="mean", padding_id=NO_ITEM)
    rows = table(torch.cat([after[:, None], others], dim=1))  # (batch, 1 + negatives, dim)
    scores = (rows @ sessions[:, :, None]).squeeze(2)
    scores[:, 1:].masked_fill_(others == after[:, None], -torch.inf)  # what came next is no negative
    return cross_entropy(scores, torch.zeros(len(after), dtype=torch.int64))


def train(before: Tensor, after: Tensor, steps: int, output_dir: str) -> None:
    """Train up to ``steps`` in all; what a step draws follows from its number, so that a resumed run draws the same."""
    table = HashTable(DIM, name="item", initializer=Normal(std=0.3))
    optimizer = SparseAdamW([table], lr=0.02)
    model = torch.nn.ModuleDict({"item": table})
    manager = CheckpointManager(Saver(model, optimizer, output_dir, max_keep=2), save_interval=100)
    start = manager.restore()
    print(f"resuming at step {start}" if start else f"starting, with {len(after):,} events", flush=True)
    while manager.global_step < steps:
        draw = torch.Generator().manual_seed(manager.global_step)
        chosen = torch.randint(len(after), (BATCH,), generator=draw)
        others = after[torch.randint(len(after), (BATCH, N_NEGATIVES), generator=draw)]
        loss = loss_of(table, before[chosen], after[chosen], others)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        optimizer.step()
        manager.step()
        if manager.global_step % 100 == 0:
            print(f"step {manager.global_step}  loss {loss.item():.4f}", flush=True)
    manager.save()
    print(f"done at step {manager.global_step}: {len(table)} items")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="train.jsonl[.gz]")
    parser.add_argument("--steps", type=int, default=300, help="train up to this step")
    parser.add_argument("--output-dir", default="demo_output/train_sessions", help="path or URL of the checkpoints")
    args = parser.parse_args()
    train(*read(args.data), args.steps, args.output_dir)


if __name__ == "__main__":
    main()
