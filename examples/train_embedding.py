"""Train a model of plain nn.Embedding, saved as live tables: deltas in the background; resumes when it is run again.

python examples/train_embedding.py --steps 1000                        # from the start
python examples/train_embedding.py --steps 3000 --crash-at 2550        # dies between two saves
python examples/train_embedding.py --steps 3000                        # goes on at step 2500
python examples/train_embedding.py --ratings ratings.csv.gz --output-dir runs/movies

Two towers: the score of a click is the product of the rows of its user and its item. Nothing of the model is
recckpt's; one call finds its tables, and saves them in the background.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
from itertools import islice

import torch
from click_log import ClickLog, generated_clicks, read_ratings
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from recckpt import CheckpointManager, Deltas

N_ROWS, DIM = 20_000, 16  # ids share rows where there are more
PRINT_EVERY = 100


class TwoTowers(nn.Module):
    """Users and items as rows of plain embeddings, and a dense layer over each."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = (nn.Embedding(N_ROWS, DIM, sparse=True) for _ in range(2))
        self.of_user, self.of_item = (nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of a click, shape (batch,), for ids of shape (batch, features), user and item first."""
        users, items = self.user(ids[:, 0] % N_ROWS), self.item(ids[:, 1] % N_ROWS)
        scores: Tensor = (self.of_user(users) * self.of_item(items)).sum(1)
        return scores


class Run:
    """A model, its two optimizers, its data, and the manager that checkpoints all of them."""

    def __init__(self, clicks: ClickLog, output_dir: str, save_interval: int) -> None:
        torch.manual_seed(0)
        self.model = TwoTowers()
        self.row_optim = torch.optim.SparseAdam([self.model.user.weight, self.model.item.weight], lr=0.01)
        self.dense_optim = torch.optim.Adam([*self.model.of_user.parameters(), *self.model.of_item.parameters()])
        self.clicks = clicks
        self.manager = CheckpointManager.attach(
            self.model,
            [self.row_optim, self.dense_optim],
            loader=clicks,
            output_dir=output_dir,
            save_interval=save_interval,
            deltas=Deltas(max_dirty=0.9),
        )

    def train(self, steps: int, crash_at: int | None) -> None:
        """Train up to ``steps`` in all, and save at the end."""
        for ids, labels in islice(self.clicks, max(0, steps - self.manager.global_step)):
            loss = binary_cross_entropy_with_logits(self.model(ids), labels)
            loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
            for optimizer in (self.row_optim, self.dense_optim):
                optimizer.step()  # type: ignore[no-untyped-call]  # SparseAdam's has no types
                optimizer.zero_grad()
            self.manager.step()
            step = self.manager.global_step
            if step % PRINT_EVERY == 0 or step == steps:
                print(f"step {step}  loss {loss.item():.4f}", flush=True)
            if step == crash_at:
                self.manager.saver.settle()  # so that the example always dies behind the same checkpoint
                os.kill(os.getpid(), signal.SIGKILL)
        self.manager.save()
        self.manager.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratings", help="ratings.csv[.gz] of MovieLens; without it clicks are made up")
    parser.add_argument("--steps", type=int, default=1000, help="train up to this step")
    parser.add_argument("--save-interval", type=int, default=500, help="steps between saves")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--crash-at", type=int, help="die at this step, as by a power cut")
    parser.add_argument("--output-dir", default="demo_output/train_embedding", help="path or URL of the checkpoints")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # recckpt logs a line for each save and load
    ids, labels = read_ratings(args.ratings) if args.ratings else generated_clicks(0)
    run = Run(ClickLog(ids, labels, args.batch_size, 0), args.output_dir, args.save_interval)
    start = run.manager.restore()
    print(f"resuming at step {start}" if start else f"starting, with {len(labels):,} clicks", flush=True)
    run.train(args.steps, args.crash_at)


if __name__ == "__main__":
    main()
