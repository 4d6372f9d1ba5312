"""The page looks at a run whose loss went wrong between steps 200 and 300: a full checkpoint, and deltas on it.

And at one whose newest checkpoint, a full one, is damaged.
"""

from pathlib import Path

import torch

from recckpt import Saver
from recckpt.sparse import HashTable, SparseAdamW

user = HashTable(4, name="user")
model = torch.nn.ModuleDict({"user": user, "new": HashTable(4, name="new"), "dense": torch.nn.Linear(4, 1)})
saver = Saver(model, SparseAdamW([user]), "runs/clicks", max_keep=None, deltas=True)
user.insert(torch.arange(1000), torch.ones(1000, 4))
for step in (100, 200, 300, 400):
    ids = torch.tensor([7, 8]) + step
    moments = torch.ones(2, 4)
    if step == 300:
        moments[0, 2] = torch.inf
        torch.nn.init.constant_(model["dense"].bias, torch.nan)
    user.insert(ids, torch.ones(2, 4), {"sparse_adamw_exp_avg": moments})
    saver.save(f"ckpt_{step}", step=step)

broken = Saver(model, SparseAdamW([user]), "runs/broken", max_keep=None, concurrency=1)
ids = torch.arange(300_000)  # of two batches and more
for value in (3, 4):
    for table in (user, model["new"]):
        table.insert(ids, torch.full((len(ids), 4), float(value)))
    torch.nn.init.constant_(model["dense"].bias, float(value))
    broken.save(f"ckpt_{value}00", step=value * 100)
part = max(Path("runs/broken/ckpt_400/sparse").glob("*.arrow"), key=lambda path: path.stat().st_size)  # of "user"
data = bytearray(part.read_bytes())
data[len(data) // 3] ^= 1
part.write_bytes(data)
