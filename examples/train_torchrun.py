"""Train the click model of train_ctr.py on several ranks, and resume on any other number of them.

torchrun --standalone --nproc-per-node 2 examples/train_torchrun.py --steps 1000 --crash-at 800    # one rank dies
torchrun --standalone --nproc-per-node 3 examples/train_torchrun.py --steps 1500                   # goes on at step 750
python examples/train_torchrun.py --steps 2000                                                     # one rank is enough

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1    # see docs/distributed.md
torchrun --standalone --nproc-per-node 2 --max-restarts 1 examples/train_torchrun.py --steps 3000 --crash-at 2600

The rows of the tables lie on the ranks by their ids, the dense layers are copied to all of them by
DistributedDataParallel. All ranks go through the same batches, each with its share of the clicks, so a run has the
same batches on any number of ranks.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from click_log import FEATURES, ClickLog, generated_clicks, read_ratings
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from train_ctr import DeepFM

from recckpt import CheckpointManager, Saver
from recckpt.recis import filter_out_sparse_param
from recckpt.sparse import EmbeddingCollection, Normal, ShardedHashTable, SparseAdamW

PRINT_EVERY = 100


class ShardedDeepFM(DeepFM):
    """The same model, the rows of whose tables lie on all ranks."""

    def make_tables(self, row_size: int, rows_start_at: Normal) -> nn.Module:
        """Return tables that are looked up together."""
        return EmbeddingCollection(
            ShardedHashTable(row_size, name=name, initializer=rows_start_at) for name in FEATURES
        )

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, whichever ranks hold them."""
        found = self.tables({name: ids[:, column] for column, name in enumerate(FEATURES)})
        return torch.stack([found[name] for name in FEATURES], dim=1)


class SharedClickLog(ClickLog):
    """The share of one rank in every batch; the position is that of all ranks together."""

    def share(self, rank: int, n_ranks: int) -> SharedClickLog:
        """Leave the other clicks to the other ranks."""
        self.rank, self.n_ranks = rank, n_ranks
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Return the ids and labels of this rank, of which there may be none, and count those of all."""
        ids, labels = super().__next__()
        self.n_clicks = len(labels)
        return ids[self.rank :: self.n_ranks], labels[self.rank :: self.n_ranks]

    def merge_io_state(self, states: list[dict[str, int]], index: int, count: int) -> dict[str, int]:
        """Return the position on another number of ranks: that of any, since all are at the same batch."""
        return states[0]


class Run:
    """A model, its two optimizers, its data, and the manager that checkpoints all of them, on one of the ranks."""

    def __init__(self, clicks: SharedClickLog, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.clicks = clicks
        self.model = ShardedDeepFM(seed=args.seed)
        self.call: nn.Module = nn.parallel.DistributedDataParallel(self.model) if clicks.n_ranks > 1 else self.model
        self.sparse_optim = SparseAdamW(filter_out_sparse_param(self.model), lr=0.01)
        self.dense_optim = torch.optim.Adam(self.model.parameters(), lr=0.001)
        self.saver = Saver(self.model, self.sparse_optim, args.output_dir, max_keep=args.max_keep)
        self.saver.register_for_checkpointing("dense_optim", self.dense_optim)
        self.saver.register_io_state("clicks", clicks)
        self.manager = CheckpointManager(self.saver, args.save_interval)

    def train(self, steps: int, *, crash_at: int | None = None) -> None:
        """Train up to ``steps`` in all, and save at the end."""
        total, n_batches = 0.0, 0
        for ids, labels in islice(self.clicks, max(0, steps - self.manager.global_step)):
            total, n_batches = total + self.train_batch(ids, labels), n_batches + 1
            self.manager.step()  # collective: all ranks count, and save together
            step = self.manager.global_step
            if step % PRINT_EVERY == 0 or step == steps:
                loss = sum(of_all_ranks(total)) / self.clicks.n_ranks / n_batches
                say(f"step {step}  epoch {self.clicks.epoch}  loss {loss:.4f}")
                total, n_batches = 0.0, 0
            if step == crash_at and self.clicks.rank == self.clicks.n_ranks - 1 and not is_restarted():
                print(f"step {step}  rank {self.clicks.rank} killed", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        self.manager.save()

    def train_batch(self, ids: Tensor, labels: Tensor) -> float:
        """Learn from one batch and return the part of this rank in its loss."""
        # Gradients are averaged over ranks, so this is the mean over the whole batch, though shares differ in size.
        share = self.clicks.n_ranks / self.clicks.n_clicks
        loss = binary_cross_entropy_with_logits(self.call(ids), labels, reduction="sum") * share
        self.sparse_optim.zero_grad()
        self.dense_optim.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.sparse_optim.step()
        self.dense_optim.step()
        return loss.item()


def of_all_ranks(value: Any) -> list[Any]:
    """Return the values of all ranks. Collective."""
    values = [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


def is_restarted() -> bool:
    """Say whether torchrun has started the ranks again after one died."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def say(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def main(argv: list[str] | None = None) -> None:
    """Train from the newest checkpoint of the output dir on, whatever number of ranks saved it, or from the start."""
    args = parse_args(argv)
    torch.set_num_threads(1)  # these batches are too small to be worth sharing between threads
    rank, n_ranks = 0, 1
    if "WORLD_SIZE" in os.environ:  # under torchrun
        dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
        rank, n_ranks = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    train(args, rank, n_ranks)
    if dist.is_initialized():
        gc.collect()  # what holds process groups: their threads, but those of DDP, end before the interpreter
        dist.destroy_process_group()


def train(args: argparse.Namespace, rank: int, n_ranks: int) -> None:
    """Train from the newest checkpoint to the last step."""
    ids, labels = read_ratings(args.ratings) if args.ratings else generated_clicks(args.seed)
    run = Run(SharedClickLog(ids, labels, args.batch_size, args.seed).share(rank, n_ranks), args)
    start = run.manager.restore()
    say(f"number of ranks: {n_ranks}; " + (f"resuming at step {start}" if start else "starting"))
    run.train(args.steps, crash_at=args.crash_at)
    rows = of_all_ranks([len(table) for table in run.sparse_optim.tables.values()])
    say(f"done at step {run.manager.global_step}: rows of {', '.join(run.sparse_optim.tables)} by rank: {rows}")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratings", metavar="FILE", help="MovieLens ratings.csv[.gz]; made-up clicks without it")
    parser.add_argument("--steps", type=int, default=1000, help="train up to this step, 1000 unless told")
    parser.add_argument("--batch-size", type=int, default=512, help="clicks of all ranks together")
    parser.add_argument("--output-dir", default="demo_output/train_torchrun", help="path or URL that all ranks see")
    parser.add_argument("--save-interval", type=int, default=250, help="steps between checkpoints")
    parser.add_argument("--max-keep", type=int, default=2, help="checkpoints to keep")
    parser.add_argument("--crash-at", type=int, metavar="STEP", help="SIGKILL the last rank right after STEP, once")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that ranks wait for each other")
    parser.add_argument("--seed", type=int, default=0, help="of the made-up clicks, their order and the first weights")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
