"""FSDP2 on any number of ranks: live tables, dense state, moments and the place in the data go over to each.

torchrun --standalone --nproc-per-node 2 examples/train_fsdp.py --steps 60
torchrun --standalone --nproc-per-node 3 examples/train_fsdp.py --steps 120    # goes on at step 60
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from recckpt import CheckpointManager
from recckpt.positions import ElasticLoader

USERS, DIM, CLICKS = 20_000, 16, 6_000


class Clicks(nn.Module):
    """The chance of a click, by an embedding of the user and an item's features."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.top = (
            nn.Embedding(USERS, DIM),
            nn.Sequential(nn.Linear(DIM + 4, 32), nn.ReLU(), nn.Linear(32, 1)),
        )

    def forward(self, users: Tensor, features: Tensor) -> Tensor:
        """Return logits, of shape (clicks, 1)."""
        logits: Tensor = self.top(torch.cat([self.user(users), features], -1))
        return logits


def clicks() -> TensorDataset:
    """Return generated clicks, the same on all ranks: users, features, and which of them clicked."""
    draw = torch.Generator().manual_seed(0)
    features = torch.rand(CLICKS, 4, generator=draw)
    users = torch.randint(USERS, (CLICKS,), generator=draw)
    return TensorDataset(users, features, (features.sum(-1, keepdim=True) > 2).float())


def train(steps: int, output_dir: str) -> None:
    """Train up to ``steps`` in all, and save at the end."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = Clicks().to(device)
    fully_shard(model.user)
    fully_shard(model)  # before the optimizer is made, whose moments lie as the parameters do
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = ElasticLoader(
        clicks(),
        batch_size=64,
        drop_last=True,  # FSDP2 needs all ranks at each step
        loader=lambda data, batches: DataLoader(data, batch_sampler=batches, num_workers=1),
    )
    with CheckpointManager.attach(model, optimizer, loader=loader, output_dir=output_dir, save_interval=20) as manager:
        manager.restore()
        say(f"{dist.get_world_size()} ranks, resuming at step {manager.global_step}, epoch {loader.epoch}")
        while manager.global_step < steps:
            for batch in loader:
                users, features, wanted = (values.to(device) for values in batch)
                loss = nn.functional.binary_cross_entropy_with_logits(model(users, features), wanted)
                loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
                optimizer.step()
                optimizer.zero_grad()
                manager.step()
                if manager.global_step % 20 == 0:
                    say(f"step {manager.global_step}  epoch {loader.epoch}  loss {loss.item():.4f}")
                if manager.global_step == steps:
                    break


def say(text: str) -> None:
    """Print a line, once for all ranks."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output-dir", default="runs/fsdp")
    args = parser.parse_args()
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        train(args.steps, args.output_dir)
    finally:
        dist.destroy_process_group()
