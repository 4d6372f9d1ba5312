"""Train a click model that saves in the background, keeps what policies say, and saves before a SIGTERM ends it.

python examples/train_async.py                                   # for each save: how long training stood still
python examples/train_async.py --steps 2000                      # goes on at step 1000
python examples/train_async.py --steps 3000 --sigterm-at 2345    # as when the machine is wanted for others
python examples/train_async.py --plot steps.png                  # step times, beside two other ways to save
"""

from __future__ import annotations

import argparse
import logging
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import torch
from click_log import ClickLog, generated_clicks
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from train_ctr import DeepFM

from recckpt import CheckpointManager, Saver
from recckpt.policies import Best, EveryNth, EverySeconds, EverySteps, Newest, OnSignal
from recckpt.recis import filter_out_sparse_param
from recckpt.save.save_info import SaveInfo
from recckpt.sparse import SparseAdamW


class Run:
    """A model with old items beside those of the clicks, its optimizers, its data, and the manager of its saves."""

    def __init__(self, args: argparse.Namespace, output_dir: Path, *, async_save: bool = True) -> None:
        torch.manual_seed(args.seed)
        self.clicks = ClickLog(*generated_clicks(args.seed), args.batch_size, args.seed)
        self.model = DeepFM(seed=args.seed)
        self.sparse_optim = SparseAdamW(filter_out_sparse_param(self.model), lr=0.01)
        self.dense_optim = torch.optim.Adam(self.model.parameters(), lr=0.001)
        every = args.save_interval
        keep = Newest(2) | EveryNth(5 * every) | Best(1, "loss", "min")
        self.saver = Saver(self.model, self.sparse_optim, str(output_dir), max_keep=keep, on_save=tell)
        self.saver.register_for_checkpointing("dense_optim", self.dense_optim)
        self.saver.register_io_state("clicks", self.clicks)
        self.manager = CheckpointManager(
            self.saver,
            EverySteps(every) | EverySeconds(600),
            async_save=async_save,  # not "latest": EveryNth goes by the step, which that puts off where saves take long
            ephemeral=every // 5 or None,  # between the others, for a restart; only the newest stays
            save_on_signal=OnSignal((signal.SIGTERM, signal.SIGUSR1), grace_sec=60),
        )
        self.step_sec: list[float] = []
        if self.manager.restore() == 0:
            self.sparse_optim.tables["item"](torch.arange(args.old_items))  # makes their rows

    def train(self, steps: int, sigterm_at: int | None = None) -> None:
        """Train up to ``steps`` in all."""
        loss = 0.7
        with self.manager:  # saves the last step, and waits for what is under way
            for ids, labels in islice(self.clicks, max(0, steps - self.manager.global_step)):
                began = time.perf_counter()
                loss += 0.05 * (self.train_batch(ids, labels) - loss)
                if self.manager.global_step + 1 == sigterm_at:
                    signal.raise_signal(signal.SIGTERM)
                self.end_step(loss)
                self.step_sec.append(time.perf_counter() - began)
        print(f"done at step {self.manager.global_step}, loss {loss:.3f}; {self.manager.counts}", flush=True)

    def train_batch(self, ids: Tensor, labels: Tensor) -> float:
        """Learn from one batch and return its loss."""
        loss = binary_cross_entropy_with_logits(self.model(ids), labels)
        self.sparse_optim.zero_grad()
        self.dense_optim.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.sparse_optim.step()
        self.dense_optim.step()
        return loss.item()

    def end_step(self, loss: float) -> None:
        """Count the step, and save if it is time."""
        self.manager.step(metrics={"loss": loss})


def tell(info: SaveInfo) -> None:
    """Say how a save went; called in its thread, once it is committed."""
    print(
        f"{info.ckpt_id}{' (ephemeral)' if info.ephemeral else ''}: training stood still for "
        f"{1e3 * info.blocked_sec:.1f} ms of {info.seconds:.2f} s; {info.n_bytes / 1e6:.0f} MB, "
        f"{info.kept_rows:,} of {info.n_rows:,} rows were copied aside",
        flush=True,
    )


class CopiesFirst(Run):
    """Copies all tables, then writes the copies beside training, as torch.distributed.checkpoint.async_save does."""

    def __init__(self, args: argparse.Namespace, output_dir: Path) -> None:
        super().__init__(argparse.Namespace(**{**vars(args), "save_interval": 10**9}), output_dir)
        self._copy_every = max(1, args.save_interval // 5)
        self._writer = ThreadPoolExecutor(1)
        self._written: Future[None] | None = None

    def end_step(self, loss: float) -> None:
        """Count the step, and copy if it is time."""
        super().end_step(loss)
        if self.manager.global_step % self._copy_every == 0:
            if self._written is not None:
                self._written.result()
            tables = self.sparse_optim.tables.items()
            copies = {name: {"id": t.ids(), "embedding": t.embeddings(), **t.slots} for name, t in tables}
            self._written = self._writer.submit(torch.save, copies, f"{self.saver.output_dir}/copies.pt")


def compare(args: argparse.Namespace) -> None:
    """Train in three ways from the start, and plot how long the steps took."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, sharex=True, sharey=True, figsize=(9, 7), layout="constrained")
    ways: dict[str, Callable[[Path], Run]] = {
        "training waits for each save": lambda url: Run(args, url, async_save=False),
        "all is copied, then written beside training": lambda url: CopiesFirst(args, url),
        "async_save=True": lambda url: Run(args, url),
    }
    for number, (way, make) in enumerate(ways.items()):
        print(f"== {way}", flush=True)
        output_dir = args.output_dir / f"way{number}"
        shutil.rmtree(output_dir, ignore_errors=True)  # of an earlier plot
        run = make(output_dir)
        run.train(args.steps)
        axes[number].semilogy([1e3 * seconds for seconds in run.step_sec], linewidth=0.7)
        axes[number].set(title=way, ylabel="ms a step")
    axes[-1].set_xlabel("step")
    figure.savefig(args.plot)
    print(f"plotted to {args.plot}")


def main(argv: list[str] | None = None) -> None:
    """Train from the newest checkpoint of the output dir on, or from the start."""
    args = parse_args(argv)
    torch.set_num_threads(1)  # these batches are too small to be worth sharing between threads
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if args.plot:
        compare(args)
        return
    run = Run(args, args.output_dir)
    start = run.manager.global_step
    print(f"resuming at step {start}" if start else "starting", flush=True)
    run.train(args.steps, args.sigterm_at)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="train up to this step, 1000 unless told")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--old-items", type=int, default=300_000, help="rows that the item table starts with")
    parser.add_argument("--output-dir", type=Path, default=Path("demo_output/train_async"))
    parser.add_argument("--save-interval", type=int, default=250, help="steps between checkpoints")
    parser.add_argument("--sigterm-at", type=int, metavar="STEP", help="send this process a SIGTERM in STEP")
    parser.add_argument("--plot", type=Path, metavar="PNG", help='needs matplotlib: pip install ".[examples]"')
    parser.add_argument("--seed", type=int, default=0, help="of the made-up clicks, their order and the first weights")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
