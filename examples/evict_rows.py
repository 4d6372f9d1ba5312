"""Learn which item follows in a shop session as the events come, and let rows go: quality and size, on OTTO sessions.

python examples/evict_rows.py train.jsonl.gz

Beside a table that keeps every item, one drops those not seen for a while, which costs next to nothing, and one holds
less than training goes on asking for, which costs quality: items come back, and start anew.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from train_sessions import DIM, N_NEGATIVES, loss_of, read

from recckpt.policies import Capacity, Unseen
from recckpt.sparse import HashTable, Normal, SparseAdamW

BATCH, EPOCHS = 16, 3
KINDS: dict[str, dict[str, Any]] = {
    "keeps all": {},
    "Unseen(steps=15)": {"evict": Unseen(steps=15), "evict_every": 5},
    "Capacity(450)": {"evict": Capacity(450, room=0.25), "evict_every": 5},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sessions", help="a file of the OTTO dataset, such as train.jsonl or train.jsonl.gz")
    args = parser.parse_args()
    before, after = read(args.sessions)
    print(f"{len(after):,} events, {EPOCHS} times; by chance the loss is {torch.tensor(N_NEGATIVES + 1.0).log():.2f}")
    for kind, options in KINDS.items():
        loss, table, most = train(before, after, **options)
        print(
            f"{kind:16}  loss {loss:.3f}  at most {most:,} rows, {len(table):,} in the end, {table.n_evicted:,} evicted"
        )


def train(before: torch.Tensor, after: torch.Tensor, **options: Any) -> tuple[float, HashTable, int]:
    """Return the mean loss of the second half of the events, the table, and the most rows that it had."""
    table = HashTable(DIM, name="item", initializer=Normal(std=0.3), track=("count", "step"), **options)
    optimizer = SparseAdamW([table], lr=0.02)
    losses, most = [], 0
    for step in range(EPOCHS * len(after) // BATCH):
        draw = torch.Generator().manual_seed(step)
        at = torch.arange(step * BATCH, (step + 1) * BATCH) % len(after)
        others = after[torch.randint(len(after), (BATCH, N_NEGATIVES), generator=draw)]
        table.step = step
        loss = loss_of(table, before[at], after[at], others)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        optimizer.step()
        losses.append(loss.item())
        most = max(most, len(table))
    seen = losses[len(losses) // 2 :]
    return sum(seen) / len(seen), table, most


if __name__ == "__main__":
    main()
