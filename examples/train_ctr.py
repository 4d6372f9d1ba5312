"""Train a click model that saves as it goes, and resumes where it was when it is run again.

python examples/train_ctr.py --steps 1000                       # from the start
python examples/train_ctr.py --steps 2000                       # goes on at step 1000
python examples/train_ctr.py --steps 3000 --crash-at 2550       # dies between two saves
python examples/train_ctr.py --steps 3000                       # goes on at step 2500
python examples/train_ctr.py --deltas --save-interval 100        # saves only what has changed
python examples/train_ctr.py --ratings ratings.csv.gz --output-dir runs/movies
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
from itertools import islice

import torch
from click_log import FEATURES, ClickLog, generated_clicks, read_ratings
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from recckpt import CheckpointManager, Saver
from recckpt.recis import filter_out_sparse_param
from recckpt.sparse import HashTable, Normal, SparseAdamW

PRINT_EVERY = 100


class DeepFM(nn.Module):
    """Wide, pairwise and deep: every id has one row, whose first value is its wide weight.

    Guo et al., "DeepFM: a factorization-machine based neural network for CTR prediction", IJCAI 2017.
    """

    def __init__(self, dim: int = 16, hidden: int = 64, seed: int = 0) -> None:
        super().__init__()
        self.tables = self.make_tables(1 + dim, Normal(std=0.01, seed=seed))
        self.deep = nn.Sequential(
            nn.Linear(len(FEATURES) * dim, hidden),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(hidden, 1),
        )

    def make_tables(self, row_size: int, rows_start_at: Normal) -> nn.Module:
        """Return a table for each feature."""
        return nn.ModuleList(HashTable(row_size, name=name, initializer=rows_start_at) for name in FEATURES)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows of ids of shape (batch, features), shape (batch, features, row_size)."""
        return torch.stack([table(ids[:, column]) for column, table in enumerate(self.tables.children())], dim=1)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of a click, shape (batch,), for ids of shape (batch, features)."""
        rows = self.rows(ids)
        wide, factors = rows[..., 0].sum(1), rows[..., 1:]
        pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
        deep: Tensor = self.deep(factors.flatten(1))
        return wide + pairs + deep.squeeze(1)


class Run:
    """A model, its two optimizers, its data, and the manager that checkpoints all of them."""

    def __init__(
        self, clicks: ClickLog, output_dir: str, *, save_interval: int, max_keep: int, seed: int, deltas: bool = False
    ) -> None:
        torch.manual_seed(seed)
        self.clicks = clicks
        self.model = DeepFM(seed=seed)
        self.sparse_optim = SparseAdamW(filter_out_sparse_param(self.model), lr=0.01)
        self.dense_optim = torch.optim.Adam(self.model.parameters(), lr=0.001)
        self.saver = Saver(self.model, self.sparse_optim, output_dir, max_keep=max_keep, deltas=deltas)
        self.saver.register_for_checkpointing("dense_optim", self.dense_optim)
        self.saver.register_io_state("clicks", clicks)
        self.manager = CheckpointManager(self.saver, save_interval)

    def train(self, steps: int, *, crash_at: int | None = None) -> None:
        """Train up to ``steps`` in all, and save at the end."""
        total, n_batches = 0.0, 0
        for ids, labels in islice(self.clicks, max(0, steps - self.manager.global_step)):
            total, n_batches = total + self.train_batch(ids, labels), n_batches + 1
            self.manager.step()  # counts, and saves every save_interval steps
            step = self.manager.global_step
            if step % PRINT_EVERY == 0 or step == steps:
                print(f"step {step}  epoch {self.clicks.epoch}  loss {total / n_batches:.4f}", flush=True)
                total, n_batches = 0.0, 0
            if step == crash_at:
                print(f"step {step}  killed", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        self.manager.save()

    def train_batch(self, ids: Tensor, labels: Tensor) -> float:
        """Learn from one batch and return its loss."""
        loss = binary_cross_entropy_with_logits(self.model(ids), labels)
        self.sparse_optim.zero_grad()
        self.dense_optim.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.sparse_optim.step()
        self.dense_optim.step()
        return loss.item()


def main(argv: list[str] | None = None) -> None:
    """Train from the newest checkpoint of the output dir on, or from the start."""
    args = parse_args(argv)
    torch.set_num_threads(1)  # these batches are too small to be worth sharing between threads
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # recckpt logs a line for each save and load
    ids, labels = read_ratings(args.ratings) if args.ratings else generated_clicks(args.seed)
    run = Run(
        ClickLog(ids, labels, args.batch_size, args.seed),
        args.output_dir,
        save_interval=args.save_interval,
        max_keep=args.max_keep,
        seed=args.seed,
        deltas=args.deltas,
    )
    start = run.manager.restore()
    print(f"resuming at step {start}" if start else f"starting, with {len(labels):,} clicks", flush=True)
    run.train(args.steps, crash_at=args.crash_at)
    rows = ", ".join(f"{len(table):,} rows of {table.name}" for table in run.sparse_optim.tables.values())
    print(f"done at step {run.manager.global_step}: {rows}; see: recckpt ls {args.output_dir}")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratings", metavar="FILE", help="MovieLens ratings.csv[.gz]; made-up clicks without it")
    parser.add_argument("--steps", type=int, default=1000, help="train up to this step, 1000 unless told")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--output-dir", default="demo_output/train_ctr", help="path or URL of the checkpoints")
    parser.add_argument("--save-interval", type=int, default=250, help="steps between checkpoints")
    parser.add_argument("--max-keep", type=int, default=2, help="checkpoints to keep")
    parser.add_argument("--deltas", action="store_true", help="save what has changed since the checkpoint before")
    parser.add_argument("--crash-at", type=int, metavar="STEP", help="SIGKILL this process right after STEP")
    parser.add_argument("--seed", type=int, default=0, help="of the made-up clicks, their order and the first weights")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
